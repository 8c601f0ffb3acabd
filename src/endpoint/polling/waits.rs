//! How long threads and futures spin for a peer, in one table, and spins whose loop belongs to the caller.

use std::time::{Duration, Instant};

use super::pace::Pace;

/// Polls between two readings of the clock.
pub const POLLS_PER_CLOCK_READ: u32 = 16;
/// Shortest spin. After a spin the queue has to be armed again, so a shorter spin is not worth its cost.
pub const SHORTEST: Duration = Duration::from_micros(20);
/// What the wake-up of a thread adds to the time of its wait, about.
pub(super) const WAKE_UP: Duration = Duration::from_micros(15);
/// A yield that takes longer than this shows a crowded core: another thread keeps the core for a time slice.
/// Threads that take turns, such as those of both sides, keep the core for a shorter time.
pub(super) const CROWDED: Duration = Duration::from_micros(1000);
/// Shortest and longest time between two yields. Between these limits, yields take a fortieth of the time at
/// most. On an emulated machine a yield takes microseconds.
pub(super) const YIELD_EVERY: [Duration; 2] = [Duration::from_micros(10), Duration::from_micros(60)];
/// Time between two yields, as a multiple of the cost of a yield.
pub(super) const YIELD_SHARE: u32 = 40;
/// In a yield shorter than this, no other thread ran.
pub(super) const SHORTEST_SWITCH: Duration = Duration::from_micros(4);
/// A yield that takes this many times as long as the shortest let another thread run.
pub(super) const SWITCH: u32 = 8;
/// Time between two yields while other threads use the core, too, as a multiple of the cost of a yield. The
/// time is short, because the spin waits for the work of these threads.
pub(super) const SHARED: u32 = 4;
/// Shortest time between two yields while other threads use the core, too.
pub(super) const SHARED_AT_LEAST: Duration = Duration::from_micros(1);
/// Time without spinning on a crowded core, at first and at most. The time doubles with each attempt on a
/// crowded core, because an attempt may cost a time slice of another thread, which is milliseconds.
pub(super) const LEAVE_ALONE: [Duration; 2] = [Duration::from_millis(2), Duration::from_millis(256)];
/// After this many yields on a core that is not crowded, the time without spinning is short again.
pub(super) const CALM: u32 = 64;
/// The longest spin of a future in a runtime with one thread, whose other tasks wait meanwhile. What such a
/// spin saves is the way through the scheduler, and no wake-up.
pub(super) const ONLY_THREAD: Duration = SHORTEST;
/// A call that began longer ago than this has let other tasks run before its first wait, so these tasks need
/// the only thread.
pub(super) const ALONE: Duration = Duration::from_micros(10);
/// The processors, in thousandths, from which on the poll task spins for a byte stream as for all else. With fewer
/// a spin often costs more time of processors than it saves (design page 3).
pub(super) const UNSHARED: u32 = 4000;
/// The longest time between completions of a byte stream for which spins pay with fewer processors than that.
pub(super) const DENSE: Duration = Duration::from_micros(30);
/// The spin of a future that waits for a collective operation. Then the progress thread goes on.
pub const COLLECTIVE_FUTURE: Duration = SHORTEST;
/// The spin of a thread that carries out collective operations.
pub const COLLECTIVE_THREAD: Duration = Duration::from_micros(100);
/// How long such a thread yields its core after each poll, before it naps between polls. Nothing wakes it,
/// because other ranks write into memory.
pub const COLLECTIVE_YIELDS: Duration = Duration::from_millis(1);
/// The longest nap of such a thread.
pub const COLLECTIVE_NAP: Duration = Duration::from_millis(1);
/// A nap is at most this part of the time waited so far, so that it delays the operation little.
pub const COLLECTIVE_NAP_SHARE: u32 = 16;
/// The spin of a graph's part whose crossing tensors other threads carry, which need the cores.
pub const GRAPH_CALLS: Duration = Duration::from_micros(100);
/// The spin of a graph's part that polls slots itself. Once it sleeps, each arrival costs two wake-ups: of a
/// thread that polls, and of this one. 100 µs are too short, because parts of a pipeline wait longer for one
/// another.
pub const GRAPH_SLOTS: Duration = Duration::from_micros(300);

/// A spin whose loop belongs to the caller, as that of a task or of a module without a clock.
#[derive(Debug, Default)]
pub struct Spinning {
    polls: u32,
    /// `None` before, and after an arrival that does not end the spin.
    pub(super) start: Option<Instant>,
    last_yield: Option<Instant>,
}

impl Spinning {
    /// Decides after a poll that found nothing whether to poll again. The first polls are always worth it, so
    /// the clock is read after some polls only.
    ///
    /// # Errors
    /// Returns the time as an error once the budget of `pace` is spent.
    #[inline]
    pub fn again(&mut self, pace: &mut Pace) -> Result<(), Instant> {
        if self.is_free() { Ok(()) } else { self.again_at(pace, Instant::now()) }
    }

    /// Returns whether this poll is worth it without a reading of the clock.
    #[inline]
    pub(super) fn is_free(&mut self) -> bool {
        std::hint::spin_loop();
        self.polls = self.polls.wrapping_add(1);
        !self.polls.is_multiple_of(POLLS_PER_CLOCK_READ)
    }

    /// As [`again`](Self::again), without free polls: decides at the time `now`. The first call begins the
    /// spin.
    ///
    /// # Errors
    /// As [`again`](Self::again).
    pub fn again_at(&mut self, pace: &mut Pace, now: Instant) -> Result<(), Instant> {
        self.again_by(pace, now, Instant::now)
    }

    /// As [`again_at`](Self::again_at), by the clock `clock`.
    pub(super) fn again_by(
        &mut self,
        pace: &mut Pace,
        now: Instant,
        clock: impl FnOnce() -> Instant,
    ) -> Result<(), Instant> {
        let start = *self.start.get_or_insert(now);
        let last_yield = self.last_yield.get_or_insert(now);
        pace.begin(now);
        let budget = pace.budget(now);
        if now - start >= budget {
            if !budget.is_zero() {
                pace.missed();
            }
            return Err(now);
        }
        if now - *last_yield > pace.yield_every() {
            *last_yield = pace.yield_core(now, clock);
            if pace.is_crowded(*last_yield) {
                return Err(*last_yield);
            }
        }
        Ok(())
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
            assert_eq!(spinning.again_at(&mut pace, now), Ok(()));
        }
        assert_eq!(spinning.again_at(&mut pace, start + budget), Err(start + budget));
        assert!(pace.budget(start + budget).is_zero(), "the spin has missed");
    }

    #[test]
    fn without_a_budget_some_polls_are_left() {
        let (mut pace, mut spinning) = (Pace::new(Duration::ZERO), Spinning::default());
        for _ in 1..POLLS_PER_CLOCK_READ {
            assert_eq!(spinning.again(&mut pace), Ok(()));
        }
        assert!(spinning.again(&mut pace).is_err());
    }
}
