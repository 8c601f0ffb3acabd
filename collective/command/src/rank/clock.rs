//! The clock that all processes of this machine share.

use rustix::time::{ClockId, clock_gettime};

/// Ranks with a core of their own begin a timed part at multiples of this many nanoseconds.
const START: u64 = 20_000;

/// Waits until the next multiple of 20 µs. All ranks that have left a barrier at about the same time begin together, so that
/// the skew of the barrier does not count. Waits busily.
pub(crate) fn wait_for_start() {
    let start = (now() / START + 1) * START;
    while now() < start {
        std::hint::spin_loop();
    }
}

/// Returns the time in nanoseconds.
pub(crate) fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    // The clock begins at zero, so neither field is ever negative.
    u64::try_from(time.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_start_is_behind_a_multiple() {
        let before = now();
        wait_for_start();
        assert!(now() / START > before / START);
    }
}
