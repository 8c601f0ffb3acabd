//! The memory of operations: several operands of a size, which take turns.

use std::time::{Duration, Instant};

use tonic_rdma_collective::{Buffer, Reduction};
use tonic_rdma_commands::Failure;

use super::content::{Pattern, Value};
use super::group::{Group, failed};
use crate::choices;
use crate::options;

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
    pub(crate) fn new(group: &Group, kind: choices::Operand, elements: usize) -> Result<Self, Failure> {
        let buffer = || group.communicator.allocate::<T>(elements).map_err(failed);
        let operand = |_| {
            Ok(match kind {
                choices::Operand::Registered => Operand::Registered(Some(buffer()?)),
                choices::Operand::RegisteredOutOfPlace => Operand::OutOfPlace(Some((buffer()?, buffer()?))),
                choices::Operand::Slice => Operand::Slice(vec![T::of(0); elements]),
            })
        };
        let count = options::buffers(elements as u64 * T::TYPE.bytes());
        (0..count).map(operand).collect::<Result<_, _>>().map(Self)
    }

    /// Returns the operand whose turn it is.
    fn turn(&mut self, iteration: u64) -> &mut Operand<T> {
        let count = self.0.len() as u64;
        &mut self.0[(iteration % count) as usize]
    }

    /// Writes the content of an iteration into the operand whose turn it is.
    pub(crate) fn fill(&mut self, pattern: &Pattern<T>, rank: usize, iteration: u64) -> Result<(), Failure> {
        match self.turn(iteration) {
            Operand::Registered(Some(input)) | Operand::OutOfPlace(Some((input, _))) => {
                pattern.fill(rank, iteration, input);
            }
            Operand::Slice(input) => pattern.fill(rank, iteration, input),
            Operand::Registered(None) | Operand::OutOfPlace(None) => return Err(lost()),
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
        match self.turn(iteration) {
            Operand::Registered(operand) => timed(group, reduction, operand),
            Operand::OutOfPlace(operand) => timed(group, reduction, operand),
            Operand::Slice(operand) => timed(group, reduction, &mut Some(&mut operand[..])),
        }
    }

    /// Returns how many elements of the iteration's result are wrong.
    pub(crate) fn wrong(&mut self, pattern: &Pattern<T>, iteration: u64) -> Result<u64, Failure> {
        match self.turn(iteration) {
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
