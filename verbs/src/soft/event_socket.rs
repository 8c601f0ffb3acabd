//! The socket by which this process wakes the poller of a peer's completion queue.

use rustix::net::SendFlags;

use super::peers::received::Received;

/// The sending end of a socket that wakes the poller of a peer's completion queue.
#[derive(Debug)]
pub(crate) struct EventSocket(Received);

impl EventSocket {
    /// Takes over a descriptor that a peer sent. Whatever it is, [`signal`](Self::signal) can't block.
    pub(crate) fn new(descriptor: Received) -> Self {
        Self(descriptor)
    }

    /// Makes an event. If the socket is full, the poller has not handled earlier events yet, and this one is not needed.
    pub(crate) fn signal(&self) {
        let _ = rustix::net::send(&self.0, &[1], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    }
}
