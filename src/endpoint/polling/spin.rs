//! When the spin of a runtime's thread ends.

use std::time::{Duration, Instant};

use super::pace::Observation;
use super::queue::Polled;

/// The end of a spin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spun {
    /// The budget is spent.
    Nothing,
    /// A task was woken.
    Woke,
    /// Work was run, which may have made tasks ready, or arrivals went on for long.
    Ran,
}

/// What one spin has found so far.
///
/// A woken task ends the spin. Work that a look ran may have made tasks ready, which this thread can't know. So the spin goes on for a short
/// time only: the next work often comes at once. READs of a large transfer may complete with each look, without a task to wake, and
/// the tasks must not wait for its end either.
#[derive(Debug, Default)]
pub(super) struct Spin {
    /// The first arrival.
    first: Option<Instant>,
    /// The last work that was run.
    ran: Option<Instant>,
    /// The spin ends because of its time.
    is_over: bool,
    looks: u32,
}

impl Spin {
    /// Time for the next work after some was run.
    const NEXT: Duration = Duration::from_micros(8);
    /// Longest time from the first arrival on.
    const MOST: Duration = Duration::from_micros(60);
    /// Looks without an arrival for each look at the clock.
    const LOOKS: u32 = 8;

    /// Takes the result of a look. `now` is the clock.
    pub(super) fn found(&mut self, polled: Polled, now: impl FnOnce() -> Instant) -> Observation {
        if polled.woken > 0 {
            return Observation::Wanted;
        }
        if !polled.has_arrivals() {
            // Without work of this spin, its budget is the bound.
            let Some(last) = self.ran else { return Observation::Nothing };
            self.looks = self.looks.wrapping_add(1);
            if self.looks.is_multiple_of(Self::LOOKS) {
                let now = now();
                self.is_over = now - last > Self::NEXT || self.is_long(now);
            }
            return if self.is_over { Observation::Wanted } else { Observation::Nothing };
        }
        let now = now();
        if polled.ran > 0 {
            self.ran = Some(now);
        } else if self.ran.is_some_and(|last| now - last > Self::NEXT) {
            self.is_over = true;
        }
        self.is_over |= self.is_long(now);
        if self.is_over { Observation::Wanted } else { Observation::Arrival }
    }

    fn is_long(&mut self, now: Instant) -> bool {
        now - *self.first.get_or_insert(now) > Self::MOST
    }

    /// Returns the end of the spin. `wanted` says that the last look ended it.
    pub(super) fn end(&self, wanted: bool) -> Spun {
        match (wanted, self.is_over || self.ran.is_some()) {
            (_, true) => Spun::Ran,
            (true, false) => Spun::Woke,
            (false, false) => Spun::Nothing,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOTHING: Polled = Polled { completions: 0, woken: 0, ran: 0, moving: false };
    const ARRIVAL: Polled = Polled { completions: 1, ..NOTHING };
    const WORK: Polled = Polled { ran: 1, ..ARRIVAL };
    const TASK: Polled = Polled { woken: 1, ..ARRIVAL };
    /// A part of a message that has no completion yet.
    const PART: Polled = Polled { moving: true, ..NOTHING };

    /// Gives a spin the result of a look each microsecond, until it ends. Returns the end, and its time.
    fn spin(look: impl Fn(u64) -> Polled) -> (Spun, u64) {
        let (mut spin, start) = (Spin::default(), Instant::now());
        for time in 0..1000 {
            let now = || start + Duration::from_micros(time);
            if spin.found(look(time), now) == Observation::Wanted {
                return (spin.end(true), time);
            }
        }
        (spin.end(false), 1000)
    }

    #[test]
    fn a_woken_task_ends_the_spin() {
        assert_eq!(spin(|time| if time == 30 { TASK } else { NOTHING }), (Spun::Woke, 30));
        assert_eq!(spin(|time| if time == 30 { TASK } else { ARRIVAL }), (Spun::Woke, 30));
        assert_eq!(spin(|_| NOTHING), (Spun::Nothing, 1000), "the budget is another's");
    }

    #[test]
    fn a_spin_ends_soon_after_the_last_work() {
        let (end, time) = spin(|time| if time == 100 { WORK } else { NOTHING });
        assert!(end == Spun::Ran && (108..=124).contains(&time), "{end:?} {time}");
        let (end, time) = spin(|time| if time == 100 { WORK } else { ARRIVAL });
        assert!(end == Spun::Ran && (60..=109).contains(&time), "{end:?} {time}");
    }

    #[test]
    fn work_without_end_ends_the_spin() {
        let (end, time) = spin(|time| if time % 5 == 0 { WORK } else { NOTHING });
        assert!(end == Spun::Ran && (60..80).contains(&time), "{end:?} {time}");
    }

    #[test]
    fn arrivals_that_wake_no_task_end_the_spin_when_they_go_on_for_long() {
        assert_eq!(spin(|_| ARRIVAL), (Spun::Ran, 61), "the poll task has to look, as no task is ready");
        assert_eq!(spin(|_| PART), (Spun::Ran, 61), "a long message arrives in parts");
        let (end, time) = spin(|time| if time % 20 == 0 { ARRIVAL } else { NOTHING });
        assert!(end == Spun::Ran && (60..100).contains(&time), "{end:?} {time}");
    }

    #[test]
    fn a_few_arrivals_do_not_end_it() {
        assert_eq!(spin(|time| if time < 3 { ARRIVAL } else { NOTHING }), (Spun::Nothing, 1000));
    }
}
