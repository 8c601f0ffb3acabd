//! What asynchronous events of a device do to its queue pairs.

use std::fmt::Debug;

use ibverbs_sys as sys;

/// A queue pair, as asynchronous events of its device use it.
pub(crate) trait EventTarget: Debug + Send + Sync {
    /// Returns whether one of its queues completes on `queue`.
    fn completes_on(&self, queue: *mut sys::ibv_cq) -> bool;

    /// Notes that the queue pair takes no more receives from a shared receive queue.
    fn last_receive_reached(&self);

    /// Returns whether the user of the queue pair has dropped it.
    fn is_ending(&self) -> bool;

    /// Moves the queue pair to Error. Keeps `reason`, unless the queue pair is in Error already.
    fn fail(&self, reason: &dyn Fn() -> String);
}
