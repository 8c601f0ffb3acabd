//! How long the other packages of tonic-rdma spin for a peer, in one table, and spins whose loop belongs to
//! the caller.

use std::time::{Duration, Instant};

use super::pace::Pace;

/// Polls between two readings of the clock.
const POLLS_PER_CLOCK_READ: u32 = 16;

/// The spin of a future that waits for a collective operation. Then the progress thread goes on.
pub const COLLECTIVE_FUTURE: Duration = Duration::from_micros(20);
/// The spin of a thread that carries out collective operations.
pub const COLLECTIVE_THREAD: Duration = Duration::from_micros(100);
/// How long such a thread yields its core after each poll, before it naps between polls. Nothing wakes it,
/// because other ranks write into memory.
pub const COLLECTIVE_YIELDS: Duration = Duration::from_millis(1);
/// The longest nap of such a thread.
pub const COLLECTIVE_NAP: Duration = Duration::from_millis(1);
/// A nap is at most this part of the time waited so far, so that it delays the operation little.
pub const COLLECTIVE_NAP_SHARE: u32 = 16;

/// A spin whose loop belongs to the caller, as that of a module without a clock.
#[derive(Debug, Default)]
pub struct Spinning {
    polls: u32,
    /// The start, and the last yield.
    since: Option<(Instant, Instant)>,
}

impl Spinning {
    /// Decides after a poll that found nothing whether to poll again. The first polls are always worth it, so
    /// the clock is read after some polls only. Returns the time if it was read.
    ///
    /// # Errors
    /// Returns the time as an error once the budget of `pace` is spent.
    #[inline]
    pub fn again(&mut self, pace: &mut Pace) -> Result<Option<Instant>, Instant> {
        std::hint::spin_loop();
        self.polls = self.polls.wrapping_add(1);
        if !self.polls.is_multiple_of(POLLS_PER_CLOCK_READ) {
            return Ok(None);
        }
        self.again_at(pace, Instant::now()).map(Some)
    }

    fn again_at(&mut self, pace: &mut Pace, now: Instant) -> Result<Instant, Instant> {
        let (start, last_yield) = self.since.get_or_insert((now, now));
        pace.begin(now);
        let budget = pace.budget(now);
        if now - *start >= budget {
            if !budget.is_zero() {
                pace.missed();
            }
            return Err(now);
        }
        if now - *last_yield > pace.yield_every() {
            *last_yield = pace.yield_core(now);
        }
        Ok(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spin_lasts_as_long_as_the_budget() {
        let (mut pace, mut spinning) = (Pace::new(COLLECTIVE_THREAD), Spinning::default());
        // No yield seems to take time, because all of this is later than its end.
        let start = Instant::now() + Duration::from_secs(3600);
        let budget = pace.budget(start);
        assert!(!budget.is_zero());
        for part in [0, 1, 3] {
            let now = start + budget * part / 4;
            assert_eq!(spinning.again_at(&mut pace, now), Ok(now));
        }
        assert_eq!(spinning.again_at(&mut pace, start + budget), Err(start + budget));
        assert!(pace.budget(start + budget).is_zero(), "the spin has missed");
    }

    #[test]
    fn without_a_budget_some_polls_are_left() {
        let (mut pace, mut spinning) = (Pace::new(Duration::ZERO), Spinning::default());
        for _ in 1..POLLS_PER_CLOCK_READ {
            assert_eq!(spinning.again(&mut pace), Ok(None));
        }
        assert!(spinning.again(&mut pace).is_err());
    }
}
