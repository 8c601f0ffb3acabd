//! Waking threads that sleep on a completion queue, for reasons other than an event of its channel.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::event::{EventfdFlags, epoll};

use crate::VerbsError;

/// A descriptor to sleep on for several reasons. It is readable while one of its reasons is readable.
#[derive(Debug)]
pub(crate) struct Sleeper {
    epoll: OwnedFd,
    pub(crate) waker: Arc<Waker>,
}

/// Makes the sleeper's descriptor readable.
#[derive(Debug)]
pub(crate) struct Waker(OwnedFd);

impl Sleeper {
    /// Creates a sleeper for `reasons` and for its [`Waker`]. The descriptors of `reasons` must stay open as
    /// long as the sleeper lives.
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

    /// Takes back all calls of the waker.
    pub(crate) fn acknowledge(&self) {
        let _ = rustix::io::read(&self.waker.0, &mut [0; 8]);
    }
}

impl Waker {
    pub(crate) fn wake(&self) {
        // Writing fails only after 2^64 calls that were not taken back.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, Timespec};

    use super::*;

    #[test]
    fn a_sleeper_is_readable_while_one_of_its_reasons_is() {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let sleeper = Sleeper::new(&[reader.as_fd()]).unwrap();
        let readable = || {
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            rustix::event::poll(&mut [PollFd::from_borrowed_fd(sleeper.fd(), PollFlags::IN)], Some(&now))
                .unwrap()
                == 1
        };
        assert!(!readable());
        sleeper.waker.wake();
        sleeper.waker.wake();
        assert!(readable());
        sleeper.acknowledge();
        assert!(!readable());
        rustix::io::write(&writer, b"x").unwrap();
        assert!(readable());
    }
}
