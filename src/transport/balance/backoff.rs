//! The delays between dials to an endpoint.

use std::time::{Duration, Instant};

/// The delay from the start of one dial to the start of the next. It is short at first, and grows with each failure.
#[derive(Debug)]
pub(super) struct Backoff {
    delay: Duration,
    due: Instant,
}

impl Backoff {
    /// The first delay.
    const FIRST: Duration = Duration::from_millis(100);
    /// The longest delay.
    const MOST: Duration = Duration::from_secs(10);
    /// The factor by which each failure makes the delay longer.
    const GROWTH: f64 = 1.6;
    /// The part of a delay that is added or taken away at random. Without it all clients of a server that came back would dial at once.
    const JITTER: f64 = 0.2;

    pub(super) fn new() -> Self {
        Self { delay: Self::FIRST, due: Instant::now() }
    }

    /// Notes that a dial begins.
    pub(super) fn begin(&mut self) {
        let jitter = 1.0 + Self::JITTER * (2.0 * fastrand::f64() - 1.0);
        self.due = Instant::now() + self.delay.mul_f64(jitter);
    }

    /// Notes that the dial failed.
    pub(super) fn failed(&mut self) {
        self.delay = self.delay.mul_f64(Self::GROWTH).min(Self::MOST);
    }

    /// Notes that the connection ended. A connection that ends before the next dial is due counts as a failed dial, so a server that
    /// takes connections and drops them is not dialled more often than a server that refuses them.
    pub(super) fn ended(&mut self) {
        match self.remaining() {
            Duration::ZERO => self.delay = Self::FIRST,
            _ => self.failed(),
        }
    }

    /// Returns the time until the next dial is due.
    pub(super) fn remaining(&self) -> Duration {
        self.due.saturating_duration_since(Instant::now())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn delays_grow_to_a_limit_and_scatter() {
        let mut backoff = Backoff::new();
        let mut delays = Vec::new();
        for _ in 0..20 {
            backoff.begin();
            delays.push(backoff.delay);
            assert!(backoff.remaining() <= backoff.delay.mul_f64(1.0 + Backoff::JITTER));
            backoff.failed();
        }
        assert_eq!(delays[..2], [Backoff::FIRST, Duration::from_millis(160)]);
        assert!(delays.is_sorted());
        assert_eq!(*delays.last().unwrap(), Backoff::MOST);
    }

    #[test]
    fn a_connection_that_lasts_longer_than_the_delay_resets_the_delay() {
        let mut backoff = Backoff::new();
        backoff.delay = Backoff::MOST;
        backoff.begin();
        backoff.ended();
        assert_eq!(backoff.delay, Backoff::MOST, "it ended at once");
        backoff.due = Instant::now();
        backoff.ended();
        assert_eq!(backoff.delay, Backoff::FIRST, "it ended after the delay");
    }
}
