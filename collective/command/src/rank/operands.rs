//! The memory of operations: several operands of a size, which take turns.

use std::time::{Duration, Instant};

use tonic_rdma_collective::Buffer;
use tonic_rdma_commands::Failure;

use super::content::{Pattern, Value};
use super::group::{Group, library_reduction};
use crate::choices::{Operand, Reduction};
use crate::options;

/// Operands of one size for one communicator.
pub(crate) enum Operands<T> {
    Registered(Vec<Option<Buffer<T>>>),
    OutOfPlace(Vec<Option<(Buffer<T>, Buffer<T>)>>),
    Slices(Vec<Vec<T>>),
}

impl<T: Value> Operands<T> {
    /// Allocates operands of `elements` elements.
    pub(crate) fn new(group: &Group, kind: Operand, elements: usize) -> Result<Self, Failure> {
        let bytes = elements as u64 * T::TYPE.bytes();
        let count = options::buffers(bytes);
        let buffer = || group.allocate::<T>(elements);
        Ok(match kind {
            Operand::Registered => {
                Self::Registered((0..count).map(|_| buffer().map(Some)).collect::<Result<_, _>>()?)
            }
            Operand::RegisteredOutOfPlace => Self::OutOfPlace(
                (0..count).map(|_| Ok(Some((buffer()?, buffer()?)))).collect::<Result<_, Failure>>()?,
            ),
            Operand::Slice => Self::Slices((0..count).map(|_| vec![T::of(0); elements]).collect()),
        })
    }

    fn turn(&self, iteration: u64) -> usize {
        let count = match self {
            Self::Registered(all) => all.len(),
            Self::OutOfPlace(all) => all.len(),
            Self::Slices(all) => all.len(),
        };
        (iteration % count.max(1) as u64) as usize
    }

    /// Writes the content of an iteration into the operand whose turn it is.
    pub(crate) fn fill(&mut self, pattern: &Pattern<T>, rank: usize, iteration: u64) -> Result<(), Failure> {
        let turn = self.turn(iteration);
        match self {
            Self::Registered(all) => pattern.fill(rank, iteration, all[turn].as_mut().ok_or_else(lost)?),
            Self::OutOfPlace(all) => {
                pattern.fill(rank, iteration, &mut all[turn].as_mut().ok_or_else(lost)?.0)
            }
            Self::Slices(all) => pattern.fill(rank, iteration, &mut all[turn]),
        }
        Ok(())
    }

    /// Reduces the operand whose turn it is, and returns how long that took.
    pub(crate) fn reduce(
        &mut self,
        group: &Group,
        reduction: Reduction,
        iteration: u64,
    ) -> Result<Duration, Failure> {
        let reduction = library_reduction(reduction);
        let turn = self.turn(iteration);
        let comm = group.communicator();
        match self {
            Self::Registered(all) => {
                let operand = all[turn].take().ok_or_else(lost)?;
                let begin = Instant::now();
                let result = comm.all_reduce(operand, reduction).wait();
                let took = begin.elapsed();
                all[turn] = Some(result.map_err(|failed| group.failure(failed.into()))?);
                Ok(took)
            }
            Self::OutOfPlace(all) => {
                let operand = all[turn].take().ok_or_else(lost)?;
                let begin = Instant::now();
                let result = comm.all_reduce(operand, reduction).wait();
                let took = begin.elapsed();
                all[turn] = Some(result.map_err(|failed| group.failure(failed.into()))?);
                Ok(took)
            }
            Self::Slices(all) => {
                let operand = all[turn].as_mut_slice();
                let begin = Instant::now();
                let result = comm.all_reduce(operand, reduction).wait();
                let took = begin.elapsed();
                result.map(drop).map_err(|failed| group.failure(failed.into()))?;
                Ok(took)
            }
        }
    }

    /// Returns how many elements of the iteration's result are wrong.
    pub(crate) fn wrong(&self, pattern: &Pattern<T>, iteration: u64) -> Result<u64, Failure> {
        let turn = self.turn(iteration);
        Ok(match self {
            Self::Registered(all) => pattern.wrong(iteration, all[turn].as_ref().ok_or_else(lost)?),
            Self::OutOfPlace(all) => pattern.wrong(iteration, &all[turn].as_ref().ok_or_else(lost)?.1),
            Self::Slices(all) => pattern.wrong(iteration, &all[turn]),
        })
    }
}

/// A failed operation ends the run, so that its operand is never asked for again.
fn lost() -> Failure {
    Failure::run("an earlier operation has failed")
}
