//! Waiting for registered memory.

use std::time::{Duration, Instant};

/// Tracks READs that wait for memory in use by other connections of this process.
#[derive(Debug, Default)]
pub(super) struct Shortage {
    /// The start of the shortage, and the time of the next attempt.
    times: Option<(Instant, Instant)>,
    is_new: bool,
}

impl Shortage {
    /// Time between two attempts. Connections do not notify one another when they free memory.
    const RETRY: Duration = Duration::from_millis(5);
    /// Longest shortage, after which the connection ends.
    const PATIENCE: Duration = Duration::from_secs(30);

    /// Notes one more attempt that found no memory. Returns whether to go on waiting.
    pub(super) fn keep_waiting(&mut self, now: Instant) -> bool {
        self.is_new = self.times.is_none();
        let (since, _) = self.times.unwrap_or((now, now));
        self.times = Some((since, now + Self::RETRY));
        now.saturating_duration_since(since) < Self::PATIENCE
    }

    /// Returns when to try again, if there is a shortage.
    pub(super) fn retry(&self) -> Option<Instant> {
        self.times.map(|(_, retry)| retry)
    }

    /// Returns whether the shortage began since the last call.
    pub(super) fn is_new(&mut self) -> bool {
        std::mem::take(&mut self.is_new)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shortage_is_waited_out_for_a_while() {
        let (mut shortage, now) = (Shortage::default(), Instant::now());
        assert_eq!((shortage.retry(), shortage.is_new()), (None, false));
        assert!(shortage.keep_waiting(now) && shortage.is_new() && !shortage.is_new());
        assert_eq!(shortage.retry(), Some(now + Shortage::RETRY));
        let later = now + Shortage::PATIENCE - Duration::from_millis(1);
        assert!(shortage.keep_waiting(later) && !shortage.is_new());
        assert_eq!(shortage.retry(), Some(later + Shortage::RETRY));
        assert!(!shortage.keep_waiting(now + Shortage::PATIENCE));
    }
}
