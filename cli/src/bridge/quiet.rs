//! Log lines that many connections have reason to write, at most one a second.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Lets one through each second and counts the others.
#[derive(Debug, Default)]
pub(crate) struct Quiet(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    last: Option<Instant>,
    suppressed: u64,
}

impl Quiet {
    const PAUSE: Duration = Duration::from_secs(1);

    /// Whether to speak now; if so, how often that was denied since the last time.
    pub(crate) fn may_speak(&self, now: Instant) -> Option<u64> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if state.last.is_some_and(|last| now.saturating_duration_since(last) < Self::PAUSE) {
            state.suppressed += 1;
            return None;
        }
        state.last = Some(now);
        Some(std::mem::take(&mut state.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_a_second_and_a_count_of_the_others() {
        let (quiet, now) = (Quiet::default(), Instant::now());
        assert_eq!(quiet.may_speak(now), Some(0));
        assert_eq!(quiet.may_speak(now + Duration::from_millis(1)), None);
        assert_eq!(quiet.may_speak(now + Duration::from_millis(999)), None);
        assert_eq!(quiet.may_speak(now + Duration::from_secs(1)), Some(2));
        assert_eq!(quiet.may_speak(now + Duration::from_secs(2)), Some(0));
    }
}
