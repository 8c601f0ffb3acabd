//! What this process holds of its peers: the descriptors that they send, and the sockets on which they can
//! send them.
//!
//! | | made by | calls of this process |
//! |---|---|---|
//! | [`Received`] | the peer, or anyone | the checks of [`memfd`](crate::memfd), `mmap` if they pass, and `close` in a thread of its own |
//! | [`Socket`] | this process, by `accept` or `connect` | all |
//!
//! No other process has a descriptor of a [`Socket`], because this process sends none of them. So no peer
//! holds a lock of it, and its calls wait for no peer. A peer can lock a descriptor that it has sent for as
//! long as it wants, by a call of its own that waits in the middle. Therefore nothing that came from a peer
//! is read, written, polled or shut down.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use rustix::net::{ReturnFlags, Shutdown, sockopt};

use super::message;
use crate::soft::closer::{self, Source};
use crate::soft::forked::{self, Origin};
use crate::soft::system;

/// A descriptor that a peer sent. Dropping it does not block.
#[derive(Debug)]
pub(crate) struct Received {
    descriptor: Option<OwnedFd>,
    source: Option<Source>,
    origin: Option<Origin>,
}

impl Received {
    pub(in crate::soft) fn new(descriptor: OwnedFd, source: Option<Source>) -> Self {
        forked::keep_from_children(&descriptor);
        Self { descriptor: Some(descriptor), source, origin: Origin::here().ok() }
    }

    /// Closes the descriptor, whose memory this process has mapped. So this is not the last close.
    pub(crate) fn close_mapped(mut self) {
        self.descriptor.take().iter().for_each(forked::leave_to_children);
    }
}

impl AsFd for Received {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // Only a function that takes the value takes the descriptor.
        self.descriptor.as_ref().unwrap_or_else(|| unreachable!()).as_fd()
    }
}

impl Drop for Received {
    fn drop(&mut self) {
        let Some(descriptor) = self.descriptor.take() else { return };
        forked::leave_to_children(&descriptor);
        // A forked child has another file instead.
        if !self.origin.is_some_and(Origin::is_forked) {
            closer::close(descriptor, self.source);
        }
    }
}

/// One end of a connection to a peer. Dropping it does not block, and the other side notices the drop at
/// once.
#[derive(Debug)]
pub(crate) struct Socket {
    descriptor: Option<OwnedFd>,
    /// Whether messages of the peer may have descriptors.
    takes_descriptors: AtomicBool,
    origin: Option<Origin>,
}

impl Socket {
    /// Takes over a socket that was accepted, or is about to connect. If the kernel knows how to, it lets no
    /// descriptors in.
    pub(crate) fn new(descriptor: OwnedFd) -> Self {
        forked::keep_from_children(&descriptor);
        let takes_descriptors = AtomicBool::new(!system::pass_descriptors(&descriptor, false));
        Self { descriptor: Some(descriptor), takes_descriptors, origin: Origin::here().ok() }
    }

    /// Lets the peer send descriptors from now on.
    pub(crate) fn take_descriptors(&self) {
        self.takes_descriptors.store(true, Relaxed);
        system::pass_descriptors(self, true);
    }

    /// Returns whether messages of the peer may have descriptors.
    pub(crate) fn takes_descriptors(&self) -> bool {
        self.takes_descriptors.load(Relaxed)
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // Only `drop` takes the descriptor.
        self.descriptor.as_ref().unwrap_or_else(|| unreachable!()).as_fd()
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        let Some(descriptor) = self.descriptor.take() else { return };
        forked::leave_to_children(&descriptor);
        // A forked child has another file instead.
        if self.origin.is_some_and(Origin::is_forked) {
            return;
        }
        hang_up(&descriptor);
        // A socket with an empty queue has nothing to wait for.
        if self.takes_descriptors() && !empty(&descriptor) {
            let source = system::source(&descriptor).ok();
            closer::close(descriptor, source);
        }
    }
}

/// Tells the other side that this side has gone. No message comes any more. The call takes no lock that is
/// held while a process waits.
pub(crate) fn hang_up(socket: &impl AsFd) {
    let _ = rustix::net::shutdown(socket, Shutdown::Both);
}

/// Takes all messages of a socket that is shut down. Returns false if there are messages that this process
/// does not take.
fn empty(socket: &OwnedFd) -> bool {
    /// The kernel holds far fewer messages.
    const MESSAGES: usize = 1 << 12;
    (0..MESSAGES)
        .find_map(|_| match message::receive(socket, &mut [0; 1]) {
            Ok((0, None)) if is_empty(socket) => Some(true),
            Ok(_) => None,
            Err(error) => match error.kind() {
                std::io::ErrorKind::Interrupted | std::io::ErrorKind::ConnectionReset => None,
                std::io::ErrorKind::WouldBlock => Some(true),
                _ => Some(false),
            },
        })
        .unwrap_or(false)
}

/// Returns whether a socket that is shut down has no message. The kernel returns zero bytes at the end, and
/// also for a message without bytes. But only a message has its sender, for which there is no room here.
fn is_empty(socket: &OwnedFd) -> bool {
    let shows = |shows| sockopt::set_socket_passcred(socket, shows).is_ok();
    let next = shows(true).then(|| message::peek(socket, &mut [0; 1]));
    shows(false) && matches!(next, Some(Ok((0, flags))) if !flags.contains(ReturnFlags::CTRUNC))
}

#[cfg(test)]
pub(in crate::soft) mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use std::io::{IoSlice, Write};
    use std::mem::MaybeUninit;
    use std::net::{TcpListener, TcpStream};
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use rustix::net::{
        AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
    };

    use super::*;

    /// The time that the last close of [`lingering`] takes.
    const LINGER: Duration = Duration::from_secs(100);
    /// Time after which a test fails: shorter than [`LINGER`], and longer than any thread of a busy machine
    /// waits for its turn.
    const TIMEOUT: Duration = Duration::from_secs(60);

    /// Returns a TCP socket with unsent bytes, whose last close blocks until the other side, which is
    /// returned too, is closed.
    pub(in crate::soft) fn lingering() -> (OwnedFd, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (theirs, _) = listener.accept().unwrap();
        sockopt::set_socket_linger(&ours, Some(LINGER)).unwrap();
        ours.set_nonblocking(true).unwrap();
        while ours.write(&[0; 1 << 16]).is_ok() {}
        (ours.into(), theirs)
    }

    /// Returns two connected sockets, as those that devices use.
    pub(in crate::soft) fn socket_pair() -> (OwnedFd, OwnedFd) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap()
    }

    /// Sends `bytes`, and a descriptor `count` times.
    pub(in crate::soft) fn send(socket: &impl AsFd, bytes: &[u8], descriptor: &OwnedFd, count: usize) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let sent = vec![descriptor.as_fd(); count];
        assert!(control.push(SendAncillaryMessage::ScmRights(&sent)));
        rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::empty()).unwrap();
    }

    /// Runs `work` in another thread, and checks that it ends long before a lingering socket is closed.
    pub(in crate::soft) fn ends_soon<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
        let (done, ended) = channel();
        std::thread::spawn(move || done.send(work()));
        ended.recv_timeout(TIMEOUT).unwrap()
    }

    #[test]
    fn dropping_does_not_wait() {
        let (socket, other_end) = lingering();
        ends_soon(move || drop(Received::new(socket, None)));
        drop(other_end);
        // A socket in whose queue such descriptors wait, also behind a message without bytes.
        for (bytes, count) in [(&b"x"[..], 1), (b"", 1), (b"x", 253)] {
            let (ours, theirs) = socket_pair();
            let ours = Socket::new(ours);
            ours.take_descriptors();
            let (socket, other_end) = lingering();
            rustix::net::send(&theirs, &[], SendFlags::empty()).unwrap();
            send(&theirs, bytes, &socket, count);
            drop((socket, theirs));
            ends_soon(move || drop(ours));
            drop(other_end);
        }
    }

    /// The two kinds of an empty answer of the kernel are told apart.
    #[test]
    fn a_message_without_bytes_is_not_the_end() {
        let (ours, theirs) = socket_pair();
        rustix::net::send(&theirs, &[], SendFlags::empty()).unwrap();
        hang_up(&ours);
        assert!(!is_empty(&ours));
        assert_eq!(message::receive(&ours, &mut [0; 1]).unwrap().0, 0);
        assert!(is_empty(&ours) && empty(&ours));
    }

    /// The other side learns at once that this side has gone, also if a descriptor is left that can't be
    /// closed soon.
    #[test]
    fn the_other_end_notices_the_drop() {
        let (ours, theirs) = socket_pair();
        let ours = Socket::new(ours);
        ours.take_descriptors();
        let (socket, other_end) = lingering();
        send(&theirs, b"x", &socket, 253);
        drop(socket);
        ends_soon(move || drop(ours));
        assert!(rustix::net::send(&theirs, b"x", SendFlags::NOSIGNAL).is_err());
        drop(other_end);
    }
}
