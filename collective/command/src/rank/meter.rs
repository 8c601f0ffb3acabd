//! The measurement of one cell: the algorithms take turns in each iteration.

use std::time::{Duration, Instant};

use tonic_rdma_commands::Failure;

use super::clock;
use super::content::{Pattern, Value};
use super::group::{Group, Moved};
use super::operands::Operands;
use super::sink::Sink;
use crate::choices::Type;
use crate::options::{Cell, Length};
use crate::report::Report;

/// Bounds of the iterations that are chosen by a duration.
const LEAST: u64 = 5;
const MOST: u64 = 100_000;
/// The least number of iterations of a check of the tuner's choice. Medians of five differ by up to 20 %.
const LEAST_OF_CHECK: u64 = 15;
/// How long ranks that share cores sleep before each turn of a check. Then the system puts them on cores anew, as it does in the
/// tuner's trials. Otherwise a check would measure only the placement that the ranks happen to have.
const NAP: Duration = Duration::from_micros(50);
/// Iterations from which the number of iterations is computed.
const TRIALS: u32 = 3;
/// An algorithm whose least time in the warm-up is this many times that of the fastest is left out, if that is asked for and the
/// operands are larger than this. Smaller ones take little time anyway.
const LARGE: u64 = 4 << 20;
const FAR_BEHIND: f64 = 4.0;
/// How often rank 0 says that it works.
const BEAT: Duration = Duration::from_secs(1);

/// The figures of one algorithm in one cell.
#[derive(Debug)]
pub(crate) struct Figures {
    /// The latencies in µs, of the slowest rank in each iteration. Empty if the algorithm was left out.
    pub(crate) latencies: Vec<f64>,
    /// Wrong elements on all ranks.
    pub(crate) errors: u64,
    /// What the measured operations moved on all ranks.
    pub(crate) moved: Moved,
    /// The number of measured operations.
    pub(crate) operations: u64,
}

/// Measures cells.
#[derive(Debug)]
pub(crate) struct Meter<'a> {
    /// A communicator for each algorithm.
    pub(crate) groups: &'a [Group],
    /// Whether each rank has a core of its own, so that all may wait busily for a common start.
    pub(crate) own_cores: bool,
    /// Whether this is a check of the tuner's choice. Then algorithms that are far behind are left out.
    pub(crate) check: bool,
    /// Wrong elements of this rank, in all cells.
    pub(crate) wrong: u64,
}

/// The state of one algorithm.
struct Side<'a, T> {
    group: &'a Group,
    operands: Operands<T>,
    /// The latencies of this rank in µs.
    latencies: Vec<f64>,
    wrong: u64,
    /// What the operations of this rank moved. Barriers are not included.
    moved: Moved,
    takes_part: bool,
}

impl Meter<'_> {
    /// Measures a cell. All ranks call this with the same cells, in the same order.
    pub(crate) fn cell(&mut self, cell: &Cell, sink: &mut dyn Sink) -> Result<Vec<Figures>, Failure> {
        match cell.kind {
            Type::F32 => self.typed::<f32>(cell, sink),
            Type::F64 => self.typed::<f64>(cell, sink),
            Type::F16 => self.typed::<half::f16>(cell, sink),
            Type::Bf16 => self.typed::<half::bf16>(cell, sink),
            Type::I8 => self.typed::<i8>(cell, sink),
            Type::I16 => self.typed::<i16>(cell, sink),
            Type::I32 => self.typed::<i32>(cell, sink),
            Type::I64 => self.typed::<i64>(cell, sink),
            Type::U8 => self.typed::<u8>(cell, sink),
            Type::U16 => self.typed::<u16>(cell, sink),
            Type::U32 => self.typed::<u32>(cell, sink),
            Type::U64 => self.typed::<u64>(cell, sink),
        }
    }

    fn typed<T: Value>(&mut self, cell: &Cell, sink: &mut dyn Sink) -> Result<Vec<Figures>, Failure> {
        let Some(first) = self.groups.first() else { return Ok(Vec::new()) };
        let pattern = Pattern::<T>::new(cell.elements(), cell.reduction, first.size());
        let mut sides = Vec::new();
        for group in self.groups {
            sides.push(Side {
                group,
                operands: Operands::new(group, cell.operand, cell.elements())?,
                latencies: Vec::new(),
                wrong: 0,
                moved: Moved::default(),
                takes_part: true,
            });
        }
        let naps = self.check && !self.own_cores;
        let mut clock = Turns { next: 0, beat: Instant::now(), own_cores: self.own_cores, naps };
        for _ in 0..cell.warm_ups {
            clock.turn(&mut sides, cell, &pattern, sink)?;
        }
        if self.check && cell.bytes > LARGE {
            leave_out(first, &mut sides)?;
        }
        let iterations = match cell.length {
            Length::Iterations(iterations) => iterations,
            Length::Duration(duration) => {
                let begin = Instant::now();
                for _ in 0..TRIALS {
                    clock.turn(&mut sides, cell, &pattern, sink)?;
                }
                let least = if self.check { LEAST_OF_CHECK } else { LEAST };
                iterations(first, begin.elapsed() / TRIALS, duration, least)?
            }
        };
        for side in &mut sides {
            side.latencies.clear();
            side.moved = Moved::default();
        }
        for _ in 0..iterations {
            clock.turn(&mut sides, cell, &pattern, sink)?;
        }
        sides.into_iter().map(|side| self.figures(side, first)).collect()
    }

    /// Collects the figures of all ranks.
    fn figures<T>(&mut self, mut side: Side<'_, T>, first: &Group) -> Result<Figures, Failure> {
        self.wrong += side.wrong;
        let mut sums = [side.wrong as f64, side.moved.bytes as f64, side.moved.copied as f64];
        first.sum(&mut sums)?;
        first.maximum(&mut side.latencies)?;
        let [errors, bytes, copied] = sums.map(|sum| sum as u64);
        let operations = side.latencies.len() as u64;
        Ok(Figures { latencies: side.latencies, errors, moved: Moved { bytes, copied }, operations })
    }
}

/// The count of iterations of a cell.
struct Turns {
    next: u64,
    beat: Instant,
    own_cores: bool,
    naps: bool,
}

impl Turns {
    /// Makes one iteration with each algorithm. Each iteration begins with another algorithm.
    fn turn<T: Value>(
        &mut self,
        sides: &mut [Side<'_, T>],
        cell: &Cell,
        pattern: &Pattern<T>,
        sink: &mut dyn Sink,
    ) -> Result<(), Failure> {
        let iteration = self.next;
        self.next += 1;
        if self.naps {
            std::thread::sleep(NAP);
        }
        for index in 0..sides.len() {
            let index = (index + (iteration % sides.len() as u64) as usize) % sides.len();
            let side = &mut sides[index];
            if !side.takes_part {
                continue;
            }
            side.operands.fill(pattern, side.group.rank(), iteration)?;
            side.group.barrier()?;
            let before = side.group.moved();
            if self.own_cores {
                clock::wait_for_start();
            }
            let took = side.operands.reduce(side.group, cell.reduction, iteration)?;
            side.moved.add(side.group.moved().since(before));
            if !self.own_cores {
                // A rank that checks its result would take the core from a rank that is still in the timed part.
                side.group.barrier()?;
            }
            side.latencies.push(took.as_nanos() as f64 / 1000.0);
            side.wrong += side.operands.wrong(pattern, iteration)?;
        }
        if self.beat.elapsed() > BEAT {
            self.beat = Instant::now();
            sink.report(Report::Alive)?;
        }
        Ok(())
    }
}

/// Leaves out the fixed algorithms that are far behind. All ranks decide by the same times, so they decide alike.
fn leave_out<T>(first: &Group, sides: &mut [Side<'_, T>]) -> Result<(), Failure> {
    let mut times: Vec<f64> = sides.iter().map(|side| least(&side.latencies)).collect();
    first.maximum(&mut times)?;
    let best = times.iter().copied().fold(f64::MAX, f64::min);
    for (side, time) in sides.iter_mut().zip(times) {
        side.takes_part = side.group.is_auto() || time <= FAR_BEHIND * best;
    }
    Ok(())
}

/// Returns the least latency. The first uses of a buffer, and other work of the machine, make single latencies long.
fn least(latencies: &[f64]) -> f64 {
    latencies.iter().copied().fold(f64::MAX, f64::min)
}

/// Returns how many iterations fit into the duration, which is the same number on all ranks.
fn iterations(group: &Group, each: Duration, duration: Duration, least: u64) -> Result<u64, Failure> {
    let mut seconds = [each.as_secs_f64()];
    group.maximum(&mut seconds)?;
    Ok(((duration.as_secs_f64() / seconds[0].max(1e-9)) as u64).clamp(least, MOST))
}
