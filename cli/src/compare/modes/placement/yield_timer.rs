//! Polling without starving others: what a thread that never sleeps owes its runtime.

use std::time::{Duration, Instant};

/// How long others may have to wait.
const MAX_HOLD: Duration = Duration::from_micros(100);

/// Looks in vain between two readings of the clock.
const LOOKS: u32 = 256;

/// From then on nobody is expected to come soon, and looking takes naps.
const IDLE: Duration = Duration::from_secs(1);
const IDLE_SLEEP: Duration = Duration::from_millis(1);

/// Counts looks in vain, and says when others are to have their turn.
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

    /// There was something at `now`.
    pub(super) fn found(&mut self, now: Instant) {
        (self.looks, self.found) = (0, now);
    }

    /// There was nothing.
    pub(super) fn missed(&mut self) {
        self.looks += 1;
        std::hint::spin_loop();
    }

    /// Whether others are to have a turn now.
    pub(super) fn is_due(&mut self) -> bool {
        if self.looks == 0 {
            return self.found - self.yielded > MAX_HOLD;
        }
        self.looks.is_multiple_of(LOOKS) && self.yielded.elapsed() > MAX_HOLD
    }

    /// Lets others have their turn: other tasks of this runtime, and, where there are more processes than cores, those.
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
    fn a_turn_is_due_after_a_while_whether_or_not_anything_is_found() {
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
