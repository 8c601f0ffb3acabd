//! What a run asks of the program.

use crate::dataflow::{KernelError, NodeId, Outlet};
use crate::placement::CrossingId;

/// The side of a crossing at which a value is seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// This part sends the value.
    Sent,
    /// This part has received the value.
    Received,
}

/// Feeds inputs into a run, and sees what comes out. Only [`feed`](Self::feed) is required. A closure `FnMut(u64, NodeId) -> Result<V,
/// KernelError>` is a program that only feeds.
///
/// The thread of the executor calls these methods. The time that they take is part of the step.
pub trait Program<V> {
    /// Returns the value of an input of this part in a step. Each input is asked for once in each step, in ascending order.
    ///
    /// # Errors
    /// There is no such value. The run ends with [`GraphError::Kernel`](crate::GraphError::Kernel), which names the input.
    fn feed(&mut self, step: u64, input: NodeId) -> Result<V, KernelError>;

    /// Takes a result of a step, if the node of the result belongs to this part.
    ///
    /// # Errors
    /// Ends the run with an error that names the node.
    fn result(&mut self, step: u64, outlet: Outlet, value: V) -> Result<(), KernelError> {
        let _ = (step, outlet, value);
        Ok(())
    }

    /// Sees each value that crosses, at both sides: before it is sent, and after it was received. A clone that is kept makes an engine
    /// copy the tensor where it would otherwise work in place.
    ///
    /// # Errors
    /// Ends the run with an error that names the crossing tensor.
    fn crossed(
        &mut self,
        direction: Direction,
        crossing: CrossingId,
        step: u64,
        value: &V,
    ) -> Result<(), KernelError> {
        let _ = (direction, crossing, step, value);
        Ok(())
    }
}

impl<V, F> Program<V> for F
where
    F: FnMut(u64, NodeId) -> Result<V, KernelError>,
{
    fn feed(&mut self, step: u64, input: NodeId) -> Result<V, KernelError> {
        self(step, input)
    }
}
