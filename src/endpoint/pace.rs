//! How long it pays to spin: the budget that `Adaptive` polling follows.

use std::time::{Duration, Instant};

/// Spinning pays while the next completion comes sooner than a sleep and a wake-up would take together. This follows
/// the gap between arrivals: when they come close together the budget is a few gaps; when they don't, it is zero.
#[derive(Debug)]
pub(crate) struct Pace {
    /// Longest spin.
    longest: Duration,
    last_arrival: Option<Instant>,
    /// Moving average of the gap between arrivals.
    gap: Duration,
    /// The shortest yield of the core so far: what one costs when nobody else wants the core.
    yield_cost: Duration,
    /// No spinning before this moment: somebody else wants the core.
    crowded_until: Option<Instant>,
    /// Whether the last spin ended without an arrival, and none came since.
    missed: bool,
}

impl Pace {
    /// Longest spin if nobody says otherwise. About three wake-ups: a sleeper loses no more than it could have won.
    pub(crate) const LONGEST: Duration = Duration::from_micros(120);
    /// Shortest spin that is worth arming late for.
    const SHORTEST: Duration = Duration::from_micros(20);
    /// A core that took longer than this to come back from a yield has other work, unless yields are slow here.
    const CROWDED: Duration = Duration::from_micros(30);
    /// Shortest time between two yields.
    const YIELD_EVERY: Duration = Duration::from_micros(10);
    /// Yields take a fiftieth of the time at most, and a core is not crowded that comes back within fifty of them: on an
    /// emulated machine each takes microseconds.
    const YIELD_SHARE: u32 = 50;
    /// No more is believed of a yield, so that two spinners on one core don't take one another for slow yields.
    const SLOWEST_YIELD: Duration = Duration::from_micros(4);
    /// How long a crowded core is left alone.
    const LEAVE_ALONE: Duration = Duration::from_millis(2);

    /// One that spins for `longest` at most.
    pub(crate) fn new(longest: Duration) -> Self {
        Self {
            longest,
            last_arrival: None,
            gap: longest / 4,
            yield_cost: Self::SLOWEST_YIELD,
            crowded_until: None,
            missed: false,
        }
    }

    /// Completions were found.
    pub(crate) fn arrived(&mut self, now: Instant) {
        if let Some(last) = self.last_arrival.replace(now) {
            // One long pause must not be remembered for longer than a few arrivals.
            let gap = now.saturating_duration_since(last).min(4 * self.longest);
            self.gap = (self.gap * 7 + gap) / 8;
        }
        self.missed = false;
    }

    /// A spin ended without an arrival.
    pub(crate) fn missed(&mut self) {
        self.missed = true;
    }

    /// How long to keep the core from one yield to the next.
    pub(crate) fn yield_every(&self) -> Duration {
        (self.yield_cost * Self::YIELD_SHARE).max(Self::YIELD_EVERY)
    }

    /// A yield of the core took `away`.
    pub(crate) fn yielded(&mut self, away: Duration, now: Instant) {
        self.yield_cost = self.yield_cost.min(away);
        if away > (self.yield_cost * Self::YIELD_SHARE).max(Self::CROWDED) {
            self.crowded_until = Some(now + Self::LEAVE_ALONE);
        }
    }

    /// Whether somebody else wants the core.
    pub(crate) fn is_crowded(&self, now: Instant) -> bool {
        self.crowded_until.is_some_and(|until| now < until)
    }

    /// How long to spin from `now` on; zero means sleep at once.
    pub(crate) fn budget(&self, now: Instant) -> Duration {
        if self.missed || self.is_crowded(now) || self.gap > self.longest {
            return Duration::ZERO;
        }
        (self.gap * 4).clamp(Self::SHORTEST.min(self.longest), self.longest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fed(gap: Duration) -> (Pace, Instant) {
        let mut pace = Pace::new(Pace::LONGEST);
        let mut now = Instant::now();
        for _ in 0..64 {
            now += gap;
            pace.arrived(now);
        }
        (pace, now)
    }

    #[test]
    fn close_arrivals_are_spun_for() {
        let (pace, now) = fed(Duration::from_micros(10));
        let budget = pace.budget(now);
        assert!(budget >= Duration::from_micros(35) && budget <= Duration::from_micros(50), "{budget:?}");
    }

    #[test]
    fn rare_arrivals_are_slept_for() {
        let (pace, now) = fed(Duration::from_millis(1));
        assert_eq!(pace.budget(now), Duration::ZERO);
    }

    #[test]
    fn the_limit_is_the_users() {
        let mut now = Instant::now();
        let mut patient = Pace::new(Duration::from_millis(4));
        for _ in 0..64 {
            now += Duration::from_micros(800);
            patient.arrived(now);
        }
        let budget = patient.budget(now);
        assert!(budget >= Duration::from_millis(3) && budget <= Duration::from_millis(4), "{budget:?}");
        let mut never = Pace::new(Duration::ZERO);
        for _ in 0..64 {
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
    fn slow_yields_are_rarer_and_are_no_crowd() {
        let (mut pace, now) = fed(Duration::from_micros(10));
        pace.yielded(Duration::from_micros(2), now);
        assert_eq!(pace.yield_every(), Duration::from_micros(100));
        pace.yielded(Duration::from_micros(90), now);
        assert!(pace.budget(now) > Duration::ZERO);
        pace.yielded(Duration::from_nanos(300), now);
        assert_eq!(pace.yield_every(), Duration::from_micros(15));
        pace.yielded(Duration::from_micros(90), now);
        assert_eq!(pace.budget(now), Duration::ZERO);
    }

    #[test]
    fn a_crowded_core_is_left_alone_for_a_while() {
        let (mut pace, now) = fed(Duration::from_micros(10));
        pace.yielded(Duration::from_micros(5), now);
        assert!(pace.budget(now) > Duration::ZERO);
        pace.yielded(Duration::from_micros(300), now);
        assert_eq!(pace.budget(now), Duration::ZERO);
        assert!(pace.budget(now + Duration::from_millis(3)) > Duration::ZERO);
    }
}
