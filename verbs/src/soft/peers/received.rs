//! Descriptors that a peer can choose, and how they are closed.
//!
//! The last close of a descriptor can block for as long as the process wants that has made it: a TCP socket that lingers waits for
//! its other end, and a file of FUSE waits for the process that serves it. The close of a unix socket also closes all descriptors
//! that wait in its queue. Therefore a thread of its own closes such descriptors.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};

use rustix::net::{AddressFamily, Shutdown, SocketType, sockopt};

use super::message;
use crate::memfd;
use crate::soft::forked::{self, Origin};

/// Most descriptors that wait to be closed. The bounds on connections keep their number far below.
const WAITING: usize = 8192;
/// Forks in a row without exec whose last process still has a thread that closes descriptors.
const GENERATIONS: usize = 4;

/// A descriptor that a peer sent, or a socket on which a peer can send descriptors. Dropping it does not block. If it is a socket,
/// the other end notices the drop at once.
#[derive(Debug)]
pub(crate) struct Received {
    descriptor: Option<OwnedFd>,
    origin: Option<Origin>,
}

impl Received {
    pub(crate) fn new(descriptor: OwnedFd) -> Self {
        forked::keep_from_children(&descriptor);
        Self { descriptor: Some(descriptor), origin: Origin::here().ok() }
    }
}

impl AsFd for Received {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // Only `drop` takes the descriptor.
        self.descriptor.as_ref().unwrap_or_else(|| unreachable!()).as_fd()
    }
}

impl Drop for Received {
    fn drop(&mut self) {
        let Some(descriptor) = self.descriptor.take() else { return };
        forked::leave_to_children(&descriptor);
        // A forked child has another file in its place.
        if self.origin.is_some_and(Origin::is_forked) || memfd::is_memfd(&descriptor) {
            return;
        }
        // Descriptors that wait before this one must not delay the news that this end has gone.
        let _ = rustix::net::shutdown(&descriptor, Shutdown::Both);
        if is_message_socket(&descriptor) {
            // After the shutdown, no message comes any more. A socket without messages has nothing to wait for.
            empty(&descriptor);
            return;
        }
        close_elsewhere(descriptor);
    }
}

/// Returns whether a descriptor is a connected unix socket of messages, as those that devices use.
fn is_message_socket(descriptor: &OwnedFd) -> bool {
    sockopt::socket_domain(descriptor) == Ok(AddressFamily::UNIX)
        && sockopt::socket_type(descriptor) == Ok(SocketType::SEQPACKET)
        && sockopt::socket_acceptconn(descriptor) == Ok(false)
}

/// Takes all messages of a socket, and leaves their descriptors to the thread.
fn empty(socket: &OwnedFd) {
    /// Empty messages in a row that stand for the end. The kernel holds fewer messages.
    const END: usize = 1024;
    let (mut bytes, mut empty) = ([0; 1], 0);
    while empty < END {
        match message::receive_owned(socket, &mut bytes) {
            // An empty message, or the end: the kernel tells them apart in no other way.
            Ok((0, fds)) if fds.is_empty() => empty += 1,
            Ok((_, fds)) => {
                empty = 0;
                fds.into_iter().filter(|fd| !memfd::is_memfd(fd)).for_each(close_elsewhere);
            }
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(_) => return,
        }
    }
}

/// Closes a descriptor in another thread.
fn close_elsewhere(descriptor: OwnedFd) {
    match closer().map(|closer| closer.try_send(descriptor)) {
        Some(Ok(())) => {}
        Some(Err(TrySendError::Full(descriptor) | TrySendError::Disconnected(descriptor))) => {
            crate::throttled!(warn, "too many descriptors of peers wait to be closed");
            drop(descriptor);
        }
        None => {}
    }
}

/// A thread that closes descriptors: its queue, and its process.
struct Closer {
    sender: SyncSender<OwnedFd>,
    origin: Origin,
}

/// Returns the queue of the thread that closes descriptors. `None` if the thread can't be started; descriptors are closed at once
/// then.
fn closer() -> Option<&'static SyncSender<OwnedFd>> {
    /// The threads of this process and of its parents, each with its process. A child that was forked starts its own.
    static CLOSERS: [OnceLock<Option<Closer>>; GENERATIONS] = [const { OnceLock::new() }; GENERATIONS];
    CLOSERS.iter().find_map(|closer| {
        let closer = closer.get_or_init(|| {
            let origin = Origin::here().ok()?;
            let (sender, receiver) = sync_channel::<OwnedFd>(WAITING);
            let thread = std::thread::Builder::new().name("rdma-soft-close".into());
            thread.spawn(move || receiver.into_iter().for_each(drop)).ok()?;
            Some(Closer { sender, origin })
        });
        closer.as_ref().filter(|closer| !closer.origin.is_forked()).map(|closer| &closer.sender)
    })
}

#[cfg(test)]
pub(in crate::soft) mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use std::io::{IoSlice, Write};
    use std::mem::MaybeUninit;
    use std::net::{TcpListener, TcpStream};
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

    use super::*;

    /// The time that the last close of [`lingering`] takes.
    const LINGER: Duration = Duration::from_secs(100);
    /// Time after which a test fails: shorter than [`LINGER`], and longer than any thread of a busy machine waits for its turn.
    const PATIENCE: Duration = Duration::from_secs(60);

    /// Returns a TCP socket with unsent bytes, whose last close blocks until the other end, which is returned too, is closed.
    pub(in crate::soft) fn lingering() -> (OwnedFd, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (theirs, _) = listener.accept().unwrap();
        rustix::net::sockopt::set_socket_linger(&ours, Some(LINGER)).unwrap();
        ours.set_nonblocking(true).unwrap();
        while ours.write(&[0; 1 << 16]).is_ok() {}
        (ours.into(), theirs)
    }

    /// Sends a byte and a descriptor.
    pub(in crate::soft) fn send(socket: &impl AsFd, descriptor: &OwnedFd) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let sent = [descriptor.as_fd()];
        assert!(control.push(SendAncillaryMessage::ScmRights(&sent)));
        rustix::net::sendmsg(socket, &[IoSlice::new(b"x")], &mut control, SendFlags::empty()).unwrap();
    }

    /// Runs `work` in another thread, and checks that it ends long before a lingering socket is closed.
    pub(in crate::soft) fn ends_soon<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
        let (done, ended) = channel();
        std::thread::spawn(move || done.send(work()));
        ended.recv_timeout(PATIENCE).unwrap()
    }

    #[test]
    fn dropping_does_not_wait() {
        let (socket, other_end) = lingering();
        ends_soon(move || drop(Received::new(socket)));
        // A socket in whose queue such a descriptor waits.
        let (one, two) = std::os::unix::net::UnixStream::pair().unwrap();
        let (socket, another_end) = lingering();
        send(&one, &socket);
        drop((socket, one));
        ends_soon(move || drop(Received::new(two.into())));
        drop((other_end, another_end));
    }
}
