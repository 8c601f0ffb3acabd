//! Short waits for answers in a runtime of one thread.
//!
//! If the runtime's thread has nothing else to do, a future that waits for an answer spares the way through the scheduler: it looks at the
//! queue itself for some microseconds. Otherwise the future would return `Pending`, the runtime would ask the system for events, and its
//! hook would look at the queue.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use super::queue::Polled;

/// Decides whether a future waits, and learns from the waits before.
///
/// Only one thread uses this at a time, that of the runtime, so no operation has to be atomic with another.
#[derive(Debug)]
pub(super) struct ShortWaits {
    /// Longest wait.
    longest: Duration,
    /// Waits in a row that brought no answer.
    failed: AtomicU32,
    /// Futures that do not wait, before one tries again.
    skips: AtomicU32,
    /// A wait has brought an answer since the last call of [`take_answered`](Self::take_answered).
    answered: AtomicBool,
}

impl ShortWaits {
    /// Longest wait. Answers that take longer are not worth it: what a wait saves is less than a microsecond.
    const LONGEST: Duration = Duration::from_micros(20);
    /// A call that began longer ago than this has let other tasks run before its first wait, so these tasks need the thread.
    const ALONE: Duration = Duration::from_micros(10);
    /// After so many waits in a row without an answer, the number of futures that do not wait grows no more.
    const MOST_FAILED: u32 = 8;

    /// Makes it for waits of `longest` at most, and never of more than 20 µs.
    pub(super) fn new(longest: Duration) -> Self {
        Self {
            longest: longest.min(Self::LONGEST),
            failed: AtomicU32::new(0),
            skips: AtomicU32::new(0),
            answered: AtomicBool::new(false),
        }
    }

    /// Returns the start of the wait of a future whose call began at `begun`, if it waits.
    pub(super) fn begin(&self, begun: Instant) -> Option<Instant> {
        let skips = self.skips.load(Ordering::Relaxed);
        if skips > 0 {
            self.skips.store(skips - 1, Ordering::Relaxed);
            return None;
        }
        let now = Instant::now();
        (!self.longest.is_zero() && Self::is_alone(begun, now)).then_some(now)
    }

    fn is_alone(begun: Instant, now: Instant) -> bool {
        now.saturating_duration_since(begun) <= Self::ALONE
    }

    /// Looks from `start` on until `is_done` (true). Returns false when the time is over, or when a look has made other tasks ready. Calls
    /// `is_done` after looks that found something, and with each look at the clock: another thread may have looked, too.
    pub(super) fn wait(
        &self,
        start: Instant,
        mut look: impl FnMut() -> Polled,
        mut is_done: impl FnMut() -> bool,
    ) -> bool {
        const LOOKS_PER_CLOCK: usize = 16;
        loop {
            for _ in 0..LOOKS_PER_CLOCK {
                let polled = look();
                if polled.completions > 0 {
                    if is_done() {
                        return self.note_answer();
                    }
                    if polled.woken + polled.ran > 0 {
                        return false;
                    }
                }
                std::hint::spin_loop();
            }
            if is_done() {
                return self.note_answer();
            }
            if start.elapsed() > self.longest {
                let failed = (self.failed.load(Ordering::Relaxed) + 1).min(Self::MOST_FAILED);
                self.failed.store(failed, Ordering::Relaxed);
                self.skips.store((1 << failed) - 1, Ordering::Relaxed);
                return false;
            }
        }
    }

    fn note_answer(&self) -> bool {
        self.failed.store(0, Ordering::Relaxed);
        self.answered.store(true, Ordering::Relaxed);
        true
    }

    /// Returns whether a wait has brought an answer since the last call of this function.
    pub(super) fn take_answered(&self) -> bool {
        let answered = self.answered.load(Ordering::Relaxed);
        if answered {
            self.answered.store(false, Ordering::Relaxed);
        }
        answered
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_micros(120);

    fn nothing() -> Polled {
        Polled::default()
    }

    fn begins(waits: &ShortWaits) -> bool {
        waits.begin(Instant::now() + Duration::from_secs(3600)).is_some()
    }

    #[test]
    fn a_wait_ends_with_the_answer() {
        let waits = ShortWaits::new(LIMIT);
        assert!(begins(&waits) && !waits.take_answered());
        let mut looks = 0;
        let look = || {
            looks += 1;
            Polled { completions: usize::from(looks % 5 == 0), ..Polled::default() }
        };
        let mut asked = 0;
        let far = Instant::now() + Duration::from_secs(3600);
        assert!(waits.wait(far, look, || {
            asked += 1;
            asked == 2
        }));
        assert_eq!((looks, asked), (10, 2), "nothing has changed after looks that found nothing");
        assert!(waits.take_answered() && !waits.take_answered());
    }

    #[test]
    fn a_wait_ends_with_an_answer_that_another_thread_has_found() {
        let waits = ShortWaits::new(LIMIT);
        let far = Instant::now() + Duration::from_secs(3600);
        let mut asked = 0;
        assert!(waits.wait(far, nothing, || {
            asked += 1;
            asked == 3
        }));
        assert!(waits.take_answered());
    }

    #[test]
    fn a_wait_ends_when_a_look_makes_other_tasks_ready() {
        let waits = ShortWaits::new(LIMIT);
        let far = Instant::now() + Duration::from_secs(3600);
        for polled in [Polled { woken: 1, ..nothing() }, Polled { ran: 1, ..nothing() }] {
            assert!(!waits.wait(far, || Polled { completions: 1, ..polled }, || false));
            assert!(begins(&waits), "this was no failure");
        }
    }

    #[test]
    fn waits_without_an_answer_become_rare_until_one_brings_an_answer() {
        let waits = ShortWaits::new(LIMIT);
        let mut tries = 0;
        for _ in 0..10_000 {
            if begins(&waits) {
                tries += 1;
                assert!(!waits.wait(Instant::now(), nothing, || false));
            }
        }
        assert!((10_000 / 256..50).contains(&tries), "{tries}");
        while !begins(&waits) {}
        let arrival = || Polled { completions: 1, ..nothing() };
        assert!(waits.wait(Instant::now(), arrival, || true));
        assert!(begins(&waits) && begins(&waits));
    }

    #[test]
    fn a_call_that_has_let_others_run_does_not_wait() {
        let waits = ShortWaits::new(LIMIT);
        let begun = Instant::now();
        assert!(!ShortWaits::is_alone(begun, begun + ShortWaits::ALONE * 2));
        assert!(ShortWaits::is_alone(begun, begun + ShortWaits::ALONE / 2));
        assert!(waits.begin(begun - ShortWaits::ALONE * 2).is_none());
        assert!(!begins(&ShortWaits::new(Duration::ZERO)), "the user wants no waits");
    }
}
