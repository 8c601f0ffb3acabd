//! Ports that all ranks of a job compute alike.

/// The first of the ports. Linux gives ports from 32768 on to outgoing connections, so these are below.
const FIRST: u16 = 20_000;
const COUNT: u64 = 12_000;

/// Returns the port of a job, which is not `taken`. Two jobs of one host get the same port in one case of 12000.
pub(super) fn of(job: &str, taken: Option<u16>) -> u16 {
    // FNV-1a, because a hash of the standard library may differ between processes.
    let hash = job.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    let nth = |hash: u64| FIRST + (hash % COUNT) as u16;
    let port = nth(hash);
    if Some(port) == taken { nth(hash.wrapping_add(1)) } else { port }
}

#[cfg(test)]
mod tests {
    use super::{COUNT, FIRST, of};

    #[test]
    fn ports_are_in_range_spread_and_not_the_taken_one() {
        let ports: std::collections::BTreeSet<u16> =
            (0..1000).map(|job| of(&job.to_string(), None)).collect();
        assert!(ports.len() > 900, "only {} ports for 1000 jobs", ports.len());
        let last = FIRST + COUNT as u16 - 1;
        assert!(ports.iter().all(|port| (FIRST..=last).contains(port)));
        for job in 0..1000 {
            let job = job.to_string();
            let port = of(&job, None);
            let other = of(&job, Some(port));
            assert!(other != port && (FIRST..=last).contains(&other));
        }
    }
}
