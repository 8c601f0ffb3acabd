//! Receives that many queue pairs share.

use std::any::Any;
use std::fmt::Debug;

use super::{PostError, ReceiveRequest};

/// A shared receive queue (SRQ, `struct ibv_srq`): queue pairs that were created with it take their
/// receives from here, whichever of them a message comes for. So the memory for what may arrive grows with the messages,
/// not with the queue pairs. Destroyed when the last reference goes, its own and those of its queue pairs.
///
/// A receive completes on the receive queue of the queue pair that took it; the completion says which that was. Receives
/// that nobody has taken are not flushed. A queue pair in Error may have taken one that never completes.
pub trait SharedReceiveQueue: Any + Send + Sync + Debug {
    /// Returns how many receives may be outstanding.
    fn capacity(&self) -> u32;

    /// Posts receives; they are taken in this order.
    ///
    /// # Errors
    /// As for [`QueuePair::post_receive`](super::QueuePair::post_receive).
    fn post_receive(&self, requests: &[ReceiveRequest<'_>]) -> Result<(), PostError>;
}
