//! Memory shared between devices, seen as 64-bit atomics.
//!
//! Both sides may write to any word at any time, and the other side is not trusted: a word read is a number to be
//! checked, never an index to be followed.

use std::fmt::{self, Debug};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use rustix::fs::SealFlags;
use rustix::mm::{MapFlags, ProtFlags};

use super::super::{HostMemory, VerbsError};

/// A mapping of a memfd that another device made.
pub(super) struct Imported {
    base: NonNull<u8>,
    length: usize,
}

// SAFETY: the mapping is reached through atomics and raw copies alone, which are sound from any thread.
unsafe impl Send for Imported {}
// SAFETY: as above.
unsafe impl Sync for Imported {}

impl Imported {
    /// Maps all of `fd`, which must be at least `least` bytes long and sealed against shrinking: touching a page beyond
    /// the end of a file is a signal, and the peer must not be able to cause one.
    pub(super) fn map(fd: &OwnedFd, least: usize) -> Result<Self, VerbsError> {
        let failed = |error: rustix::io::Errno| VerbsError::os("looking at memory of the peer's", error);
        let seals = rustix::fs::fcntl_get_seals(fd).map_err(failed)?;
        let length = usize::try_from(rustix::fs::fstat(fd).map_err(failed)?.st_size).unwrap_or(0);
        if !seals.contains(SealFlags::SHRINK) || length < least.max(1) {
            return Err(VerbsError::Unreachable(format!(
                "the peer's memory is not what it should be ({length} bytes, seals {seals:?})"
            )));
        }
        // SAFETY: a fresh mapping at an address of the kernel's choosing touches no memory of ours.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                length,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                fd,
                0,
            )
        };
        let base =
            base.map_err(|error| VerbsError::os(format!("mapping {length} bytes of the peer's"), error))?;
        NonNull::new(base.cast())
            .map(|base| Self { base, length })
            .ok_or_else(|| VerbsError::Unreachable("the kernel mapped memory at address 0".into()))
    }

    pub(super) fn base(&self) -> NonNull<u8> {
        self.base
    }

    pub(super) fn len(&self) -> usize {
        self.length
    }
}

impl Drop for Imported {
    fn drop(&mut self) {
        // SAFETY:
        // - `base` and `length` are a mapping of our own, and
        // - whoever reaches into it holds a reference to this value.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.length) };
    }
}

impl Debug for Imported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Imported({} bytes)", self.length)
    }
}

/// Words of shared memory, our own or a peer's.
#[derive(Clone, Debug)]
pub(super) struct Words {
    base: Base,
    count: usize,
    _owner: Owner,
}

#[derive(Clone, Debug)]
enum Owner {
    Ours(#[expect(dead_code, reason = "held so that the mapping stays")] Arc<HostMemory>),
    Peers(#[expect(dead_code, reason = "held so that the mapping stays")] Arc<Imported>),
}

#[derive(Clone, Copy, Debug)]
struct Base(NonNull<AtomicU64>);

// SAFETY: the words are reached as atomics alone, and the owner beside the pointer keeps them mapped.
unsafe impl Send for Base {}
// SAFETY: as above.
unsafe impl Sync for Base {}

impl Words {
    /// Bytes of a word.
    pub(super) const SIZE: usize = 8;

    /// Makes `count` words of zero, and the memory that they lie in, for peers to map.
    pub(super) fn create(count: usize) -> Result<(Self, Arc<HostMemory>), VerbsError> {
        let length = (count * Self::SIZE).next_multiple_of(rustix::param::page_size());
        let memory = HostMemory::shared(length, rustix::param::page_size())
            .map_err(|error| VerbsError::os(format!("making {length} bytes of shared memory"), error))?;
        let memory = Arc::new(memory);
        let base = Base(memory.as_ptr().cast());
        Ok((Self { base, count, _owner: Owner::Ours(Arc::clone(&memory)) }, memory))
    }

    /// Maps the `count` words that a peer made.
    pub(super) fn import(fd: &OwnedFd, count: usize) -> Result<Self, VerbsError> {
        let imported = Arc::new(Imported::map(fd, count * Self::SIZE)?);
        let base = Base(imported.base().cast());
        Ok(Self { base, count, _owner: Owner::Peers(imported) })
    }

    /// Word number `index`. An index out of range is a fault of this device, not of a peer's; it wraps around.
    pub(super) fn at(&self, index: usize) -> &AtomicU64 {
        debug_assert!(index < self.count);
        // SAFETY:
        // - `base` is a mapping of at least `count` words, page-aligned, kept by `_owner`, and
        // - every access to it, on either side, is atomic.
        unsafe { self.base.0.add(index % self.count).as_ref() }
    }
}

/// A memfd that may be passed to a peer.
pub(super) fn fd_of(memory: &HostMemory) -> Result<BorrowedFd<'_>, VerbsError> {
    memory.shared_fd().ok_or(VerbsError::Foreign("memory without a descriptor"))
}

/// A random number that a peer can't guess.
pub(super) fn random() -> u64 {
    let mut bytes = [0_u8; 8];
    // SAFETY: the buffer is valid for writes of its length.
    let count = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    if count == bytes.len() as isize {
        return u64::from_ne_bytes(bytes);
    }
    // The system call can't fail on a kernel that has memfds; were it to, the standard library's own keys serve.
    std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), std::time::Instant::now())
}
