//! The interface between a completion queue and the owners of its queue pairs.

use std::fmt::Debug;

use crate::endpoint::aftermath::Aftermath;
use tonic_rdma_verbs::{QueuePairNumber, WorkCompletion};

/// The owner of a queue pair whose requests complete on a [`Queue`](super::Queue): a connection, or a port of a tensor
/// link.
pub trait Participant: Send + Sync + Debug + 'static {
    /// Returns the number of the queue pair.
    fn queue_pair_number(&self) -> QueuePairNumber;

    /// Takes completions of its requests, in order, and adds the tasks to wake and the work to run to `after`.
    fn handle_completions(&self, completions: &[WorkCompletion], after: &mut Aftermath);

    /// Returns whether all that arrives answers calls of this process, so that a caller waits for it.
    fn answers_callers(&self) -> bool {
        false
    }

    /// Ends the participant if the device has given up its queue pair.
    fn fail_with_device(&self);

    /// Ends the participant, because [`handle_completions`](Self::handle_completions) panicked.
    fn fail_after_panic(&self);
}
