//! The yields of a thread that polls without sleeping, so that it does not starve other tasks.

use std::time::{Duration, Instant};

/// Longest time between two yields.
const MAX_HOLD: Duration = Duration::from_micros(100);

/// Number of looks without a result between two readings of the clock.
const LOOKS: u32 = 256;

/// Time without a result after which nothing is expected soon. The thread sleeps between looks from then on.
const IDLE: Duration = Duration::from_secs(1);
const IDLE_SLEEP: Duration = Duration::from_millis(1);

/// Counts looks without a result, and decides when the thread yields.
#[derive(Debug)]
pub(super) struct YieldTimer {
    looks: u32,
    yielded: Instant,
    found: Instant,
}

impl YieldTimer {
    pub(super) fn new() -> Self {
        let now = Instant::now();
        Self { looks: 0, yielded: now, found: now }
    }

    /// Notes a result at `now`.
    pub(super) fn found(&mut self, now: Instant) {
        (self.looks, self.found) = (0, now);
    }

    /// Notes a look without a result.
    pub(super) fn missed(&mut self) {
        self.looks += 1;
        std::hint::spin_loop();
    }

    /// Returns whether it is time to yield.
    pub(super) fn is_due(&mut self) -> bool {
        if self.looks == 0 {
            return self.found - self.yielded > MAX_HOLD;
        }
        self.looks.is_multiple_of(LOOKS) && self.yielded.elapsed() > MAX_HOLD
    }

    /// Yields to other tasks of this runtime, and to other processes where there are more of them than cores.
    pub(super) async fn yield_now(&mut self) {
        if self.found.elapsed() > IDLE {
            tokio::time::sleep(IDLE_SLEEP).await;
        } else {
            std::thread::yield_now();
            tokio::task::yield_now().await;
        }
        self.yielded = Instant::now();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_yield_is_due_after_a_while_with_and_without_results() {
        let mut yield_timer = YieldTimer::new();
        let start = yield_timer.yielded;
        yield_timer.found(start + MAX_HOLD);
        assert!(!yield_timer.is_due());
        yield_timer.found(start + 2 * MAX_HOLD);
        assert!(yield_timer.is_due());
        std::thread::sleep(2 * MAX_HOLD);
        let looks = (1..=LOOKS).map(|_| {
            yield_timer.missed();
            yield_timer.is_due()
        });
        assert_eq!(looks.filter(|due| *due).count(), 1);
    }
}
