//! Spinning for completions: the decision how long to spin before a sleep, and the loop that spins.

use std::time::{Duration, Instant};

use crate::endpoint::polling::processors::Processors;
use crate::endpoint::polling::queue::Polled;
use crate::endpoint::polling::waits::{self, Spinning};

/// Decides how long to spin before a sleep, for one thread at a time. Spinning pays if it costs less time than
/// it saves: it costs the wait, or all of its own length if nothing comes, and saves a sleep and a wake-up,
/// which [`longest`](Self::new) stands for. A `Pace` knows the lengths of the last waits, from the end of the
/// work to the next arrival, and takes the length of a spin that would have paid best for these.
#[derive(Debug)]
pub struct Pace {
    /// Longest spin.
    longest: Duration,
    /// What a spin that ends with an arrival saves.
    saves: Duration,
    waits: Waits,
    /// The begin of the present wait.
    since: Option<Instant>,
    /// The shortest yield of the core so far: the cost of a yield when no other thread wants the core. Zero
    /// before the first.
    yield_cost: Duration,
    /// One bit for each of the last eight yields, set if another thread ran meanwhile.
    switched: u8,
    /// No spinning before this moment, because other threads want the core.
    crowded_until: Option<Instant>,
    /// Length of the next time without spinning.
    leave_alone: Duration,
    /// Yields since the last time without spinning.
    yields: u32,
    /// The last spin ended without an arrival, and there was no arrival since.
    missed: bool,
}

/// The lengths of the last waits.
#[derive(Debug)]
struct Waits {
    /// In nanoseconds, because this is computed for each arrival.
    lengths: [i64; Self::KEPT],
    count: usize,
    /// The length of a spin that would have paid best; `None` if none would have.
    best: Option<Duration>,
}

impl Waits {
    /// Waits that are kept.
    const KEPT: usize = 8;
    /// One in so many waits is a spin in any case, because two ends that both sleep see longer waits than two
    /// that spin.
    const PROBE: usize = 64;

    /// Adds a wait. A spin has at most the length `longest`, and `saves` as much if it ends with an arrival.
    fn add(&mut self, length: Duration, longest: Duration, saves: Duration) {
        // No sum below overflows.
        let nanos = |time: Duration| i64::try_from(time.as_nanos()).unwrap_or(i64::MAX).min(i64::MAX / 16);
        self.lengths[self.count % Self::KEPT] = nanos(length);
        self.count += 1;
        let known = &self.lengths[..self.count.min(Self::KEPT)];
        let (longest, saves) = (nanos(longest), nanos(saves));
        let paid =
            |spin| known.iter().map(|&wait| if wait <= spin { saves - wait } else { -spin }).sum::<i64>();
        let within = known.iter().filter(|&&wait| wait <= longest);
        let best = within.map(|&wait| (paid(wait), wait)).max();
        self.best =
            best.filter(|(paid, _)| *paid > 0).map(|(_, wait)| Duration::from_nanos(wait.unsigned_abs()));
    }

    /// Returns how long the next spin should last, if one pays.
    fn spin(&self, longest: Duration) -> Option<Duration> {
        if self.count.is_multiple_of(Self::PROBE) && !longest.is_zero() {
            return Some(longest);
        }
        // Waits are not all as long as the last ones.
        self.best.map(|best| 2 * best)
    }
}

/// The result of one poll while spinning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Observation {
    /// Nothing has arrived.
    Nothing,
    /// An arrival that does not end the spin.
    Arrival,
    /// The arrival that the spin waits for.
    Wanted,
}

impl Pace {
    /// Creates a pace that spins for `longest` at most.
    pub fn new(longest: Duration) -> Self {
        Self {
            longest,
            saves: longest,
            waits: Waits { lengths: [0; Waits::KEPT], count: 0, best: None },
            since: None,
            yield_cost: Duration::ZERO,
            switched: 0,
            crowded_until: None,
            leave_alone: waits::LEAVE_ALONE[0],
            yields: 0,
            missed: false,
        }
    }

    /// Returns the pace for spins that save `saves` each, which is more than the longest of them takes.
    #[must_use]
    pub fn saving(mut self, saves: Duration) -> Self {
        self.saves = saves;
        self
    }

    /// Notes that there is nothing to do until the next arrival, unless a wait has begun before.
    #[inline]
    pub(super) fn begin(&mut self, now: Instant) {
        self.since.get_or_insert(now);
    }

    /// Notes an arrival.
    #[inline]
    pub fn arrived(&mut self, now: Instant) {
        if let Some(since) = self.since.take() {
            self.waits.add(now.saturating_duration_since(since), self.longest, self.saves);
        }
        self.missed = false;
    }

    /// Notes an arrival that is found now. Reads the clock only if a wait has begun.
    #[inline]
    pub fn arrived_now(&mut self) {
        if self.since.is_some() {
            self.arrived(Instant::now());
        }
    }

    /// Notes an arrival that has woken the thread.
    pub(super) fn arrived_after_sleep(&mut self) {
        // Nothing came while the thread slept at once.
        if self.since.is_some() {
            self.arrived(Instant::now() - waits::WAKE_UP);
        }
    }

    /// Notes that arrivals were found elsewhere meanwhile. The length of the present wait is not known.
    #[inline]
    pub fn resume(&mut self) {
        (self.since, self.missed) = (None, false);
    }

    /// Calls `poll` until it returns [`Observation::Wanted`] (true) or the budget is spent (false). The wait
    /// starts at `start`, which is now. Calls `begin` before the first poll, unless the budget is zero.
    #[inline]
    pub fn spin(&mut self, start: Instant, begin: impl FnOnce(), poll: impl FnMut() -> Observation) -> bool {
        self.spin_by(start, Instant::now, begin, poll)
    }

    /// As [`spin`](Self::spin), by the clock `now`.
    #[inline]
    fn spin_by(
        &mut self,
        start: Instant,
        mut now: impl FnMut() -> Instant,
        begin: impl FnOnce(),
        mut poll: impl FnMut() -> Observation,
    ) -> bool {
        let mut spinning = Spinning::default();
        if spinning.again_by(self, start, &mut now).is_err() {
            return false;
        }
        begin();
        loop {
            let again = match poll() {
                Observation::Nothing if spinning.is_free() => Ok(()),
                Observation::Nothing => spinning.again_by(self, now(), &mut now),
                observation => {
                    let arrival = now();
                    self.arrived(arrival);
                    if observation == Observation::Wanted {
                        return true;
                    }
                    spinning.start = None;
                    spinning.again_by(self, arrival, &mut now)
                }
            };
            if again.is_err() {
                return false;
            }
        }
    }

    /// Notes that a spin ended without an arrival.
    #[inline]
    pub(super) fn missed(&mut self) {
        self.missed = true;
    }

    /// Returns the time to keep the core from one yield to the next.
    #[inline]
    pub(super) fn yield_every(&self) -> Duration {
        if self.switched != 0 {
            return (self.yield_cost * waits::SHARED).max(waits::SHARED_AT_LEAST);
        }
        (self.yield_cost * waits::YIELD_SHARE).clamp(waits::YIELD_EVERY[0], waits::YIELD_EVERY[1])
    }

    /// Yields the core to other threads; returns the time after that.
    pub(super) fn yield_core(&mut self, before: Instant, clock: impl FnOnce() -> Instant) -> Instant {
        rustix::thread::sched_yield();
        let after = clock();
        self.yielded(after - before, after);
        after
    }

    /// Notes that a yield of the core took `away`.
    fn yielded(&mut self, away: Duration, now: Instant) {
        // A yield that let another thread run does not show the cost of the call.
        if away < self.yield_cost || (self.yield_cost.is_zero() && away < waits::SHORTEST_SWITCH) {
            self.yield_cost = away;
        }
        let switched = away > (self.yield_cost * waits::SWITCH).max(waits::SHORTEST_SWITCH);
        self.switched = self.switched << 1 | u8::from(switched);
        self.yields = self.yields.saturating_add(1);
        if away > waits::CROWDED {
            self.crowded_until = Some(now + self.leave_alone);
            self.leave_alone = (self.leave_alone * 2).min(waits::LEAVE_ALONE[1]);
            (self.switched, self.yields) = (0, 0);
        } else if self.yields > waits::CALM {
            self.leave_alone = waits::LEAVE_ALONE[0];
        }
    }

    /// Returns whether other threads want the core.
    #[inline]
    pub(super) fn is_crowded(&self, now: Instant) -> bool {
        self.crowded_for(now).is_some()
    }

    /// Returns the rest of the time without spinning, if other threads want the core.
    #[inline]
    pub(super) fn crowded_for(&self, now: Instant) -> Option<Duration> {
        self.crowded_until.filter(|&until| now < until).map(|until| until - now)
    }

    /// Returns how long to spin from `now` on. Zero means to sleep at once.
    #[inline]
    pub(super) fn budget(&self, now: Instant) -> Duration {
        self.budget_within(now, Processors::current().limit)
    }

    /// As [`budget`](Self::budget), for a process with a CPU limit, in thousandths of a CPU.
    #[inline]
    fn budget_within(&self, now: Instant, limit: Option<u32>) -> Duration {
        let longest = match limit {
            // The user wants a thread that never sleeps.
            _ if self.longest == Duration::MAX => self.longest,
            // What a spin takes is missing for the work of this process.
            Some(..1000) => Duration::ZERO,
            Some(..2000) => self.longest.min(waits::SHORTEST),
            _ => self.longest,
        };
        match self.waits.spin(longest) {
            Some(spin) if !self.missed && !self.is_crowded(now) => {
                spin.clamp(waits::SHORTEST.min(longest), longest)
            }
            _ => Duration::ZERO,
        }
    }
}

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
/// A woken task ends the spin. Work that a poll ran may have made tasks ready, which this thread can't know.
/// So the spin goes on for a short time only: the next work often comes at once. READs of a large transfer
/// may complete with each poll, without a task to wake, and the tasks must not wait for the end of the
/// transfer.
#[derive(Debug, Default)]
pub(super) struct Spin {
    /// The first arrival.
    first: Option<Instant>,
    /// The last work that was run.
    ran: Option<Instant>,
    /// The spin ends because of its time.
    is_over: bool,
    polls: u32,
}

impl Spin {
    /// Time for the next work after some was run.
    const NEXT: Duration = Duration::from_micros(8);
    /// Longest time from the first arrival on.
    const MOST: Duration = Duration::from_micros(60);
    /// Polls without an arrival for each reading of the clock.
    const POLLS: u32 = 8;

    /// Takes the result of a poll. `now` is the clock.
    pub(super) fn found(&mut self, polled: Polled, now: impl FnOnce() -> Instant) -> Observation {
        if polled.woken > 0 {
            return Observation::Wanted;
        }
        if !polled.has_arrivals() {
            // Until work has run, only the budget ends the spin.
            let Some(last) = self.ran else { return Observation::Nothing };
            self.polls = self.polls.wrapping_add(1);
            if self.polls.is_multiple_of(Self::POLLS) {
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

    /// Returns the end of the spin. `wanted` says that the last poll ended it.
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

    const LONGEST: Duration = Duration::from_micros(120);

    fn fed(gap: Duration) -> (Pace, Instant) {
        let mut pace = Pace::new(LONGEST);
        let mut now = Instant::now();
        for _ in 0..64 {
            pace.begin(now);
            now += gap;
            pace.arrived(now);
        }
        pace.waits.count += 1;
        (pace, now)
    }

    #[test]
    fn short_waits_give_a_short_spin() {
        let (pace, now) = fed(Duration::from_micros(15));
        assert_eq!(pace.budget(now), Duration::from_micros(30));
    }

    #[test]
    fn a_spin_is_as_long_as_paid_best() {
        let micros = Duration::from_micros;
        let fed = |mut pace: Pace, waits: &[u64]| {
            let mut now = Instant::now();
            for &wait in waits {
                pace.begin(now);
                now += micros(wait);
                pace.arrived(now);
            }
            pace.waits.best
        };
        let best = |waits: &[u64]| fed(Pace::new(LONGEST), waits);
        assert_eq!(
            best(&[10, 12, 100, 11]),
            Some(micros(100)),
            "each spin ends with an arrival, and saves 120"
        );
        assert_eq!(best(&[10, 12, 900, 11]), Some(micros(12)), "the long wait ends no spin");
        assert_eq!(best(&[60, 900, 60, 900]), None, "240 saved, 240 spun");
        assert_eq!(best(&[50, 900, 50, 900]), Some(micros(50)));
        assert_eq!(best(&[0, 0, 0]), Some(Duration::ZERO));
        assert_eq!(best(&[10, 900, 900, 900, 900, 900, 900, 900, 900]), None, "the first is forgotten");
    }

    /// Two ends that both sleep see waits that are longer by a wake-up than those of two that spin.
    #[test]
    fn a_spin_is_tried_from_time_to_time() {
        let (mut pace, mut now) = fed(Duration::from_millis(1));
        let mut spins = 0;
        for _ in 0..6400 {
            pace.begin(now);
            spins += u32::from(!pace.budget(now).is_zero());
            now += Duration::from_millis(1);
            pace.arrived(now);
        }
        assert_eq!(spins, 100);
    }

    #[test]
    fn a_process_with_less_than_a_cpu_does_not_spin() {
        let (pace, now) = fed(Duration::from_micros(15));
        let budget = |limit| pace.budget_within(now, limit);
        assert_eq!(budget(Some(500)), Duration::ZERO);
        assert_eq!(budget(Some(1500)), waits::SHORTEST);
        assert_eq!(budget(Some(2000)), budget(None));
        let busy = Pace::new(Duration::MAX);
        assert_eq!(busy.budget_within(now, Some(500)), Duration::MAX, "the user wants this");
    }

    #[test]
    fn rare_arrivals_give_no_spin() {
        let (pace, now) = fed(Duration::from_millis(1));
        assert_eq!(pace.budget(now), Duration::ZERO);
    }

    #[test]
    fn the_limit_is_the_users() {
        let mut now = Instant::now();
        let mut patient = Pace::new(Duration::from_millis(4));
        for _ in 0..65 {
            patient.begin(now);
            now += Duration::from_micros(1800);
            patient.arrived(now);
        }
        let budget = patient.budget(now);
        assert!(budget >= Duration::from_millis(3) && budget <= Duration::from_millis(4), "{budget:?}");
        let mut never = Pace::new(Duration::ZERO);
        for _ in 0..64 {
            never.begin(now);
            now += Duration::from_nanos(100);
            never.arrived(now);
        }
        assert_eq!(never.budget(now), Duration::ZERO);
    }

    #[test]
    fn an_idle_end_spins_once_and_then_sleeps() {
        let (mut pace, mut now) = fed(Duration::from_micros(10));
        pace.missed();
        assert_eq!(pace.budget(now), Duration::ZERO);
        now += Duration::from_secs(10);
        assert_eq!(pace.budget(now), Duration::ZERO);
        pace.arrived(now);
        assert!(pace.budget(now) > Duration::ZERO, "one long pause among close arrivals");
    }

    #[test]
    fn arrivals_that_others_found_are_no_long_gap() {
        let (mut pace, mut now) = fed(Duration::from_micros(10));
        for _ in 0..100 {
            now += Duration::from_secs(1);
            pace.missed();
            pace.resume();
            assert!(pace.budget(now) > Duration::ZERO);
            pace.arrived(now);
        }
        let budget = pace.budget(now);
        assert!(budget <= Duration::from_micros(50), "{budget:?}");
    }

    #[test]
    fn slow_yields_are_rarer_and_are_no_crowd() {
        let (mut pace, now) = fed(Duration::from_micros(10));
        pace.yielded(Duration::from_micros(2), now);
        assert_eq!(pace.yield_every(), Duration::from_micros(60));
        pace.yielded(Duration::from_nanos(300), now);
        assert_eq!(pace.yield_every(), Duration::from_micros(12));
    }

    #[test]
    fn a_crowded_core_is_left_alone_for_a_while() {
        let (mut pace, now) = fed(Duration::from_micros(10));
        pace.yielded(Duration::from_micros(300), now);
        assert!(pace.budget(now) > Duration::ZERO);
        pace.yielded(Duration::from_micros(1100), now);
        assert_eq!(pace.budget(now), Duration::ZERO);
        assert!(pace.budget(now + Duration::from_millis(3)) > Duration::ZERO);
    }

    #[test]
    fn a_core_that_stays_crowded_is_left_alone_for_longer() {
        let (mut pace, mut now) = fed(Duration::from_micros(10));
        let mut alone = Vec::new();
        for _ in 0..9 {
            pace.yielded(Duration::from_millis(3), now);
            let millis = (0..).find(|&millis| !pace.is_crowded(now + Duration::from_millis(millis))).unwrap();
            alone.push(millis);
            now += Duration::from_millis(millis);
        }
        assert_eq!(alone, [2, 4, 8, 16, 32, 64, 128, 256, 256]);
        (0..100).for_each(|_| pace.yielded(Duration::from_nanos(300), now));
        pace.yielded(Duration::from_millis(3), now);
        assert!(!pace.is_crowded(now + Duration::from_millis(2)), "it was calm for a while");
    }

    #[test]
    fn a_core_that_is_shared_is_yielded_more_often() {
        let (mut pace, now) = fed(Duration::from_micros(10));
        pace.yielded(Duration::from_nanos(300), now);
        for _ in 0..100 {
            pace.yielded(Duration::from_micros(12), now);
            assert!(!pace.is_crowded(now));
            assert!(pace.yield_every() <= Duration::from_micros(2));
        }
        (0..8).for_each(|_| pace.yielded(Duration::from_nanos(300), now));
        assert_eq!(pace.yield_every(), Duration::from_micros(12));
    }

    #[test]
    fn a_core_that_is_shared_from_the_first_yield_on_is_recognized() {
        let (mut pace, now) = fed(Duration::from_micros(10));
        for _ in 0..20 {
            pace.yielded(Duration::from_micros(12), now);
            assert!(pace.yield_every() <= Duration::from_micros(2));
        }
    }

    #[test]
    fn a_spin_ends_with_the_wanted_arrival_or_with_its_budget() {
        let (mut pace, start) = fed(Duration::from_micros(10));
        // A clock that does not depend on how often this thread runs.
        let readings = std::cell::Cell::new(0);
        let now = || {
            readings.set(readings.get() + 1);
            start + Duration::from_micros(readings.get())
        };
        let mut polls = 0;
        assert!(pace.spin_by(
            now(),
            now,
            || (),
            || {
                polls += 1;
                match polls {
                    100 => Observation::Wanted,
                    50 => Observation::Arrival,
                    _ => Observation::Nothing,
                }
            }
        ));
        assert_eq!(polls, 100);
        let (before, budget) = (readings.get(), pace.budget(now()));
        assert!(!pace.spin_by(now(), now, || (), || Observation::Nothing));
        let spun = Duration::from_micros(readings.get() - before);
        assert!(spun > budget && spun < 2 * budget, "{spun:?} of {budget:?}");
        let began = std::cell::Cell::new(false);
        assert!(
            !pace.spin_by(now(), now, || began.set(true), || Observation::Wanted),
            "the last spin missed"
        );
        assert!(!began.get());
    }

    #[test]
    fn an_interrupt_now_and_then_is_no_crowd() {
        let (mut pace, now) = fed(Duration::from_micros(10));
        for index in 0..1000 {
            pace.yielded(Duration::from_nanos(if index % 4 == 0 { 9000 } else { 300 }), now);
            assert!(!pace.is_crowded(now), "{index}");
        }
    }
}

#[cfg(test)]
mod spin_tests {
    use super::*;

    const NOTHING: Polled = Polled { completions: 0, woken: 0, ran: 0, moving: false };
    const ARRIVAL: Polled = Polled { completions: 1, ..NOTHING };
    const WORK: Polled = Polled { ran: 1, ..ARRIVAL };
    const TASK: Polled = Polled { woken: 1, ..ARRIVAL };
    /// A part of a message that has no completion yet.
    const PART: Polled = Polled { moving: true, ..NOTHING };

    /// Gives a spin the result of a poll each microsecond, until it ends. Returns the end, and its time.
    fn spin(poll: impl Fn(u64) -> Polled) -> (Spun, u64) {
        let (mut spin, start) = (Spin::default(), Instant::now());
        for time in 0..1000 {
            let now = || start + Duration::from_micros(time);
            if spin.found(poll(time), now) == Observation::Wanted {
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
        assert_eq!(spin(|_| ARRIVAL), (Spun::Ran, 61), "the poll task has to poll, as no task is ready");
        assert_eq!(spin(|_| PART), (Spun::Ran, 61), "a long message arrives in parts");
        let (end, time) = spin(|time| if time % 20 == 0 { ARRIVAL } else { NOTHING });
        assert!(end == Spun::Ran && (60..100).contains(&time), "{end:?} {time}");
    }

    #[test]
    fn a_few_arrivals_do_not_end_it() {
        assert_eq!(spin(|time| if time < 3 { ARRIVAL } else { NOTHING }), (Spun::Nothing, 1000));
    }
}
