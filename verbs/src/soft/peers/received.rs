//! Descriptors that a peer can choose, and how they are closed.
//!
//! The last close of a descriptor can block for as long as the process wants that has made it: a TCP socket that lingers waits for
//! its other end, and a file of FUSE waits for the process that serves it. The close of a unix socket also closes all descriptors
//! that wait in its queue. Therefore a thread of its own closes such descriptors.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};

use crate::memfd;
use crate::soft::forked::Origin;

/// Most descriptors that wait to be closed. The bounds on connections keep their number far below.
const WAITING: usize = 8192;

/// A descriptor that a peer sent, or a socket on which a peer can send descriptors. Dropping it does not block.
#[derive(Debug)]
pub(crate) struct Received(Option<OwnedFd>);

impl Received {
    pub(crate) fn new(descriptor: OwnedFd) -> Self {
        Self(Some(descriptor))
    }
}

impl AsFd for Received {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.0 {
            Some(descriptor) => descriptor.as_fd(),
            // Only `drop` takes the descriptor.
            None => unreachable!(),
        }
    }
}

impl Drop for Received {
    fn drop(&mut self) {
        let Some(descriptor) = self.0.take() else { return };
        if memfd::is_memfd(&descriptor) {
            // Memory has nothing to wait for.
            return;
        }
        if let Some(closer) = closer() {
            match closer.try_send(descriptor) {
                Ok(()) => {}
                Err(TrySendError::Full(descriptor) | TrySendError::Disconnected(descriptor)) => {
                    crate::throttled!(warn, "too many descriptors wait to be closed");
                    drop(descriptor);
                }
            }
        }
    }
}

/// Returns the queue of the thread that closes descriptors. `None` if there is no such thread. In a forked child there is none, but
/// there the parent also holds the descriptors, so that closing them does not block.
fn closer() -> Option<&'static SyncSender<OwnedFd>> {
    static CLOSER: OnceLock<Option<(SyncSender<OwnedFd>, Origin)>> = OnceLock::new();
    let closer = CLOSER.get_or_init(|| {
        let origin = Origin::here().ok()?;
        let (sender, receiver) = sync_channel::<OwnedFd>(WAITING);
        let thread = std::thread::Builder::new().name("rdma-soft-close".into());
        thread.spawn(move || receiver.into_iter().for_each(drop)).ok()?;
        Some((sender, origin))
    });
    let (sender, origin) = closer.as_ref()?;
    (!origin.is_forked()).then_some(sender)
}

#[cfg(test)]
pub(super) mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;

    /// The time that the last close of [`lingering`] takes.
    const LINGER: Duration = Duration::from_secs(100);
    /// Time after which a test fails.
    const PATIENCE: Duration = Duration::from_secs(30);

    /// Returns a TCP socket with unsent bytes, whose last close blocks until the other end, which is returned too, is closed.
    pub(in crate::soft::peers) fn lingering() -> (OwnedFd, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (theirs, _) = listener.accept().unwrap();
        rustix::net::sockopt::set_socket_linger(&ours, Some(LINGER)).unwrap();
        ours.set_nonblocking(true).unwrap();
        while ours.write(&[0; 1 << 16]).is_ok() {}
        (ours.into(), theirs)
    }

    /// Runs `work` in another thread, and checks that it ends long before a lingering socket is closed.
    pub(in crate::soft::peers) fn ends_soon<T: Send + 'static>(
        work: impl FnOnce() -> T + Send + 'static,
    ) -> T {
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
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = rustix::net::SendAncillaryBuffer::new(&mut space);
        let sent = [socket.as_fd()];
        assert!(control.push(rustix::net::SendAncillaryMessage::ScmRights(&sent)));
        let flags = rustix::net::SendFlags::empty();
        rustix::net::sendmsg(&one, &[std::io::IoSlice::new(b"x")], &mut control, flags).unwrap();
        drop((socket, one));
        ends_soon(move || drop(Received::new(two.into())));
        drop((other_end, another_end));
    }
}
