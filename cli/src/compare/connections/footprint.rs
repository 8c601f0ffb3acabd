//! What the connections of both processes occupy: memory and descriptors.

use std::fs;

use tonic_rdma_commands::Failure;

/// Memory and descriptors of both processes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Footprint {
    /// Resident memory. A page that both processes map counts once.
    pub(crate) memory: u64,
    pub(crate) descriptors: u64,
}

impl Footprint {
    /// Measures this process and the process `server`, which must be this user's.
    pub(crate) fn measure(server: u32) -> Result<Self, Failure> {
        let server = server.to_string();
        let mut sum = Self::default();
        for process in ["self", server.as_str()] {
            sum.memory += memory(process)?;
            sum.descriptors += descriptors(process)?;
        }
        Ok(sum)
    }

    /// Returns what each of `connections` connections takes if they explain the growth since `before`.
    pub(crate) fn each(self, before: Self, connections: usize) -> Self {
        let each = |now: u64, before: u64| now.saturating_sub(before) / connections.max(1) as u64;
        Self {
            memory: each(self.memory, before.memory),
            descriptors: each(self.descriptors, before.descriptors),
        }
    }
}

/// Returns the proportional set size of a process in bytes: the kernel divides a shared page by the number of processes
/// that map it.
fn memory(process: &str) -> Result<u64, Failure> {
    let path = format!("/proc/{process}/smaps_rollup");
    let text = fs::read_to_string(&path)
        .map_err(|error| Failure::run(format!("can't read {path}")).because(error))?;
    pss(&text).ok_or_else(|| Failure::run(format!("{path} has no line Pss")))
}

fn pss(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("Pss:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

fn descriptors(process: &str) -> Result<u64, Failure> {
    let path = format!("/proc/{process}/fd");
    let open =
        fs::read_dir(&path).map_err(|error| Failure::run(format!("can't read {path}")).because(error))?;
    Ok(open.count() as u64)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    #[test]
    fn memory_that_was_written_is_found() {
        let this = std::process::id();
        let before = Footprint::measure(this).unwrap();
        let written = vec![1_u8; 64 << 20];
        let after = Footprint::measure(this).unwrap();
        // Both processes are this one.
        let each = after.each(before, 2);
        assert!(each.memory > 48 << 20 && each.memory < 1 << 30, "{each:?} for {}", written.len());
        assert!(after.descriptors >= 2 * 3);
    }

    #[test]
    fn the_line_of_the_kernel_is_parsed() {
        assert_eq!(pss("00400000-7ff [rollup]\nRss: 2 kB\nPss:                 103 kB\n"), Some(103 << 10));
        assert_eq!(pss("Pss: many kB"), None);
    }

    #[test]
    fn a_process_that_is_not_there_is_named() {
        let error = Footprint::measure(u32::MAX).unwrap_err().to_string();
        assert!(error.contains("/proc/4294967295/smaps_rollup"), "{error}");
    }

    #[test]
    fn a_process_that_shrank_takes_nothing() {
        let before = Footprint { memory: 10, descriptors: 10 };
        assert_eq!(
            Footprint { memory: 5, descriptors: 16 }.each(before, 3),
            Footprint { memory: 0, descriptors: 2 }
        );
    }
}
