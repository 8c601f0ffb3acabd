//! Shared memory segments: created by this process, or by a peer. A peer's segment is mapped only if an access can't crash this
//! process.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

/// A mapping of a memfd. The length is private to this process, so content of the memory can't lead beyond the mapping.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    length: usize,
}

// SAFETY: the memory is reached only through atomics and raw copies, which are sound from any thread.
unsafe impl Send for Mapping {}
// SAFETY: the reasons for `Send` hold for `Sync`.
unsafe impl Sync for Mapping {}

/// The processes that may write to a segment once it is created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Writers {
    /// Every process that maps it.
    All,
    /// Only its maker. Peers can map the segment only for reading.
    Maker,
}

impl Mapping {
    /// Creates a zeroed segment of `length` bytes, sealed against shrinking, and maps it for reading and writing.
    pub(crate) fn create(length: usize, writers: Writers) -> io::Result<(Self, OwnedFd)> {
        let fd =
            rustix::fs::memfd_create("tonic-rdma-soft", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&fd, length as u64)?;
        let mapping = Self::map(&fd, length, ProtFlags::READ | ProtFlags::WRITE)?;
        let mut seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        if writers == Writers::Maker {
            seals |= SealFlags::FUTURE_WRITE;
        }
        rustix::fs::fcntl_add_seals(&fd, seals)?;
        Ok((mapping, fd))
    }

    /// Maps `length` bytes of a peer's segment. Refuses a segment that its maker could shrink, because our next
    /// access would then end in SIGBUS.
    pub(crate) fn import(fd: &impl AsFd, length: u64, writers: Writers) -> io::Result<Self> {
        let seals = rustix::fs::fcntl_get_seals(fd)?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err(io::Error::other("the peer's segment is not sealed against shrinking"));
        }
        let size = u64::try_from(rustix::fs::fstat(fd)?.st_size).unwrap_or(0);
        let length = match usize::try_from(length) {
            Ok(wanted) if wanted > 0 && length <= size => wanted,
            _ => return Err(io::Error::other(format!("the peer's segment has {size} of {length} bytes"))),
        };
        let protection = match writers {
            Writers::All => ProtFlags::READ | ProtFlags::WRITE,
            Writers::Maker => ProtFlags::READ,
        };
        Self::map(fd, length, protection)
    }

    fn map(fd: &impl AsFd, length: usize, protection: ProtFlags) -> io::Result<Self> {
        // SAFETY: a fresh mapping at an address of the kernel's choosing touches no memory of ours.
        let base =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), length, protection, MapFlags::SHARED, fd, 0)? };
        let base = NonNull::new(base.cast::<u8>()).ok_or_else(|| io::Error::other("mapped at address 0"))?;
        Ok(Self { base, length })
    }

    /// Returns the segment as atomic words. Callers must only load from a segment that is mapped only for reading.
    pub(crate) fn words(&self) -> &[AtomicU64] {
        // SAFETY:
        // - `base` is page-aligned and valid for `length` bytes as long as `self` lives, and
        // - atomics may be changed at any time, also by other processes.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().cast::<AtomicU64>(), self.length / 8) }
    }

    /// Returns the number of bytes mapped.
    pub(crate) fn length(&self) -> u64 {
        self.length as u64
    }

    /// Returns the address of `length` bytes at `offset`; `None` if they are not within the segment.
    pub(crate) fn range(&self, offset: u64, length: u64) -> Option<NonNull<u8>> {
        let end = offset.checked_add(length)?;
        if end > self.length as u64 {
            return None;
        }
        // SAFETY: `offset` is within the mapping, as just checked.
        Some(unsafe { self.base.add(offset as usize) })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY:
        // - the mapping is our own, made by `map`, and
        // - nothing borrowed from it outlives `self`.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.length) };
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use std::sync::atomic::Ordering::Relaxed;

    use super::*;

    #[test]
    fn both_mappings_are_one_memory() {
        let (ours, fd) = Mapping::create(8192, Writers::All).unwrap();
        let theirs = Mapping::import(&fd, 8192, Writers::All).unwrap();
        theirs.words()[1023].store(7, Relaxed);
        assert_eq!(ours.words()[1023].load(Relaxed), 7);
        assert!(ours.range(8192, 0).is_some() && ours.range(8191, 1).is_some());
        assert!(
            ours.range(8192, 1).is_none()
                && ours.range(u64::MAX, 2).is_none()
                && ours.range(1, u64::MAX).is_none()
        );
    }

    #[test]
    fn segments_that_could_vanish_are_refused() {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create("test", flags).unwrap();
        rustix::fs::ftruncate(&fd, 4096).unwrap();
        assert!(Mapping::import(&fd, 4096, Writers::All).is_err(), "not sealed");
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK).unwrap();
        assert!(Mapping::import(&fd, 4096, Writers::All).is_ok());
        assert!(Mapping::import(&fd, 4097, Writers::All).is_err(), "longer than it is");
        assert!(Mapping::import(&fd, 0, Writers::All).is_err());
        let (reader, _writer) = rustix::pipe::pipe().unwrap();
        assert!(Mapping::import(&reader, 4096, Writers::All).is_err(), "no memory at all");
    }

    #[test]
    fn a_table_can_only_be_written_by_its_maker() {
        let (_ours, fd) = Mapping::create(4096, Writers::Maker).unwrap();
        assert!(Mapping::import(&fd, 4096, Writers::All).is_err());
        assert!(rustix::io::pwrite(&fd, &[1], 0).is_err());
        assert!(Mapping::import(&fd, 4096, Writers::Maker).is_ok());
    }
}
