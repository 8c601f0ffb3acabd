//! The time of arrivals.

use std::time::Instant;

use rustix::time::{ClockId, Timespec, clock_gettime};

/// A clock for what is measured in seconds. Its time may be some milliseconds old, and it costs a fraction of the exact one, which each
/// message would have to wait for.
#[derive(Debug, Default)]
pub(super) struct Clock {
    /// The system's coarse time at the last look at the exact clock, and the exact time then.
    last: Option<(Timespec, Instant)>,
}

impl Clock {
    /// Returns the time.
    pub(super) fn now(&mut self) -> Instant {
        let coarse = clock_gettime(ClockId::MonotonicCoarse);
        match self.last {
            Some((last, exact)) if last == coarse => exact,
            _ => {
                let exact = Instant::now();
                self.last = Some((coarse, exact));
                exact
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_clock_goes_on() {
        let mut clock = Clock::default();
        let (first, start) = (clock.now(), Instant::now());
        assert!(clock.now() >= first);
        std::thread::sleep(Duration::from_millis(50));
        assert!(clock.now() > start, "a tick of the system is shorter");
    }
}
