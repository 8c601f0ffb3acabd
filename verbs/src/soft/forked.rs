//! Marks of a forked process.
//!
//! A child that was forked without exec has a copy of every object of its parent: the same descriptors, and the same mappings of
//! shared memory. If the child used an object, or ran its destructor, it would end the connections of its parent. Each device
//! therefore remembers the process that made it, and a child's calls fail, and its destructors do nothing.
//!
//! The child may open a device of its own.

use std::io;
use std::sync::OnceLock;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

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
        // SAFETY: `count` only adds to an atomic, which a child may do between fork and exec.
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

/// Runs in each child.
extern "C" fn count() {
    FORKS.fetch_add(1, Relaxed);
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
