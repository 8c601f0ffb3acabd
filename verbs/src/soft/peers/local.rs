//! The interface of the queue pairs of this process towards their peers.

use std::any::Any;
use std::fmt::Debug;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};

use super::address::Address;
use super::message::{Answer, Object};
use super::received::Socket;
use super::segments::Segments;
use crate::soft::events::EventEnd;
use crate::soft::shared::end::EndState;

/// A function that sends an answer and its descriptor to a peer.
pub(crate) type SendAnswer<'a> = dyn FnMut(Answer, &[BorrowedFd<'_>]) -> io::Result<()> + 'a;

/// The memory that this process and a client share.
#[derive(Clone, Debug)]
pub(crate) struct ClientMemory {
    /// Whether this process lets the client map its memory for reading.
    pub(crate) is_shared: bool,
    /// The segments of the client that this process has mapped.
    pub(crate) segments: Arc<Segments>,
    /// Our ends of the sockets by which the client wakes pollers of this process.
    pub(crate) event_ends: Arc<Mutex<Vec<EventEnd>>>,
}

/// A queue pair of this process. The service answers requests for its objects, and rings it at deadlines. The death of its
/// peer moves the queue pair to Error.
pub(crate) trait LocalQueuePair: Any + Debug + Send + Sync {
    /// Returns the number, which is unique within the device.
    fn number(&self) -> u32;

    /// Returns the secret that a peer must know to ask for anything.
    fn token(&self) -> u64;

    /// Returns the address and the state of the queue pair of the peer that this one is connected to.
    fn peer_address(&self) -> Option<(Address, EndState)>;

    /// Sends `object` to the process `client` with `send`, if this queue pair may share the object. Returns what `send` returned.
    fn grant(
        &self,
        object: Object,
        client: &ClientMemory,
        send: &mut SendAnswer<'_>,
    ) -> Option<io::Result<()>>;

    /// Takes over a connection by which the peer wakes the poller of the completion queue `id`, if the peer may have one.
    fn add_event_socket(&self, id: u64, socket: &Arc<Socket>) -> Option<io::Result<()>>;

    /// Sends the peer `news` about its segments.
    fn confirm(&self, news: Object);

    /// Takes `news` of the peer about the segments that this process has offered.
    fn take_news(&self, news: Object);

    /// Wakes the pollers of this queue pair's completion queues, if they sleep.
    fn notify(&self);

    /// Carries out the records of the peer, because no thread polls. Returns true if there are more.
    fn carry_out(&self) -> bool;

    /// Looks whether the peer takes the records of this queue pair. Returns false when there is nothing to look after any more.
    fn look_after(&self) -> bool;

    /// Notes that the peer died.
    fn fail(&self);
}
