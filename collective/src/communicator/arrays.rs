//! Operations on arrays whose type is known at run time: what the interfaces for Python and for C share.

use std::fmt;

use super::operation::{Foreign, Lengths, Operation, sealed};
use super::{Communicator, Shape};
use crate::engine::{CallerMemory, LentSlices};
use crate::error::{CollectiveError, argument};
use crate::memory::Memory;
use crate::plan::Collective;
use crate::reduce::Reduction;
use tonic_rdma_tensor::Dtype;

/// An array of a program in another language: contiguous bytes, at any address.
pub trait Array: Send + 'static {
    /// Whether the array is only lent. Dropping its operation then gives it back at once, which ends the group
    /// if the operation is under way. Otherwise the operation keeps it to its end.
    const IS_LENT: bool;

    /// Returns the bytes of the elements.
    fn bytes(&self) -> &[u8];

    /// Returns the bytes of the elements, to write to. There are none if they may only be read.
    fn bytes_mut(&mut self) -> &mut [u8];
}

/// An operation, and what it needs besides arrays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// See [`Communicator::all_reduce`].
    AllReduce(Reduction),
    /// See [`Communicator::reduce_scatter`].
    ReduceScatter(Reduction),
    /// See [`Communicator::all_gather`].
    AllGather,
    /// See [`Communicator::broadcast`]; with the root.
    Broadcast(usize),
    /// See [`Communicator::barrier`]. It takes no arrays.
    Barrier,
    /// See [`Communicator::send`]; with the rank that receives. It takes an input alone.
    Send(usize),
    /// See [`Communicator::recv`]; with the rank that sends.
    Receive(usize),
}

impl fmt::Display for Verb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::AllReduce(_) => "all_reduce",
            Self::ReduceScatter(_) => "reduce_scatter",
            Self::AllGather => "all_gather",
            Self::Broadcast(_) => "broadcast",
            Self::Barrier => "barrier",
            Self::Send(_) => "send",
            Self::Receive(_) => "recv",
        })
    }
}

/// The arrays of an operation: what it reads, and where its result goes. Without an input it is in place.
#[derive(Clone, Debug)]
pub struct Arrays<A> {
    dtype: Dtype,
    input: Option<A>,
    out: Option<A>,
}

// An operation never pins the memory.
impl<A> Unpin for Arrays<A> {}

impl<A: Array> Arrays<A> {
    /// Makes the arrays, with elements of type `dtype`.
    pub fn new(dtype: Dtype, input: Option<A>, out: Option<A>) -> Self {
        Self { dtype, input, out }
    }

    /// Makes the operation one in place if the arrays lie where that has them: the part of this rank begins
    /// `part` bytes after the whole.
    fn join(&mut self, verb: Verb, part: usize) -> Result<(), CollectiveError> {
        if let (Some(input), Some(out)) = (&self.input, &self.out) {
            let (first, second) = (input.bytes().as_ptr_range(), out.bytes().as_ptr_range());
            let apart = first.end <= second.start || second.end <= first.start;
            if !(first.is_empty() || second.is_empty() || apart) {
                let (first, second) = (first.start.addr(), second.start.addr());
                let lengths = (input.bytes().len(), out.bytes().len());
                let fits = match verb {
                    Verb::AllGather => first == second + part && lengths.0 <= lengths.1,
                    Verb::ReduceScatter(_) => second == first + part && lengths.0 >= lengths.1,
                    _ => first == second && lengths.0 == lengths.1,
                };
                if !fits {
                    return Err(argument(format!("{verb}: the arrays of input and output overlap")));
                }
                // The operand is the whole.
                let is_whole = input.bytes().len() > out.bytes().len();
                let input = self.input.take();
                self.out = if is_whole { input } else { self.out.take() };
            }
        }
        let is_read_only = |out: &mut A| out.bytes().len() != out.bytes_mut().len();
        if self.out.as_mut().is_some_and(is_read_only) {
            return Err(argument(format!("{verb}: the array of the result is read-only")));
        }
        Ok(())
    }
}

impl Verb {
    /// Makes the operation. It is in place if input and output are where an operation in place has them.
    ///
    /// The operation fails if arrays do not fit, or overlap in another way, or if the result is read-only.
    pub fn operation<A: Array>(
        self,
        communicator: &Communicator,
        mut arrays: Arrays<A>,
    ) -> Operation<Arrays<A>> {
        let lengths = sealed::Operand::lengths(&arrays);
        let whole = lengths.out.max(lengths.input.unwrap_or(0));
        let part = communicator.part(whole, communicator.rank()).start;
        let error = arrays.join(self, part * arrays.size()).err();
        let operation = match self {
            Self::AllReduce(reduction) => communicator.all_reduce(arrays, reduction),
            Self::ReduceScatter(reduction) => communicator.reduce_scatter(arrays, reduction),
            Self::AllGather => communicator.all_gather(arrays),
            Self::Broadcast(root) => communicator.broadcast(arrays, root),
            Self::Barrier => {
                let shape = Shape::whole(Collective::Barrier, sealed::Operand::lengths(&arrays));
                communicator.operation(arrays, shape)
            }
            Self::Send(to) => communicator.send(to, arrays),
            Self::Receive(from) => communicator.recv(from, arrays),
        };
        operation.refused(error)
    }
}

impl<A> Arrays<A> {
    fn size(&self) -> usize {
        self.dtype.size().unwrap_or(1)
    }
}

#[allow(private_interfaces, reason = "the trait can't be named outside this crate")]
impl<A: Array> sealed::Operand for Arrays<A> {
    // The type of the bytes.
    type Element = u8;
    type Kept = ();

    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn lengths(&self) -> Lengths {
        let length = |array: &A| array.bytes().len() / self.size();
        Lengths { input: self.input.as_ref().map(length), out: self.out.as_ref().map_or(0, length) }
    }

    fn lend(&mut self) -> LentSlices<'_> {
        LentSlices {
            input: self.input.as_ref().map(A::bytes),
            out: self.out.as_mut().map_or(&mut [], A::bytes_mut),
        }
    }

    fn into_memory(self, lengths: Lengths) -> Result<CallerMemory<Memory>, Self> {
        Ok(Foreign::memory(self, lengths, A::IS_LENT))
    }

    fn from_memory(memory: CallerMemory<Memory>, _: Lengths) -> Option<Self> {
        Foreign::operand(memory)
    }
}
