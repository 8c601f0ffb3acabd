//! Trials on a running connection: would the other transfer mode be faster for writes of one size under one load?
//!
//! A trial compares the time from the start of one such write to the start of the next, over a block of writes. This time
//! includes all work that a write causes at either end, as far as this end has to wait for it. The time until a write has
//! *completed* is no fair measure: an eager message has completed when it is in the peer's buffer, an offer when the peer has
//! noticed it, read the bytes and acknowledged them. A trial has five blocks: usual mode, other mode (settling), other mode,
//! usual mode (settling), usual mode. In a settling block, the queues that the block before has filled become empty. One sample
//! is the time of the other mode, divided by the mean of the times of the usual mode before and after it, so that slow drift of
//! the machine cancels out.
//!
//! ```text
//!    ── gap ──▶│ Before │ Settle │ Other │ Settle │ After │── gap ──▶      sample = Other / mean(Before, After)
//!                 usual   other mode       usual mode
//! ```
//!
//! A switch of the mode takes 16 samples, at least 14 of them below 1, with a moving average of at most 0.9. If the other mode
//! is slower, trials cost about 2 % of the time, and get rarer with each sample that is clearly slower. If the calibration says
//! that the other mode takes more than four times as long, there are no trials.
//!
//! The code is pure: it gets the time as an argument, and only counts.

use std::time::{Duration, Instant};

use super::decision::{TransferMode, WriteLoad};

/// The trials of one connection.
#[derive(Debug, Default)]
pub(super) struct Online {
    cells: [Cell; CELLS],
    trial: Option<Trial>,
    last: Option<Last>,
}

/// A switch of the mode for one class of writes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Change {
    pub(super) class: Class,
    /// The mode from now on.
    pub(super) mode: TransferMode,
    /// Time of this mode, as a part of the time of the mode before.
    pub(super) ratio: f32,
}

/// Writes of similar length, from a power of two to the next, under one load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Class {
    pub(super) exponent: u32,
    pub(super) load: WriteLoad,
}

/// Smallest and largest exponent of a class; larger writes are in the last class.
const EXPONENTS: std::ops::RangeInclusive<u32> = 12..=22;
const CELLS: usize = 2 * (*EXPONENTS.end() - *EXPONENTS.start() + 1) as usize;

impl Class {
    /// Shortest write with trials, in bytes; shorter writes are gathered.
    pub(super) const SMALLEST: usize = 1 << *EXPONENTS.start();

    /// Returns the class of a write.
    pub(super) fn of(size: usize, load: WriteLoad) -> Self {
        let exponent = size.max(1).ilog2().clamp(*EXPONENTS.start(), *EXPONENTS.end());
        Self { exponent, load }
    }

    fn cell(self) -> usize {
        2 * (self.exponent - EXPONENTS.start()) as usize + usize::from(self.load == WriteLoad::Heavy)
    }

    /// Returns the number of writes in a block: enough to outweigh the content of queues, 8 MiB or 64 offers.
    fn block(self) -> u32 {
        ((16 << 20) >> self.exponent).clamp(16, 64)
    }
}

/// The state of a class.
#[derive(Clone, Copy, Debug)]
struct Cell {
    /// Trials have switched the mode that the threshold gives.
    switched: bool,
    /// Writes since the last trial.
    since: u32,
    /// Number of times that the gap between trials was doubled.
    patience: u8,
    /// Samples since the last verdict.
    samples: u8,
    /// Samples since the last verdict in which the other mode was faster.
    wins: u8,
    /// There was a sample.
    tried: bool,
    /// Moving average of the samples.
    ratio: f32,
}

impl Default for Cell {
    fn default() -> Self {
        Self { switched: false, since: 0, patience: 0, samples: 0, wins: 0, tried: false, ratio: 1.0 }
    }
}

#[derive(Clone, Copy, Debug)]
struct Last {
    cell: usize,
    size: usize,
    at: Instant,
}

#[derive(Debug)]
struct Trial {
    class: Class,
    phase: Phase,
    /// Writes that began in this phase.
    begun: u32,
    /// Writes of other classes since the last write of this class.
    other_writes: u32,
    /// Time and bytes of the phase.
    spent: Spent,
    before: f64,
    other: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Before,
    SettleOther,
    Other,
    SettleBack,
    After,
}

#[derive(Clone, Copy, Debug, Default)]
struct Spent {
    time: Duration,
    bytes: u64,
}

impl Spent {
    /// Returns seconds for each byte.
    fn cost(self) -> f64 {
        self.time.as_secs_f64() / (self.bytes.max(1) as f64)
    }
}

impl Online {
    /// A trial ends if the application pauses for longer than this, because its times are then useless.
    const PAUSE: Duration = Duration::from_millis(100);
    /// No trials where the calibration says that the other mode takes more than this many times as long.
    const HOPELESS: f64 = 4.0;
    /// Samples for a switch.
    const SAMPLES: u8 = 16;
    /// Samples of a switch in which the other mode has to be faster.
    const WINS: u8 = 14;
    /// Longest time of the other mode for a switch, as a part of the time of the usual mode.
    const BETTER: f32 = 0.9;
    /// A trial ends after this many writes of other classes in a row.
    const MOST_OTHER_WRITES: u32 = 1024;
    /// Cost of trials, as a part of the whole time.
    const COST: f64 = 0.02;

    /// Notes the start of a write of `size` bytes. `usual` is its mode by the threshold. `expected` is the time of the other
    /// mode as a multiple of the time of the usual mode, by calibration, and infinite to allow no trial. Returns the mode of this
    /// write, and the switch of mode that it brings, if there is one.
    pub(super) fn begin(
        &mut self,
        size: usize,
        load: WriteLoad,
        usual: TransferMode,
        expected: f64,
        now: Instant,
    ) -> (TransferMode, Option<Change>) {
        self.account(now);
        let class = Class::of(size, load);
        let cell = class.cell();
        self.last = Some(Last { cell, size, at: now });
        let change = self.advance(class, usual);
        self.start(class, expected);
        let mode = self.mode(class, usual);
        match &mut self.trial {
            Some(trial) if trial.class == class => {
                trial.begun += 1;
                let other = matches!(trial.phase, Phase::SettleOther | Phase::Other);
                (if other { mode.other() } else { mode }, change)
            }
            _ => (mode, change),
        }
    }

    /// Forgets all trials, because the threshold has changed.
    pub(super) fn reset(&mut self) {
        *self = Self::default();
    }

    /// Returns the mode outside trials.
    fn mode(&self, class: Class, usual: TransferMode) -> TransferMode {
        if self.cells[class.cell()].switched { usual.other() } else { usual }
    }

    /// Adds the time since the last write to the trial of that write's class.
    fn account(&mut self, now: Instant) {
        let (Some(last), Some(trial)) = (self.last, &mut self.trial) else { return };
        let time = now.saturating_duration_since(last.at);
        if last.cell == trial.class.cell() {
            trial.other_writes = 0;
            trial.spent.time += time;
            trial.spent.bytes = trial.spent.bytes.saturating_add(last.size as u64);
        } else {
            trial.other_writes += 1;
        }
        if time > Self::PAUSE || trial.other_writes > Self::MOST_OTHER_WRITES {
            self.trial = None;
        }
    }

    /// Goes to the next phase of the trial of `class`, if the current phase is over.
    fn advance(&mut self, class: Class, usual: TransferMode) -> Option<Change> {
        let trial = self.trial.as_mut().filter(|trial| trial.class == class)?;
        if trial.begun < class.block() {
            return None;
        }
        let cost = std::mem::take(&mut trial.spent).cost();
        trial.begun = 0;
        trial.phase = match trial.phase {
            Phase::Before => {
                trial.before = cost;
                Phase::SettleOther
            }
            Phase::SettleOther => Phase::Other,
            Phase::Other => {
                trial.other = cost;
                Phase::SettleBack
            }
            Phase::SettleBack => Phase::After,
            Phase::After => {
                let sample = 2.0 * trial.other / (trial.before + cost).max(f64::MIN_POSITIVE);
                self.trial = None;
                return self.conclude(class, sample as f32, usual);
            }
        };
        None
    }

    /// Adds a sample. Returns the switch of mode, if the samples suffice for one.
    fn conclude(&mut self, class: Class, sample: f32, usual: TransferMode) -> Option<Change> {
        /// A sample above this is clearly slower.
        const WORSE: f32 = 1.1;
        const MOST_PATIENCE: u8 = 6;
        let cell = &mut self.cells[class.cell()];
        // Bounded, so that an outlier counts no more than a clear sample.
        let sample = sample.clamp(0.25, 4.0);
        cell.since = 0;
        cell.patience = if sample > WORSE { (cell.patience + 1).min(MOST_PATIENCE) } else { 0 };
        let weight = if cell.tried { 0.125 } else { 1.0 };
        cell.ratio += weight * (sample - cell.ratio);
        cell.tried = true;
        cell.samples += 1;
        cell.wins += u8::from(sample < 1.0);
        if cell.samples < Self::SAMPLES {
            return None;
        }
        // Every verdict uses new samples, so that chance does not count twice.
        let wins = std::mem::take(&mut cell.wins);
        cell.samples = 0;
        if wins < Self::WINS || cell.ratio > Self::BETTER {
            return None;
        }
        let (switched, ratio) = (!cell.switched, cell.ratio);
        *cell = Cell { switched, ..Cell::default() };
        Some(Change { class, mode: self.mode(class, usual), ratio })
    }

    /// Starts a trial of `class`, if there is no other trial and the gap since the last one is long enough.
    fn start(&mut self, class: Class, expected: f64) {
        let cell = &mut self.cells[class.cell()];
        cell.since = cell.since.saturating_add(1);
        if self.trial.is_some() {
            return;
        }
        let expected = if cell.switched { 1.0 / expected.max(1e-3) } else { expected };
        if expected > Self::HOPELESS && !cell.tried {
            return;
        }
        let known = if cell.tried { f64::from(cell.ratio) } else { expected };
        // Two blocks of a trial use the other mode, which may take longer.
        let block = f64::from(class.block());
        let gap =
            (2.0 * block * (known - 1.0) / Self::COST).max(32.0 * block) * f64::from(1_u32 << cell.patience);
        if f64::from(cell.since) >= gap {
            self.trial = Some(Trial {
                class,
                phase: Phase::Before,
                begun: 0,
                other_writes: 0,
                spent: Spent::default(),
                before: 0.0,
                other: 0.0,
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A connection whose writes take the time that `cost` returns, in nanoseconds, with random `noise`.
    struct Synthetic {
        online: Online,
        now: Instant,
        seed: u64,
        noise: f64,
        usual: TransferMode,
        expected: f64,
    }

    impl Synthetic {
        fn new(usual: TransferMode, expected: f64, noise: f64) -> Self {
            Self {
                online: Online::default(),
                now: Instant::now(),
                seed: 0x9e37_79b9_7f4a_7c15,
                noise,
                usual,
                expected,
            }
        }

        /// Returns a random number from -1 to 1.
        fn random(&mut self) -> f64 {
            self.seed ^= self.seed << 13;
            self.seed ^= self.seed >> 7;
            self.seed ^= self.seed << 17;
            (self.seed >> 11) as f64 / (1_u64 << 52) as f64 - 1.0
        }

        /// Runs `writes` writes of one size. Returns how many used the other mode, and the switches.
        fn run(
            &mut self,
            writes: u32,
            size: usize,
            cost: impl Fn(TransferMode) -> f64,
        ) -> (u32, Vec<Change>) {
            let (mut others, mut changes) = (0, Vec::new());
            for _ in 0..writes {
                let (mode, change) =
                    self.online.begin(size, WriteLoad::Light, self.usual, self.expected, self.now);
                others += u32::from(mode != self.usual);
                changes.extend(change);
                let factor = 1.0 + self.noise * self.random();
                self.now += Duration::from_nanos((cost(mode) * factor) as u64);
            }
            (others, changes)
        }
    }

    fn costs(eager: f64, rendezvous: f64) -> impl Fn(TransferMode) -> f64 {
        move |mode| match mode {
            TransferMode::Eager => eager,
            TransferMode::Rendezvous => rendezvous,
        }
    }

    const MANY: u32 = 200_000;

    #[test]
    fn the_faster_mode_is_found_and_kept() {
        let mut connection = Synthetic::new(TransferMode::Eager, 1.5, 0.3);
        let (_, changes) = connection.run(MANY, 100_000, costs(50_000.0, 30_000.0));
        assert_eq!(changes.len(), 1, "{changes:?}");
        assert_eq!((changes[0].mode, changes[0].class.exponent), (TransferMode::Rendezvous, 16));
        assert!((0.5..0.7).contains(&changes[0].ratio), "{changes:?}");
        let (others, changes) = connection.run(MANY, 100_000, costs(50_000.0, 30_000.0));
        assert!(changes.is_empty() && others > MANY / 10 * 9, "{others} {changes:?}");
    }

    #[test]
    fn the_mode_switches_back_when_the_costs_change() {
        let mut connection = Synthetic::new(TransferMode::Rendezvous, 1.5, 0.1);
        let (_, changes) = connection.run(MANY, 1 << 16, costs(20_000.0, 30_000.0));
        assert_eq!(changes.iter().map(|change| change.mode).collect::<Vec<_>>(), [TransferMode::Eager]);
        let (_, changes) = connection.run(20 * MANY, 1 << 16, costs(30_000.0, 20_000.0));
        assert_eq!(changes.iter().map(|change| change.mode).collect::<Vec<_>>(), [TransferMode::Rendezvous]);
    }

    #[test]
    fn there_are_no_trials_of_a_mode_that_calibration_found_slow() {
        let (others, changes) =
            Synthetic::new(TransferMode::Eager, 4.1, 0.3).run(MANY, 8192, costs(1000.0, 500.0));
        assert_eq!((others, changes), (0, vec![]));
    }

    #[test]
    fn trials_of_a_slower_mode_cost_little() {
        for ratio in [1.2, 2.0, 4.0] {
            let (others, changes) =
                Synthetic::new(TransferMode::Eager, ratio, 0.1).run(MANY, 1 << 14, costs(1e4, 1e4 * ratio));
            let cost = f64::from(others) * (ratio - 1.0) / f64::from(MANY);
            assert!(changes.is_empty() && others > 0 && cost < 0.02, "{ratio}: {others} cost {cost}");
        }
    }

    #[test]
    fn trials_of_a_slower_mode_than_expected_get_rarer() {
        let mut connection = Synthetic::new(TransferMode::Eager, 1.0, 0.1);
        let (first, _) = connection.run(MANY, 1 << 14, costs(1e4, 9e4));
        let (second, changes) = connection.run(MANY, 1 << 14, costs(1e4, 9e4));
        assert!(changes.is_empty() && second * 2 < first && first < MANY / 100, "{first} {second}");
    }

    #[test]
    fn a_pause_ends_a_trial() {
        let mut connection = Synthetic::new(TransferMode::Eager, 1.0, 0.0);
        let paused = |mode| if mode == TransferMode::Eager { 50_000.0 } else { 2e8 };
        let (_, changes) = connection.run(MANY, 1 << 16, paused);
        assert!(connection.online.cells.iter().all(|cell| !cell.tried));
        assert!(changes.is_empty());
    }

    #[test]
    fn a_trial_without_writes_of_its_class_ends() {
        let mut connection = Synthetic::new(TransferMode::Eager, 1.0, 0.0);
        connection.run(32 * 64 + 10, 1 << 14, costs(1e4, 1e4));
        assert!(connection.online.trial.is_some());
        let (others, _) = connection.run(10_000, 1 << 16, costs(1e4, 1e4));
        assert!(others > 0, "other classes have trials");
    }

    /// A buffer takes writes at once, and the peer handles them later. So the other mode seems free until the queue is full.
    #[test]
    fn an_empty_queue_makes_no_mode_seem_faster() {
        let mut connection = Synthetic::new(TransferMode::Eager, 1.5, 0.0);
        let (mut others, mut backlog) = (0, 0.0_f64);
        for _ in 0..MANY {
            let (mode, change) =
                connection.online.begin(1 << 18, WriteLoad::Heavy, TransferMode::Eager, 1.5, connection.now);
            assert_eq!(change, None);
            others += u32::from(mode == TransferMode::Rendezvous);
            let (accept, work, queue) = match mode {
                TransferMode::Eager => (20_000.0, 50_000.0, 300_000.0),
                TransferMode::Rendezvous => (20_000.0, 75_000.0, 32.0 * 75_000.0),
            };
            backlog += work;
            let wait = f64::max(accept, backlog - queue);
            backlog -= wait;
            connection.now += Duration::from_nanos(wait as u64);
        }
        assert!(others > 0);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn there_is_no_switch_between_equal_modes(seed in 1_u64.., noise in 0.0..0.5_f64, exponent in 12_u32..=22) {
            let mut connection = Synthetic::new(TransferMode::Eager, 1.0, noise);
            connection.seed = seed;
            let (others, changes) = connection.run(60_000, 1 << exponent, costs(1e4, 1e4));
            prop_assert!(changes.is_empty(), "{changes:?}");
            prop_assert!(others < 60_000 / 12, "{others}");
        }

        #[test]
        fn any_writes_are_taken(writes in prop::collection::vec((any::<usize>(), any::<bool>(), 0..u64::MAX, 0.0..100.0_f64), 0..2000)) {
            let mut online = Online::default();
            let mut now = Instant::now();
            for (size, heavy, pause, expected) in writes {
                let load = if heavy { WriteLoad::Heavy } else { WriteLoad::Light };
                online.begin(size, load, TransferMode::Eager, expected, now);
                now += Duration::from_nanos(pause % 200_000_000);
            }
        }
    }
}
