//! The measurement of one cell. Each iteration runs all algorithms, one after the other, and takes the next
//! of several operands of the size.

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

use super::content::{Pattern, Value};
use super::{Group, Sink, failed};
use crate::options::{self, Algorithm, Cell, Length, Type};
use crate::report::{Moved, Report};
use tonic_rdma_collective::{Buffer, Reduction};
use tonic_rdma_commands::Failure;

/// Bounds of the iterations that are chosen by a duration.
const LEAST: u64 = 5;
const MOST: u64 = 100_000;
/// The least number of iterations of a check of the plans. Medians of five differ by up to 20 %.
const LEAST_OF_CHECK: u64 = 15;
/// How long ranks that share cores sleep before each iteration of a check. Then the system puts them on cores
/// anew. Otherwise a check would measure only the placement that the ranks happen to have.
const NAP: Duration = Duration::from_micros(50);
/// Iterations from which the number of iterations is computed.
const TRIALS: u32 = 3;
/// A check of the plans leaves out each algorithm whose least time in the warm-up is more than this many
/// times that of the fastest, if the operands are larger than [`LARGE`]. Smaller ones take little time
/// anyway.
const FAR_BEHIND: f64 = 4.0;
const LARGE: u64 = 4 << 20;
/// How often rank 0 reports that it is alive.
const BEAT: Duration = Duration::from_secs(1);

/// The figures of one algorithm in one cell.
#[derive(Debug)]
pub(crate) struct Figures {
    /// The latencies in µs, of the slowest rank in each iteration. Empty if the algorithm was left out.
    pub(crate) latencies: Vec<f64>,
    /// Wrong elements on all ranks.
    pub(crate) errors: u64,
    /// The bytes that the measured operations moved, by rank.
    pub(crate) moved: Vec<Moved<f64>>,
}

/// Measures cells.
pub(crate) struct Meter<'a> {
    /// A communicator for each algorithm.
    pub(crate) groups: &'a [Group],
    /// Whether each rank has a core of its own, so that all may wait busily for a common start.
    pub(crate) own_cores: bool,
    /// Whether this is a check of the plans. Then algorithms that are far behind are left out.
    pub(crate) check: bool,
    pub(crate) sink: Sink<'a>,
    /// When rank 0 last reported that it is alive.
    pub(crate) beat: Instant,
    /// Wrong elements of this rank, in all cells.
    pub(crate) wrong: u64,
}

struct AlgorithmRun<'a, T> {
    group: &'a Group,
    operands: Operands<T>,
    /// The latencies of this rank in µs.
    latencies: Vec<f64>,
    wrong: u64,
    takes_part: bool,
}

impl Meter<'_> {
    /// Measures a cell. All ranks call this with the same cells, in the same order.
    pub(crate) fn cell(&mut self, cell: &Cell) -> Result<Vec<Figures>, Failure> {
        match cell.kind {
            Type::F32 => self.typed::<f32>(cell),
            Type::F64 => self.typed::<f64>(cell),
            Type::F16 => self.typed::<half::f16>(cell),
            Type::Bf16 => self.typed::<half::bf16>(cell),
            Type::I8 => self.typed::<i8>(cell),
            Type::I16 => self.typed::<i16>(cell),
            Type::I32 => self.typed::<i32>(cell),
            Type::I64 => self.typed::<i64>(cell),
            Type::U8 => self.typed::<u8>(cell),
            Type::U16 => self.typed::<u16>(cell),
            Type::U32 => self.typed::<u32>(cell),
            Type::U64 => self.typed::<u64>(cell),
        }
    }

    fn typed<T: Value>(&mut self, cell: &Cell) -> Result<Vec<Figures>, Failure> {
        let Some(first) = self.groups.first() else { return Ok(Vec::new()) };
        let pattern = Pattern::<T>::new(cell.elements(), cell.reduction, first.communicator.size());
        let run = |group| {
            let operands = Operands::new(group, cell.operand, cell.elements())?;
            Ok(AlgorithmRun { group, operands, latencies: Vec::new(), wrong: 0, takes_part: true })
        };
        let mut runs = self.groups.iter().map(run).collect::<Result<Vec<_>, Failure>>()?;
        let mut iterations = 0..;
        let mut iterate = |meter: &mut Self, runs: &mut [AlgorithmRun<'_, T>], count: u64| {
            let count = usize::try_from(count).unwrap_or(usize::MAX);
            iterations.by_ref().take(count).try_for_each(|it| meter.iterate(runs, cell, &pattern, it))
        };
        iterate(self, &mut runs, cell.warm_ups)?;
        if self.check && cell.bytes > LARGE {
            leave_out(first, &mut runs)?;
        }
        let count = match cell.length {
            Length::Iterations(count) => count,
            Length::Duration(duration) => {
                let begin = Instant::now();
                iterate(self, &mut runs, TRIALS.into())?;
                let mut seconds = [(begin.elapsed() / TRIALS).as_secs_f64()];
                // The same number on all ranks.
                first.combine(&mut seconds, Reduction::Max)?;
                let least = if self.check { LEAST_OF_CHECK } else { LEAST };
                ((duration.as_secs_f64() / seconds[0].max(1e-9)) as u64).clamp(least, MOST)
            }
        };
        runs.iter_mut().for_each(|run| run.latencies.clear());
        let before: Vec<Moved<u64>> = self.groups.iter().map(Group::moved).collect();
        iterate(self, &mut runs, count)?;
        let after: Vec<Moved<u64>> = self.groups.iter().map(Group::moved).collect();
        let mut all = Vec::new();
        for (mut run, (before, after)) in runs.into_iter().zip(before.into_iter().zip(after)) {
            self.wrong += run.wrong;
            let mut errors = [run.wrong as f64];
            let mut moved = vec![Moved::default(); first.communicator.size()];
            moved[first.communicator.rank()] =
                std::array::from_fn(|index| after[index].saturating_sub(before[index]) as f64);
            first.combine(&mut errors, Reduction::Sum)?;
            first.combine(moved.as_flattened_mut(), Reduction::Sum)?;
            first.combine(&mut run.latencies, Reduction::Max)?;
            all.push(Figures { latencies: run.latencies, errors: errors[0] as u64, moved });
        }
        Ok(all)
    }

    /// Makes one iteration with each algorithm. Each iteration begins with another algorithm.
    fn iterate<T: Value>(
        &mut self,
        runs: &mut [AlgorithmRun<'_, T>],
        cell: &Cell,
        pattern: &Pattern<T>,
        iteration: u64,
    ) -> Result<(), Failure> {
        if self.check && !self.own_cores {
            std::thread::sleep(NAP);
        }
        let first = (iteration % runs.len() as u64) as usize;
        let (later, earlier) = runs.split_at_mut(first);
        for run in earlier.iter_mut().chain(later).filter(|run| run.takes_part) {
            run.operands.fill(pattern, run.group.communicator.rank(), iteration)?;
            run.group.barrier()?;
            if self.own_cores {
                wait_for_start();
            }
            let took = run.operands.reduce(run.group, cell.reduction, iteration)?;
            if !self.own_cores {
                // A rank that checks its result would take the core from a rank that is still in the timed
                // part.
                run.group.barrier()?;
            }
            run.latencies.push(took.as_nanos() as f64 / 1000.0);
            run.wrong += run.operands.wrong(pattern, iteration)?;
        }
        if self.beat.elapsed() > BEAT {
            self.beat = Instant::now();
            (self.sink)(Report::Alive)?;
        }
        Ok(())
    }
}

/// Leaves out the fixed algorithms that are far behind. All ranks decide by the same times, so they decide
/// alike.
fn leave_out<T>(first: &Group, runs: &mut [AlgorithmRun<'_, T>]) -> Result<(), Failure> {
    // The first uses of a buffer, and other work of the machine, make single latencies long.
    let least = |run: &AlgorithmRun<'_, T>| run.latencies.iter().copied().fold(f64::MAX, f64::min);
    let mut times: Vec<f64> = runs.iter().map(least).collect();
    first.combine(&mut times, Reduction::Max)?;
    let best = times.iter().copied().fold(f64::MAX, f64::min);
    for (run, time) in runs.iter_mut().zip(times) {
        run.takes_part = run.group.algorithm == Algorithm::Auto || time <= FAR_BEHIND * best;
    }
    Ok(())
}

/// One operand. Registered memory is absent while an operation has it.
enum Operand<T> {
    Registered(Option<Buffer<T>>),
    OutOfPlace(Option<(Buffer<T>, Buffer<T>)>),
    Slice(Vec<T>),
}

/// Operands of one size for one communicator.
pub(crate) struct Operands<T>(Vec<Operand<T>>);

impl<T: Value> Operands<T> {
    /// Allocates operands of `elements` elements.
    pub(crate) fn new(group: &Group, kind: options::Operand, elements: usize) -> Result<Self, Failure> {
        let buffer = || group.communicator.allocate::<T>(elements).map_err(failed);
        let operand = |_| {
            Ok(match kind {
                options::Operand::Registered => Operand::Registered(Some(buffer()?)),
                options::Operand::RegisteredOutOfPlace => Operand::OutOfPlace(Some((buffer()?, buffer()?))),
                options::Operand::Slice => Operand::Slice(vec![T::of(0); elements]),
            })
        };
        let count = options::buffers(elements as u64 * T::TYPE.bytes());
        (0..count).map(operand).collect::<Result<_, _>>().map(Self)
    }

    /// Returns the operand of an iteration.
    fn of_iteration(&mut self, iteration: u64) -> &mut Operand<T> {
        let count = self.0.len() as u64;
        &mut self.0[(iteration % count) as usize]
    }

    /// Writes the content of an iteration into its operand.
    pub(crate) fn fill(&mut self, pattern: &Pattern<T>, rank: usize, iteration: u64) -> Result<(), Failure> {
        match self.of_iteration(iteration) {
            Operand::Registered(Some(input)) | Operand::OutOfPlace(Some((input, _))) => {
                pattern.fill(rank, iteration, input);
            }
            Operand::Slice(input) => pattern.fill(rank, iteration, input),
            Operand::Registered(None) | Operand::OutOfPlace(None) => return Err(lost()),
        }
        Ok(())
    }

    /// Reduces the operand of an iteration, and returns how long that took.
    pub(crate) fn reduce(
        &mut self,
        group: &Group,
        reduction: Reduction,
        iteration: u64,
    ) -> Result<Duration, Failure> {
        match self.of_iteration(iteration) {
            Operand::Registered(operand) => timed(group, reduction, operand),
            Operand::OutOfPlace(operand) => timed(group, reduction, operand),
            Operand::Slice(operand) => timed(group, reduction, &mut Some(&mut operand[..])),
        }
    }

    /// Returns how many elements of the iteration's result are wrong.
    pub(crate) fn wrong(&mut self, pattern: &Pattern<T>, iteration: u64) -> Result<u64, Failure> {
        match self.of_iteration(iteration) {
            Operand::Registered(Some(result)) | Operand::OutOfPlace(Some((_, result))) => {
                Ok(pattern.wrong(iteration, result))
            }
            Operand::Slice(result) => Ok(pattern.wrong(iteration, result)),
            Operand::Registered(None) | Operand::OutOfPlace(None) => Err(lost()),
        }
    }
}

/// Reduces an operand, and returns how long that took.
fn timed<X: tonic_rdma_collective::Operand>(
    group: &Group,
    reduction: Reduction,
    operand: &mut Option<X>,
) -> Result<Duration, Failure> {
    let input = operand.take().ok_or_else(lost)?;
    let begin = Instant::now();
    let result = group.communicator.all_reduce(input, reduction).wait();
    let took = begin.elapsed();
    *operand = Some(result.map_err(failed)?);
    Ok(took)
}

/// A failed operation ends the run, so that its operand is never asked for again.
fn lost() -> Failure {
    Failure::run("an earlier operation has failed")
}

/// Ranks with a core of their own begin a timed part at multiples of this many nanoseconds.
const START: u64 = 20_000;

/// Waits until the next multiple of 20 µs. All ranks that have left a barrier at about the same time begin
/// together, so that the skew of the barrier does not count. Waits busily.
pub(crate) fn wait_for_start() {
    let start = (now() / START + 1) * START;
    while now() < start {
        std::hint::spin_loop();
    }
}

/// Returns the time in nanoseconds.
pub(crate) fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    // The clock begins at zero, so neither field is ever negative.
    u64::try_from(time.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_start_is_behind_a_multiple() {
        let before = now();
        wait_for_start();
        assert!(now() / START > before / START);
    }
}
