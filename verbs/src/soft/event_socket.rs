//! The socket by which this process wakes the poller of a peer's completion queue.

use std::sync::Arc;

use rustix::net::SendFlags;

use super::peers::received::Received;
use super::shared::attention::{Answered, Attention};
use super::shared::platform::Native;

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

/// Wakes the poller of a peer's completion queue, once for each request of the peer, for one connection.
#[derive(Debug)]
pub(crate) struct PeerWaker {
    socket: Arc<EventSocket>,
    answered: Answered<Native>,
}

impl PeerWaker {
    /// Makes the waker of a new connection.
    pub(crate) fn new(socket: Arc<EventSocket>) -> Self {
        Self { socket, answered: Answered::default() }
    }

    /// Makes an event, unless the peer got one since it has asked. The caller has stored its news before it loaded `attention`,
    /// or owes another look with a fence between.
    pub(crate) fn answer(&self, attention: Attention) {
        if self.answered.answer(attention) {
            self.socket.signal();
        }
    }

    /// Makes an event in any case.
    pub(crate) fn wake(&self) {
        self.socket.signal();
    }
}
