//! A limit on the number of log lines that peers can cause, at once and in each second.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::panics::lock;

/// Lets a burst of lines through at once, then one line each second, and counts the suppressed lines.
#[derive(Debug)]
pub struct Throttle {
    burst: u32,
    state: Mutex<ThrottleState>,
}

#[derive(Debug)]
struct ThrottleState {
    /// The time when the next line would be due without a burst.
    due: Option<Instant>,
    suppressed: u64,
}

impl Throttle {
    /// The default burst: number of lines from one statement that may be written at once.
    pub const BURST: u32 = 10;
    const PAUSE: Duration = Duration::from_secs(1);

    /// Creates a throttle that lets `burst` lines through at once. Takes 0 as 1.
    pub const fn new(burst: u32) -> Self {
        Self { burst, state: Mutex::new(ThrottleState { due: None, suppressed: 0 }) }
    }

    /// Returns the number of lines suppressed since the last line, if a line may be written at `now`;
    /// otherwise `None`.
    pub fn admit(&self, now: Instant) -> Option<u64> {
        let mut state = lock(&self.state);
        let due = state.due.map_or(now, |due| due.max(now));
        if due - now > Self::PAUSE * self.burst.saturating_sub(1) {
            state.suppressed += 1;
            return None;
        }
        state.due = Some(due + Self::PAUSE);
        Some(std::mem::take(&mut state.suppressed))
    }
}

/// Writes a log line of the level `warn` or `info` that a peer may cause. Each statement has a throttle of
/// its own. This macro is a part of [`unstable`](crate::unstable).
#[macro_export]
macro_rules! throttled {
    ($level:ident, $($line:tt)+) => {{
        static THROTTLE: $crate::unstable::Throttle =
            $crate::unstable::Throttle::new($crate::unstable::Throttle::BURST);
        if let Some(suppressed) = THROTTLE.admit(std::time::Instant::now()) {
            tracing::$level!(suppressed, $($line)+);
        }
    }};
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_a_second_and_a_count_of_the_others() {
        let (throttle, now) = (Throttle::new(1), Instant::now());
        assert_eq!(throttle.admit(now), Some(0));
        assert_eq!(throttle.admit(now + Duration::from_millis(1)), None);
        assert_eq!(throttle.admit(now + Duration::from_millis(999)), None);
        assert_eq!(throttle.admit(now + Duration::from_secs(1)), Some(2));
        assert_eq!(throttle.admit(now + Duration::from_secs(2)), Some(0));
    }

    #[test]
    fn a_burst_comes_back_one_by_one() {
        let (throttle, now) = (Throttle::new(3), Instant::now());
        let flood = |now| (0..100).filter(|_| throttle.admit(now).is_some()).count();
        assert_eq!(flood(now), 3);
        assert_eq!(flood(now + Duration::from_millis(999)), 0);
        assert_eq!(throttle.admit(now + Duration::from_secs(1)), Some(197));
        assert_eq!(flood(now + Duration::from_secs(1)), 0);
        assert_eq!(flood(now + Duration::from_secs(3)), 2);
        assert_eq!(flood(now + Duration::from_secs(60)), 3);
    }
}
