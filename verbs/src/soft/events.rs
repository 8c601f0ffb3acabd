//! The events of a completion queue: what wakes a thread that sleeps, and the socket by which this process
//! wakes the poller of a peer's completion queue.
//!
//! ```text
//!  peer A ── socket ──┐
//!  peer B ── socket ──┼── epoll descriptor: the queue's event descriptor
//!  this process ─ eventfd
//! ```
//! Each peer process has a connection of its own, which it has made to the device's socket. A peer can
//! neither block this process, nor take events of others: it has no descriptor of this side's socket, and
//! this process never writes to the socket, and reads it without waiting. A full socket refuses further
//! messages, which are not needed: the poller has not handled the earlier ones yet.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, Weak};

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec};
use rustix::net::{RecvFlags, SendFlags};

use super::peers::message;
use super::peers::received::Socket;
use super::shared::attention::{Answered, Attention};
use super::shared::platform::Native;
use crate::panics::lock;

/// The events of a completion queue.
#[derive(Debug)]
pub(super) struct Events {
    epoll: OwnedFd,
    own: OwnedFd,
    sockets: Mutex<HashMap<u64, Arc<Socket>>>,
    next: AtomicU64,
}

/// Our end of a peer's socket. Dropping it removes the socket. It is kept with the connection to the peer's
/// process, so that the socket is removed when that process has ended, even if no thread takes the events of
/// the queue.
#[derive(Debug)]
pub(crate) struct EventEnd {
    events: Weak<Events>,
    number: u64,
}

impl EventEnd {
    /// Adds this value to `ends`, and removes those whose socket the peer has closed.
    pub(crate) fn keep(self, ends: &Mutex<Vec<Self>>) {
        let is_used = |end: &Self| {
            end.events.upgrade().is_some_and(|events| lock(&events.sockets).contains_key(&end.number))
        };
        let mut ends = lock(ends);
        ends.retain(is_used);
        ends.push(self);
    }
}

impl Drop for EventEnd {
    fn drop(&mut self) {
        if let Some(events) = self.events.upgrade() {
            events.remove_socket(self.number);
        }
    }
}

/// The number of the eventfd in the epoll descriptor. Sockets have greater numbers.
const OWN: u64 = 0;
/// Most sockets of one queue.
const MAX_SOCKETS: usize = 4096;
/// Events taken at once.
const BATCH: usize = 32;
/// Most messages read from one socket at once. The kernel holds about 10.
const MESSAGES: usize = 32;

impl Events {
    pub(super) fn new() -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let own = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(&epoll, &own, EventData::new_u64(OWN), EventFlags::IN)?;
        Ok(Self { epoll, own, sockets: Mutex::default(), next: AtomicU64::new(OWN + 1) })
    }

    /// Returns the descriptor that is readable while there are events.
    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// Makes an event.
    pub(super) fn signal(&self) {
        let _ = rustix::io::write(&self.own, &1u64.to_ne_bytes());
    }

    /// Takes over a connection by which a peer makes events. Returns what keeps it.
    pub(super) fn add_socket(self: &Arc<Self>, socket: &Arc<Socket>) -> io::Result<EventEnd> {
        let mut sockets = lock(&self.sockets);
        if sockets.len() >= MAX_SOCKETS {
            return Err(io::Error::other(format!("{MAX_SOCKETS} processes use this completion queue")));
        }
        let number = self.next.fetch_add(1, Relaxed);
        epoll::add(&self.epoll, socket, EventData::new_u64(number), EventFlags::IN)?;
        sockets.insert(number, Arc::clone(socket));
        Ok(EventEnd { events: Arc::downgrade(self), number })
    }

    fn remove_socket(&self, number: u64) {
        if let Some(socket) = lock(&self.sockets).remove(&number) {
            // Closing is not enough: a forked child may hold the socket, too.
            let _ = epoll::delete(&self.epoll, &socket);
        }
    }

    /// Takes the events that peers have made. Returns their number.
    #[cfg(test)]
    pub(super) fn take_peers_events(&self) -> usize {
        let one = |socket: &&Arc<Socket>| matches!(message::receive(*socket, &mut [0u8; 8]), Ok((1.., _)));
        lock(&self.sockets).values().map(|socket| std::iter::repeat(socket).take_while(one).count()).sum()
    }

    /// Takes the events that have come. Returns whether there was one.
    pub(super) fn take(&self) -> bool {
        let mut events = Vec::with_capacity(BATCH);
        let spare = rustix::buffer::spare_capacity(&mut events);
        if epoll::wait(&self.epoll, spare, Some(&Timespec::default())).is_err() {
            return false;
        }
        let mut sockets = lock(&self.sockets);
        for number in events.iter().map(|event| event.data.u64()) {
            if number == OWN {
                let _ = rustix::io::read(&self.own, &mut [0u8; 8][..]);
            } else if sockets.get(&number).is_some_and(|socket| !drain(socket))
                && let Some(socket) = sockets.remove(&number)
            {
                // Closing is not enough: a forked child may hold the socket, too.
                let _ = epoll::delete(&self.epoll, &socket);
            }
        }
        !events.is_empty()
    }
}

/// Reads the messages of a socket. Returns false if the peer has closed the socket.
fn drain(socket: &Socket) -> bool {
    // Only Linux before 6.16 lets descriptors in here. Messages that may have some need two calls each, so
    // the poll takes one message.
    let may_carry = socket.takes_descriptors();
    for _ in 0..if may_carry { 1 } else { MESSAGES } {
        let mut byte = [0u8; 8];
        let message = if may_carry {
            message::receive(socket, &mut byte)
        } else {
            rustix::net::recv(socket, &mut byte, RecvFlags::DONTWAIT)
                .map_or_else(|error| Err(error.into()), |(length, _)| Ok((length, None)))
        };
        match message {
            Ok((1.., None)) => {}
            // The end, or a descriptor that no device sends.
            Ok(_) => return false,
            Err(error) => {
                return matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted);
            }
        }
    }
    true
}

/// Wakes the poller of a peer's completion queue, once each time that the peer asks to be woken, for one
/// connection. This process has made the socket, and no other one has a descriptor of it. To send, the kernel
/// takes no lock of the other side that is held while a process waits, so no peer blocks [`wake`](Self::wake).
#[derive(Debug)]
pub(crate) struct PeerWaker {
    socket: Arc<Socket>,
    answered: Answered<Native>,
}

impl PeerWaker {
    /// Makes the waker of a new connection.
    pub(crate) fn new(socket: Arc<Socket>) -> Self {
        Self { socket, answered: Answered::default() }
    }

    /// Makes an event, unless the peer got one since it has asked. The caller has stored its news before it
    /// loaded `attention`, or checks again later, after a fence.
    pub(crate) fn answer(&self, attention: Attention) {
        if self.answered.answer(attention) {
            self.wake();
        }
    }

    /// Makes an event in any case. If the socket is full, the poller has not handled earlier events yet, and
    /// this one is not needed.
    pub(crate) fn wake(&self) {
        let _ = rustix::net::send(&self.socket, &[1], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::super::peers::received::tests::{ends_soon, lingering, send, socket_pair};
    use super::*;

    /// A descriptor that a peer sends instead of an event can block its last close. A thread that polls must
    /// not close it.
    #[test]
    fn a_descriptor_that_lingers_does_not_stop_a_poller() {
        for count in [1, 2, 253] {
            let events = Arc::new(Events::new().unwrap());
            let (ours, peer) = socket_pair();
            let ours = Arc::new(Socket::new(ours));
            let _end = events.add_socket(&ours).unwrap();
            let (socket, other_end) = lingering();
            // As on Linux before 6.16.
            ours.take_descriptors();
            drop(ours);
            send(&peer, b"x", &socket, count);
            drop(socket);
            let left = ends_soon(move || {
                events.take();
                lock(&events.sockets).len()
            });
            assert_eq!(left, 0, "this peer has no socket any more");
            drop(other_end);
        }
    }
}

#[cfg(test)]
mod event_socket_tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use rustix::io::ioctl_fionbio;

    use super::*;
    use crate::soft::peers::received::tests::{ends_soon, socket_pair};

    #[test]
    fn a_connection_that_nobody_reads_delays_no_wake_up() {
        let (ours, theirs) = socket_pair();
        ioctl_fionbio(&ours, false).unwrap();
        let waker = PeerWaker::new(Arc::new(Socket::new(ours)));
        ends_soon(move || (0..10_000).for_each(|_| waker.wake()));
        drop(theirs);
    }
}
