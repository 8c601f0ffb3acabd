//! The socket by which this process wakes the poller of a peer's completion queue.

use std::sync::Arc;

use rustix::net::SendFlags;

use super::peers::received::Socket;
use super::shared::attention::{Answered, Attention};
use super::shared::platform::Native;

/// The sending end of a connection that wakes the poller of a peer's completion queue. This process has made the socket, and no other one
/// has a descriptor of it. To send, the kernel takes no lock of the other end that is held while a process waits, so no peer blocks
/// [`signal`](Self::signal).
#[derive(Debug)]
pub(crate) struct EventSocket(Socket);

impl EventSocket {
    /// Takes over a connection to the peer's completion queue.
    pub(crate) fn new(socket: Socket) -> Self {
        Self(socket)
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use rustix::io::ioctl_fionbio;

    use super::*;
    use crate::soft::peers::received::tests::{ends_soon, socket_pair};

    #[test]
    fn a_connection_that_nobody_reads_delays_no_wake_up() {
        let (ours, theirs) = socket_pair();
        ioctl_fionbio(&ours, false).unwrap();
        let socket = EventSocket::new(Socket::new(ours));
        ends_soon(move || (0..10_000).for_each(|_| socket.signal()));
        drop(theirs);
    }
}
