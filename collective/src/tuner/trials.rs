//! Which trials are made, and in which order.

use std::collections::VecDeque;
use std::time::Duration;

use super::decide;
use super::table::PlanTable;
use super::times::Times;
use crate::plan::Algorithm;

/// The sizes that a table covers, in bytes. Larger ones are like the last. Up to 16 KiB a message holds its elements. Above, the time rises
/// by a step, so the time at 32 KiB does not follow from those at 16 and 64 KiB.
const GRID: [usize; 14] = [
    8,
    16,
    64,
    256,
    1 << 10,
    4 << 10,
    16 << 10,
    32 << 10,
    64 << 10,
    256 << 10,
    1 << 20,
    4 << 20,
    16 << 20,
    64 << 20,
];
/// The part of the time that the grid may use.
const GRID_SHARE: f64 = 0.6;
/// The time that a trial of several operations should take.
const TRIAL: Duration = Duration::from_micros(1000);
/// The largest number of operations of a trial.
const MOST_REPETITIONS: u32 = 40;
/// The number of operations of a trial whose time can't be foreseen.
const FIRST_REPETITIONS: u32 = 3;
/// From this length on, the time of an operation is taken to grow with its length, in bytes.
const GROWS_FROM: usize = 8 << 10;
/// Larger sizes are judged by the largest measured one if it has at least this length, in bytes. Smaller ones say too little.
const JUDGED_FROM: usize = 256 << 10;
/// One-shot is given up after two sizes of at least this length at which it takes this many times as long as the best.
const GIVE_UP_FROM: usize = 16 << 10;
const GIVE_UP_RATIO: f64 = 1.8;
/// Two times are close if they differ by less than this factor. They are measured again in each round. Where ranks outnumber cores, the
/// time of a small operation is that of some changes from process to process, so that two trials of it may differ by this factor.
const CLOSE: f64 = 1.6;
/// The same for operations of at least this length, in bytes.
const LONG: usize = 1 << 20;
const CLOSE_IF_LONG: f64 = 1.25;
/// From this length on, in bytes, each algorithm is measured with the pieces only that were its best at the size before. Such operations take
/// most of the time, and pieces matter less than algorithms.
const ONE_PIECE_FROM: usize = 16 << 20;
/// The number of rounds behind the grid. The sizes between two neighbours are measured after so many of them.
const ROUNDS: u32 = 4;
const BETWEEN_AFTER: u32 = 2;

/// One measurement: all-reduces of one kind, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Trial {
    pub(crate) algorithm: Algorithm,
    /// The largest length of a message, in bytes.
    pub(crate) piece: usize,
    /// The length of the operation, in bytes.
    pub(crate) bytes: usize,
    /// The number of operations that count, after one that does not.
    pub(crate) repetitions: u32,
}

impl Trial {
    /// Returns a trial, or the end of the trials, as four words for the other ranks.
    pub(crate) fn pack(trial: Option<Self>) -> [u64; 4] {
        let Some(trial) = trial else { return [0; 4] };
        let algorithm = Algorithm::ALL.iter().position(|algorithm| *algorithm == trial.algorithm);
        let algorithm = algorithm.map_or(0, |index| index as u64 + 1);
        [algorithm, trial.piece as u64, trial.bytes as u64, trial.repetitions.into()]
    }

    /// Returns what [`pack`](Self::pack) packed: a trial, or `None` at the end of the trials.
    ///
    /// # Errors
    /// The words are not from there. The error is the reason, in words.
    pub(crate) fn unpack(words: [u64; 4]) -> Result<Option<Self>, &'static str> {
        let [algorithm, piece, bytes, repetitions] = words;
        if words == [0; 4] {
            return Ok(None);
        }
        let index = algorithm.checked_sub(1).and_then(|index| usize::try_from(index).ok());
        let algorithm = index.and_then(|index| Algorithm::ALL.get(index)).ok_or("no such algorithm")?;
        let size = |words: u64| {
            let size = usize::try_from(words).ok().filter(|size| (1..=GRID[GRID.len() - 1]).contains(size));
            size.ok_or("a length that is no length of a trial")
        };
        let repetitions =
            u32::try_from(repetitions).ok().filter(|count| (1..=MOST_REPETITIONS).contains(count));
        Ok(Some(Self {
            algorithm: *algorithm,
            piece: size(piece)?,
            bytes: size(bytes)?,
            repetitions: repetitions.ok_or("a number of repetitions that is too small or too large")?,
        }))
    }
}

/// Decides on trials, and makes a table of their times.
#[derive(Debug)]
pub(crate) struct Tuner {
    ranks: usize,
    /// The largest length of a trial, in bytes.
    largest: usize,
    budget: f64,
    /// The time of all trials so far, in nanoseconds.
    spent: f64,
    times: Times,
    phase: Phase,
    /// The trials that come next: indices of candidates, and sizes.
    queue: VecDeque<(usize, usize)>,
    current: Option<(usize, Trial)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The index of the next size of the grid.
    Grid(usize),
    /// Times that do not fit those of the sizes around them.
    Doubts,
    /// Candidates that are close. The number of rounds so far.
    Round(u32),
    Between,
    Over,
}

impl Tuner {
    /// Returns a tuner for a group of this many ranks. No trial is longer than `largest` bytes. The trials take `budget` together, and
    /// may exceed it by one trial, whose time was not foreseen.
    pub(crate) fn new(ranks: usize, largest: usize, budget: Duration) -> Self {
        Self {
            ranks,
            largest,
            budget: budget.as_nanos() as f64,
            spent: 0.0,
            times: Times::new(ranks),
            phase: if ranks > 1 { Phase::Grid(0) } else { Phase::Over },
            queue: VecDeque::new(),
            current: None,
        }
    }

    /// Notes whether ranks share cores.
    pub(crate) fn crowded(mut self, crowded: bool) -> Self {
        self.times.set_crowded(crowded);
        self
    }

    /// Returns the next trial, or `None` if there are enough. The same trial comes again until [`record`](Self::record) is called.
    pub(crate) fn next(&mut self) -> Option<Trial> {
        while self.current.is_none() && self.phase != Phase::Over {
            match self.queue.pop_front() {
                Some((index, bytes)) => self.current = self.trial(index, bytes).map(|trial| (index, trial)),
                None => self.refill(),
            }
        }
        self.current.map(|(_, trial)| trial)
    }

    /// Takes the times of the operations of the current trial.
    pub(crate) fn record(&mut self, times: &[Duration]) {
        let Some((index, trial)) = self.current.take() else { return };
        for time in times {
            self.times.record(index, trial.bytes, *time);
        }
        let sum: Duration = times.iter().sum();
        // One more operation did not count.
        self.spent += sum.as_nanos() as f64 * (1.0 + 1.0 / times.len().max(1) as f64);
    }

    /// Returns the table of what was measured so far.
    pub(crate) fn table(&self) -> PlanTable {
        let sizes = self.sizes();
        let is_complete = sizes.last().is_some_and(|last| *last >= JUDGED_FROM);
        decide::table(&self.times, self.ranks, &sizes, is_complete)
    }

    /// Returns the measured sizes, and those of the grid above them if they can be judged by the measured ones.
    fn sizes(&self) -> Vec<usize> {
        let mut sizes = self.times.sizes();
        if let Some(largest) = self.times.largest().filter(|largest| *largest >= JUDGED_FROM) {
            sizes.extend(GRID.into_iter().filter(|bytes| *bytes > largest));
        }
        sizes
    }

    /// Returns the trial of a candidate at a size, if there is time for it.
    fn trial(&self, index: usize, bytes: usize) -> Option<Trial> {
        let time = self.foreseen(index, bytes);
        let repetitions = match time {
            None => FIRST_REPETITIONS,
            Some(nanos) => (TRIAL.as_nanos() as f64 / nanos).clamp(1.0, f64::from(MOST_REPETITIONS)) as u32,
        };
        let needs = time.unwrap_or(0.0) * f64::from(repetitions + 1);
        let candidate = self.times.candidates()[index];
        let trial = Trial { algorithm: candidate.algorithm, piece: candidate.piece, bytes, repetitions };
        (self.spent + needs <= self.budget).then_some(trial)
    }

    /// Returns the time that an operation will take, in nanoseconds, by what was measured; `None` if nothing was.
    fn foreseen(&self, index: usize, bytes: usize) -> Option<f64> {
        if let Some(time) = self.times.estimate(index, bytes) {
            return Some(time.nanos);
        }
        // This candidate is new. It will take about as long as another one that was measured near this size.
        let nearest = self.times.sizes().into_iter().min_by_key(|size| size.abs_diff(bytes))?;
        let (_, best) = self.times.best(nearest)?;
        Some(best.nanos * (bytes.max(GROWS_FROM) as f64 / nearest.max(GROWS_FROM) as f64).max(1.0))
    }

    /// Fills the queue with the trials of the next part of a phase, or goes to the next phase.
    fn refill(&mut self) {
        match self.phase {
            Phase::Grid(next) => {
                self.phase = Phase::Doubts;
                let Some(bytes) = GRID.get(next).copied().filter(|bytes| *bytes <= self.largest) else {
                    return;
                };
                let candidates = self.in_question(bytes);
                let foreseen = candidates.iter().filter_map(|index| self.foreseen(*index, bytes));
                // The trials of a size, each of them once and once more before it counts.
                let needs: f64 = foreseen.map(|nanos| (2.0 * nanos).max(TRIAL.as_nanos() as f64)).sum();
                // All candidates at a size, or none: times from different sizes do not compare.
                if next == 0 || self.spent + needs <= self.budget * GRID_SHARE {
                    self.queue.extend(candidates.into_iter().map(|index| (index, bytes)));
                    self.phase = Phase::Grid(next + 1);
                }
            }
            Phase::Doubts => {
                self.queue.extend(self.again(|_, _| false));
                self.phase = Phase::Round(0);
            }
            Phase::Between => {
                self.queue.extend(self.between());
                self.phase = Phase::Round(BETWEEN_AFTER);
            }
            Phase::Round(ROUNDS) => self.phase = Phase::Over,
            Phase::Round(round) => {
                let is_close = |bytes, ratio| ratio < if bytes < LONG { CLOSE } else { CLOSE_IF_LONG };
                self.queue.extend(self.again(is_close));
                self.phase =
                    if round + 1 == BETWEEN_AFTER { Phase::Between } else { Phase::Round(round + 1) };
            }
            Phase::Over => {}
        }
    }

    /// Returns the candidates that may be the best at this size or above.
    fn in_question(&self, bytes: usize) -> Vec<usize> {
        let is_hopeless = |index: usize| {
            let is_slow = |size: usize| match (self.times.estimate(index, size), self.times.best(size)) {
                (Some(time), Some((_, best))) => time.nanos > GIVE_UP_RATIO * best.nanos,
                _ => true,
            };
            let earlier = GRID.into_iter().filter(|size| *size < bytes && *size >= GIVE_UP_FROM);
            let last: Vec<usize> = earlier.rev().take(2).collect();
            self.times.candidates()[index].algorithm == Algorithm::OneShot
                && last.len() == 2
                && last.into_iter().all(is_slow)
        };
        let has_best_pieces = |index: usize| {
            let Some(before) = self.times.largest().filter(|_| bytes >= ONE_PIECE_FROM) else { return true };
            let nanos = |index: usize| self.times.estimate(index, before).map_or(f64::MAX, |time| time.nanos);
            let candidates = self.times.candidates();
            let alike = |other: &usize| candidates[*other].algorithm == candidates[index].algorithm;
            let best = (0..candidates.len())
                .filter(alike)
                .min_by(|one, other| nanos(*one).total_cmp(&nanos(*other)));
            best == Some(index)
        };
        let in_question = |index: &usize| !is_hopeless(*index) && has_best_pieces(*index);
        self.times.distinct(bytes).into_iter().filter(in_question).collect()
    }

    /// Returns trials of the sizes between two neighbours for which the table has different candidates.
    fn between(&self) -> Vec<(usize, usize)> {
        let sizes = self.times.sizes();
        let path = decide::path(&self.times, &sizes);
        let mut trials = Vec::new();
        for (sizes, path) in sizes.windows(2).zip(path.windows(2)) {
            let middle = sizes[0] * 2;
            if path[0] != path[1] && middle < sizes[1] {
                let distinct = self.times.distinct(middle);
                trials.extend(
                    path.iter().filter(|index| distinct.contains(index)).map(|index| (*index, middle)),
                );
            }
        }
        trials
    }

    /// Returns trials that are made again: those of doubtful times, and those of candidates that are rivals at a size. `is_rival` gets the
    /// size, and the ratio of a candidate's time to the best.
    fn again(&self, is_rival: impl Fn(usize, f64) -> bool) -> Vec<(usize, usize)> {
        let mut trials = Vec::new();
        for bytes in self.times.sizes() {
            let Some((_, best)) = self.times.best(bytes) else { continue };
            let ratio = |index: usize| Some(self.times.estimate(index, bytes)?.nanos / best.nanos);
            let measured = self.times.distinct(bytes).into_iter();
            let measured: Vec<usize> =
                measured.filter(|index| self.times.is_measured(*index, bytes)).collect();
            let is_rival = |index: &usize| ratio(*index).is_some_and(|ratio| is_rival(bytes, ratio));
            let rivals: Vec<usize> = measured.iter().copied().filter(is_rival).collect();
            let again = measured.into_iter().filter(|index| {
                (rivals.len() > 1 && rivals.contains(index)) || self.times.is_doubtful(*index, bytes)
            });
            trials.extend(again.map(|index| (index, bytes)));
        }
        trials
    }
}

/// Makes all trials with `measure`, which returns the time of one operation, and makes the table.
///
/// # Errors
/// `measure` failed.
#[cfg(test)]
pub(crate) fn tune<E>(
    mut tuner: Tuner,
    mut measure: impl FnMut(Trial) -> Result<Duration, E>,
) -> Result<PlanTable, E> {
    while let Some(trial) = tuner.next() {
        let time = measure(trial)?;
        tuner.record(&vec![time; trial.repetitions as usize]);
    }
    Ok(tuner.table())
}
