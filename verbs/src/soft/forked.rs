//! Marks of a forked process.
//!
//! A child that was forked without exec has a copy of every object of its parent: the same descriptors, and
//! the same mappings of shared memory. If the child used an object, or ran its destructor, it would end the
//! connections of its parent. Each device therefore remembers the process that made it, and a child's calls
//! fail, and its destructors do nothing.
//!
//! The child may open a device of its own. It keeps no end of a socket of its parent, so that peers notice
//! the end of the parent also while the child lives.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use crate::{PostError, PostErrorKind, QueuePairState};

/// Number of forks between the first process of the family that had a device and this process.
static FORKS: AtomicU32 = AtomicU32::new(0);
/// The result of the registration of [`count`].
static REGISTERED: OnceLock<i32> = OnceLock::new();

/// The process that made an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Origin {
    forks: u32,
}

impl Origin {
    /// Returns this process. From now on, forks are noticed.
    pub(crate) fn here() -> io::Result<Self> {
        // SAFETY: `count` uses only atomics and system calls, which a child may do between fork and exec.
        let result = *REGISTERED.get_or_init(|| unsafe { libc::pthread_atfork(None, None, Some(count)) });
        match result {
            0 => Ok(Self { forks: FORKS.load(Relaxed) }),
            error => Err(io::Error::from_raw_os_error(error)),
        }
    }

    /// Returns whether this process is a forked child of the process that made the object. Costs one load.
    #[inline]
    pub(crate) fn is_forked(self) -> bool {
        // The fork itself orders the store: it happened before the child had any thread.
        FORKS.load(Relaxed) != self.forks
    }
}

/// Refuses `requests` requests that a forked child posts.
#[cold]
pub(super) fn refuse(requests: usize) -> Result<(), PostError> {
    let kind = PostErrorKind::State(QueuePairState::Error);
    if requests == 0 { Ok(()) } else { Err(PostError { index: 0, kind }) }
}

/// Notes a descriptor whose other side must notice when this process ends. A forked child gets another file
/// instead, because a copy in the child would keep the other side open.
pub(crate) fn keep_from_children(descriptor: &OwnedFd) {
    if let Some((word, bit)) = bit_of(descriptor.as_raw_fd()) {
        word.fetch_or(bit, Relaxed);
    }
}

/// Undoes [`keep_from_children`], before the descriptor is closed.
pub(crate) fn leave_to_children(descriptor: &OwnedFd) {
    if let Some((word, bit)) = bit_of(descriptor.as_raw_fd()) {
        word.fetch_and(!bit, Relaxed);
    }
}

/// The descriptors below 65536 that children do not keep, one bit for each.
static KEPT: [AtomicU64; 1024] = [const { AtomicU64::new(0) }; 1024];

fn bit_of(descriptor: RawFd) -> Option<(&'static AtomicU64, u64)> {
    let number = usize::try_from(descriptor).ok()?;
    Some((KEPT.get(number / 64)?, 1 << (number % 64)))
}

/// Runs in each child. Only atomics and system calls are allowed here, because another thread may have held
/// any lock.
extern "C" fn count() {
    FORKS.fetch_add(1, Relaxed);
    // SAFETY: makes a descriptor, and nothing else.
    let other = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
    if other < 0 {
        return;
    }
    for (word, first) in KEPT.iter().zip((0..).step_by(64)) {
        let mut bits = word.load(Relaxed);
        while bits != 0 {
            let number = first + bits.trailing_zeros() as RawFd;
            bits &= bits - 1;
            // SAFETY: the number belongs to an object of this module's users. The object keeps the number,
            // which now means the eventfd, and no call of the object reaches it in a child.
            unsafe { libc::dup3(other, number, libc::O_CLOEXEC) };
        }
    }
    // SAFETY: the descriptor was made above, and nothing else knows it.
    unsafe { libc::close(other) };
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    #[test]
    fn a_child_is_forked_and_its_parent_is_not() {
        let origin = Origin::here().unwrap();
        assert!(!origin.is_forked());
        // SAFETY: the child only loads and adds atomics, and ends without destructors.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let own = Origin::here();
            let right = origin.is_forked() && own.is_ok_and(|own| !own.is_forked());
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(i32::from(!right)) };
        }
        let mut status = 0;
        // SAFETY: the status is writable.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
        assert!(!origin.is_forked());
    }
}
