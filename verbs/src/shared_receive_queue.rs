//! Receive queues that many queue pairs share.

use std::any::Any;
use std::fmt::Debug;

use super::sealed::Sealed;
use super::{PostError, ReceiveRequest};

/// A shared receive queue (SRQ, `struct ibv_srq`). All queue pairs that were created with the queue take their receives from
/// it. Therefore the memory for incoming messages grows with the number of messages, not with the number of queue pairs.
/// Dropping the last reference destroys the queue. Each of its queue pairs holds a reference.
///
/// A receive completes on the receive queue of the queue pair that took it, and the completion names that queue pair.
/// Receives that no queue pair took are not flushed. A receive that a queue pair took completes, although the queue pair is
/// in Error or was dropped; if it was dropped, this takes up to a second, and the completion names no queue pair (number 0).
pub trait SharedReceiveQueue: Sealed + Any + Send + Sync + Debug {
    /// Returns the number of receives that may be outstanding.
    fn capacity(&self) -> u32;

    /// Posts receives. The queue pairs take the receives in the order of posting.
    ///
    /// # Errors
    /// Those of [`QueuePair::post_receive`](super::QueuePair::post_receive).
    fn post_receive(&self, requests: &[ReceiveRequest<'_>]) -> Result<(), PostError>;
}
