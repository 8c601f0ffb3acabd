//! Memory of this process that can be registered: shared (memfd) or any other.

use std::any::Any;
use std::fmt::{self, Debug};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

use super::VerbsError;
use super::copy::copy_bytes;

/// A range of host memory that outlives every region registered over it.
///
/// Others (the device, peers) may write to it at any time, so it is never lent out as `&[u8]`: content goes in and
/// out by copying.
pub struct HostMemory {
    base: NonNull<u8>,
    length: usize,
    kind: Kind,
}

enum Kind {
    /// A memfd, sealed against shrinking, mapped at `base`; peers may map it too.
    Shared(OwnedFd),
    /// Memory that its owner keeps alive.
    Owned(#[expect(dead_code, reason = "held for its Drop")] Box<dyn Any + Send + Sync>),
}

// SAFETY:
// - the memory is reached through raw copies alone, which are sound from any thread, and
// - what `Kind` holds is Send and Sync itself.
unsafe impl Send for HostMemory {}
// SAFETY: as above.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// Maps `length` bytes of fresh, zeroed shared memory, aligned to `alignment` (a power of two, at least a page).
    /// Pages cost nothing until they are touched.
    pub fn shared(length: usize, alignment: usize) -> io::Result<Self> {
        if length == 0 || !alignment.is_power_of_two() || length.checked_add(alignment).is_none() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("shared memory of {length} bytes aligned to {alignment}"),
            ));
        }
        let fd = rustix::fs::memfd_create("tonic-rdma", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&fd, length as u64)?;
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let base = map_aligned(&fd, length, alignment)?;
        Ok(Self { base, length, kind: Kind::Shared(fd) })
    }

    /// Takes over a vector: private memory of this process.
    pub fn from_vec(bytes: Vec<u8>) -> Self {
        let mut bytes = bytes;
        let base = NonNull::new(bytes.as_mut_ptr()).unwrap_or(NonNull::dangling());
        Self { base, length: bytes.len(), kind: Kind::Owned(Box::new(VecOwner { _bytes: bytes })) }
    }

    /// Wraps memory that `owner` keeps alive.
    ///
    /// # Safety
    /// - `base` must be valid for reads and writes of `length` bytes for as long as `owner` lives.
    /// - As long as a request may be outstanding or a peer may reach it, no reference to the memory may exist that
    ///   those accesses would break.
    pub unsafe fn from_raw_parts(
        base: NonNull<u8>,
        length: usize,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Self {
        Self { base, length, kind: Kind::Owned(owner) }
    }

    /// First byte, as a virtual address.
    pub fn address(&self) -> u64 {
        self.base.as_ptr() as u64
    }

    /// First byte.
    pub fn as_ptr(&self) -> NonNull<u8> {
        self.base
    }

    /// Length in bytes.
    #[expect(clippy::len_without_is_empty, reason = "an empty region has no use")]
    pub fn len(&self) -> usize {
        self.length
    }

    /// The memfd behind shared memory.
    pub fn shared_fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.kind {
            Kind::Shared(fd) => Some(fd.as_fd()),
            Kind::Owned(_) => None,
        }
    }

    /// Copies `source` to `offset`.
    pub fn copy_in(&self, offset: usize, source: &[u8]) -> Result<(), OutOfBounds> {
        let to = self.at(offset, source.len())?;
        // SAFETY:
        // - `at` checked that the destination lies in this memory, which is valid for writes, and
        // - `source` can't overlap it: nobody lends this memory out as a slice while it may be written (see
        //   `from_raw_parts`, and `LocalSegment::new`).
        unsafe { copy_bytes(source.as_ptr(), to, source.len()) };
        Ok(())
    }

    /// Copies from `offset` into `destination`.
    pub fn copy_out(&self, offset: usize, destination: &mut [u8]) -> Result<(), OutOfBounds> {
        let from = self.at(offset, destination.len())?;
        // SAFETY:
        // - `at` checked that the source lies in this memory, which is valid for reads, and
        // - `destination` is exclusively the caller's, and so no part of this memory.
        unsafe { copy_bytes(from, destination.as_mut_ptr(), destination.len()) };
        Ok(())
    }

    /// Checks that `range` can be registered: something, and all of it within the memory.
    pub(crate) fn check_range(&self, range: &Range<usize>) -> Result<(), VerbsError> {
        if range.start < range.end && range.end <= self.length {
            return Ok(());
        }
        Err(VerbsError::Unusable(format!(
            "bytes {} to {} of a memory of {} bytes can't be registered",
            range.start, range.end, self.length
        )))
    }

    fn at(&self, offset: usize, length: usize) -> Result<*mut u8, OutOfBounds> {
        match offset.checked_add(length) {
            Some(end) if end <= self.length => Ok(self.base.as_ptr().wrapping_add(offset)),
            _ => Err(OutOfBounds { offset, length, available: self.length }),
        }
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        if let Kind::Shared(_) = self.kind {
            // SAFETY:
            // - `base` and `length` are a mapping of our own, made by `map_aligned`, and
            // - nothing refers to it any more: regions hold a reference to this value.
            let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.length) };
        }
    }
}

impl Debug for HostMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            Kind::Shared(_) => "shared",
            Kind::Owned(_) => "owned",
        };
        write!(f, "HostMemory({kind}, {:#x}, {} bytes)", self.address(), self.length)
    }
}

/// A range that does not lie in the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{length} bytes at offset {offset} do not lie within {available}")]
pub struct OutOfBounds {
    /// Offset asked for.
    pub offset: usize,
    /// Length asked for.
    pub length: usize,
    /// Bytes there are.
    pub available: usize,
}

/// A vector whose bytes are reached through `HostMemory::base` alone.
struct VecOwner {
    _bytes: Vec<u8>,
}

/// Maps all of `fd` at a multiple of `alignment`: reserves more than is needed, maps over the aligned part and gives
/// the rest back.
fn map_aligned(fd: &OwnedFd, length: usize, alignment: usize) -> io::Result<NonNull<u8>> {
    let page = rustix::param::page_size();
    let padding = alignment.max(page);
    let mapped = length.next_multiple_of(page);
    let reserved = mapped + padding;
    // SAFETY: a fresh private mapping at an address of the kernel's choosing touches no memory of ours.
    let start = unsafe {
        rustix::mm::mmap_anonymous(std::ptr::null_mut(), reserved, ProtFlags::empty(), MapFlags::PRIVATE)?
    };
    let offset = start.cast::<u8>().align_offset(padding);
    let aligned = start.cast::<u8>().wrapping_add(offset);
    // SAFETY:
    // - the whole target range lies in the reservation made above, which nobody else knows of, and
    // - the parts cut off lie in it too, outside the target range.
    unsafe {
        let result = rustix::mm::mmap(
            aligned.cast(),
            length,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::SHARED | MapFlags::FIXED,
            fd,
            0,
        );
        if let Err(error) = result {
            let _ = rustix::mm::munmap(start, reserved);
            return Err(error.into());
        }
        if offset > 0 {
            let _ = rustix::mm::munmap(start, offset);
        }
        let tail = reserved - offset - mapped;
        if tail > 0 {
            let _ = rustix::mm::munmap(aligned.wrapping_add(mapped).cast(), tail);
        }
    }
    NonNull::new(aligned).ok_or_else(|| io::Error::other("the kernel mapped memory at address 0"))
}
