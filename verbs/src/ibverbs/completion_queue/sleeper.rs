//! Waking up whoever sleeps on a completion queue for something that is no event of its channel.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::event::{EventfdFlags, epoll};

use crate::VerbsError;

/// A descriptor to sleep on for several reasons: readable as long as one of those it was made of is.
#[derive(Debug)]
pub(crate) struct Sleeper {
    epoll: OwnedFd,
    waker: Arc<Waker>,
}

/// Makes its sleeper's descriptor readable.
#[derive(Debug)]
pub(crate) struct Waker(OwnedFd);

impl Sleeper {
    /// Sleeps for each of `reasons`, which must stay open as long as this lives, and for its [`Waker`].
    pub(crate) fn new(reasons: &[BorrowedFd<'_>]) -> Result<Self, VerbsError> {
        Self::create(reasons)
            .map_err(|error| VerbsError::os("creating a descriptor to sleep on", std::io::Error::from(error)))
    }

    fn create(reasons: &[BorrowedFd<'_>]) -> rustix::io::Result<Self> {
        let waker = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for reason in reasons.iter().copied().chain([waker.as_fd()]) {
            epoll::add(&epoll, reason, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        }
        Ok(Self { epoll, waker: Arc::new(Waker(waker)) })
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    pub(crate) fn waker(&self) -> &Arc<Waker> {
        &self.waker
    }

    /// Takes back all calls of the waker.
    pub(crate) fn acknowledge(&self) {
        let _ = rustix::io::read(&self.waker.0, &mut [0; 8]);
    }
}

impl Waker {
    pub(crate) fn wake(&self) {
        // It can only fail if nobody has taken back 2^64 calls.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, Timespec};

    use super::*;

    #[test]
    fn it_is_readable_for_any_reason_until_that_is_gone() {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let sleeper = Sleeper::new(&[reader.as_fd()]).unwrap();
        let readable = || {
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            rustix::event::poll(&mut [PollFd::from_borrowed_fd(sleeper.fd(), PollFlags::IN)], Some(&now))
                .unwrap()
                == 1
        };
        assert!(!readable());
        sleeper.waker().wake();
        sleeper.waker().wake();
        assert!(readable());
        sleeper.acknowledge();
        assert!(!readable());
        rustix::io::write(&writer, b"x").unwrap();
        assert!(readable());
    }
}
