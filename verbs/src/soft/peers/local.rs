//! The interface of the queue pairs of this process towards their peers.

use std::any::Any;
use std::fmt::Debug;
use std::io;
use std::os::fd::BorrowedFd;

use super::message::{Answer, Object};

/// A function that sends an answer and its descriptors to a peer.
pub(crate) type SendAnswer<'a> = dyn FnMut(Answer, &[BorrowedFd<'_>]) -> io::Result<()> + 'a;

/// A queue pair of this process. The service answers requests for its objects, and rings it at deadlines. The death of its
/// peer moves the queue pair to Error.
pub(crate) trait LocalQueuePair: Any + Debug + Send + Sync {
    /// Returns the number, which is unique within the device.
    fn number(&self) -> u32;

    /// Returns the secret that a peer must know to ask for anything.
    fn token(&self) -> u64;

    /// Sends `object` to a peer with `send`, if this queue pair may share the object. Returns what `send` returned.
    fn grant(&self, object: Object, send: &mut SendAnswer<'_>) -> Option<io::Result<()>>;

    /// Rings the completion queues of this queue pair, so that the next poll visits it.
    fn ring_own(&self);

    /// Moves the queue pair to Error, because its peer died.
    fn fail(&self);
}
