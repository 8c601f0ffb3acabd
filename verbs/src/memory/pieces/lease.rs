//! A lease: a reference to a frozen buffer.

use std::fmt;
use std::ops::{Deref, Range};
use std::sync::Arc;

use bytes::Bytes;

use super::super::pool::frozen::{FrozenBuffer, FrozenIndex};
use super::super::pool::held::HeldPiece;
use super::super::pool::slab::Slab;
use super::buffer::RegisteredBuf;
use crate::{HostMemory, LocalSegment, MemoryRegion, OutOfBounds, RemoteSegment};

/// A reference to a frozen buffer, or to a part of one. The bytes stay in place and unchanged until the last clone is
/// dropped. Keep the lease until all requests that read the bytes have completed.
///
/// A lease may also refer to memory that the allocator of [`trace`](crate::memory::trace) has placed. It then holds the
/// [`Bytes`] that the program sends, and with them their owner, which may be a tensor of an engine. The last clone drops this
/// owner, on a thread that takes completions.
#[derive(Clone)]
pub struct Lease {
    memory: LeasedMemory,
    offset: usize,
    length: usize,
}

/// The memory of a lease.
#[derive(Clone)]
enum LeasedMemory {
    Frozen(Arc<FrozenBuffer>),
    Traced(Arc<TracedBytes>),
}

/// Bytes that lie in a slab of a pool, where the tracing allocator has placed them.
struct TracedBytes {
    /// Keeps the bytes unchanged, and in their piece.
    bytes: Bytes,
    slab: Arc<Slab>,
    /// Offset of the bytes in the slab.
    start: usize,
}

impl Lease {
    /// Freezes the first `length` bytes of `held`, and returns a lease of them.
    pub(crate) fn freeze(held: HeldPiece, length: usize) -> Self {
        Self { memory: LeasedMemory::Frozen(FrozenBuffer::new(held, length)), offset: 0, length }
    }

    /// Finds the frozen buffer that holds all `length` bytes at `address`, and returns a lease of these bytes.
    pub(crate) fn find(index: &FrozenIndex, address: usize, length: usize) -> Option<Self> {
        index.find(address, length, |start, frozen| {
            let (frozen, offset) = (frozen.upgrade()?, address - start);
            debug_assert!(offset + length <= frozen.length());
            Some(Self { memory: LeasedMemory::Frozen(frozen), offset, length })
        })
    }

    /// Makes a lease of `bytes`, which lie in `slab`. Returns `None` if they lie elsewhere. The slab belongs to a pool for
    /// sending, and serves buffers.
    pub(crate) fn of_traced(slab: Arc<Slab>, bytes: Bytes) -> Option<Self> {
        let start = bytes.as_ptr().addr().checked_sub(slab.memory().as_ptr().as_ptr().addr())?;
        let length = bytes.len();
        if start.checked_add(length)? > slab.len() {
            return None;
        }
        let memory = LeasedMemory::Traced(Arc::new(TracedBytes { bytes, slab, start }));
        Some(Self { memory, offset: 0, length })
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Returns whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Names all bytes of the lease for a request that reads them. The device refuses this segment as the destination of a
    /// receive or a READ.
    pub fn segment(&self) -> LocalSegment {
        self.name(0..self.length)
    }

    /// Names `range` of the lease for a request that reads it.
    ///
    /// # Errors
    /// The range goes beyond the end.
    pub fn segment_of(&self, range: Range<usize>) -> Result<LocalSegment, OutOfBounds> {
        OutOfBounds::check_range(range, self.length).map(|range| self.name(range))
    }

    /// Makes a lease of `range`, in bytes from the start of this lease.
    ///
    /// ```
    /// let mut buffer = tonic_rdma_verbs::memory::Pool::for_sending(1 << 20).allocate(4096)?;
    /// buffer[..3].copy_from_slice(b"abc");
    /// let part = buffer.into_lease().part(1..3)?;
    /// assert_eq!(&*part, b"bc");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// The range goes beyond the end.
    pub fn part(&self, range: Range<usize>) -> Result<Self, OutOfBounds> {
        let range = OutOfBounds::check_range(range, self.length)?;
        let (offset, length) = (self.offset + range.start, range.len());
        Ok(Self { memory: self.memory.clone(), offset, length })
    }

    /// Returns the address and key by which a peer reads the first byte, if the pool's access rights allow it.
    pub fn remote(&self) -> RemoteSegment {
        RemoteSegment { address: self.as_ptr() as u64, rkey: self.slab().region().rkey() }
    }

    /// Makes the buffer writable again, if this is the last reference to the buffer and covers all of it.
    ///
    /// # Errors
    /// Returns the lease if there are other references, or if the lease covers a part: a device may still read the bytes. Also
    /// returns the lease if the memory is no frozen buffer.
    pub fn try_into_buffer(self) -> Result<RegisteredBuf, Self> {
        let Self { memory, offset, length } = self;
        let frozen = match memory {
            LeasedMemory::Frozen(frozen) if offset == 0 && length == frozen.length() => frozen,
            memory => return Err(Self { memory, offset, length }),
        };
        match Arc::try_unwrap(frozen) {
            // From here on no look-up finds the buffer, because the index holds a weak reference.
            Ok(frozen) => Ok(RegisteredBuf::new(frozen.thaw(), length)),
            Err(frozen) => Err(Self { memory: LeasedMemory::Frozen(frozen), offset, length }),
        }
    }

    /// Turns the lease into shareable [`Bytes`], without a copy.
    pub fn into_bytes(self) -> Bytes {
        Bytes::from_owner(self)
    }

    /// Returns the slab that the bytes lie in.
    pub(crate) fn slab(&self) -> &Arc<Slab> {
        match &self.memory {
            LeasedMemory::Frozen(frozen) => frozen.held().slab(),
            LeasedMemory::Traced(traced) => &traced.slab,
        }
    }

    /// Names all bytes of the lease for a request that reads them, by another registration of the slab.
    pub(crate) fn segment_by(&self, region: &dyn MemoryRegion) -> LocalSegment {
        self.segment_in(region, 0..self.length)
    }

    /// Names `range`, in bytes from the start of the lease, for a request that reads it, by another registration of the
    /// slab.
    pub(crate) fn segment_in(&self, region: &dyn MemoryRegion, range: Range<usize>) -> LocalSegment {
        debug_assert!(range.end <= self.length);
        let range = self.offset + range.start..self.offset + range.end;
        match &self.memory {
            LeasedMemory::Frozen(frozen) => frozen.held().segment_by(region, range),
            LeasedMemory::Traced(traced) => traced.segment_by(region, range),
        }
    }

    /// Returns the memory of the slab, and the range of the lease in that memory.
    pub(crate) fn place(&self) -> (Arc<HostMemory>, Range<usize>) {
        let memory = Arc::clone(self.slab().memory());
        let start = self.as_ptr() as usize - memory.as_ptr().as_ptr() as usize;
        (memory, start..start + self.length)
    }

    /// Names `range` of the lease. The caller has checked the range.
    fn name(&self, range: Range<usize>) -> LocalSegment {
        self.segment_in(self.slab().region(), range)
    }
}

impl TracedBytes {
    /// Names `range` of the bytes by a registration of their slab.
    fn segment_by(&self, region: &dyn MemoryRegion, range: Range<usize>) -> LocalSegment {
        debug_assert!(range.end <= self.bytes.len());
        // SAFETY:
        // - No request writes to memory with a reference: slabs of pools for sending are registered without the right to
        //   write, by the slab itself and by `SlabRegistrations`, so the device refuses the request.
        // - No request reads memory while a `&mut [u8]` to it exists: `bytes` shows the memory as `&[u8]`, and the caller
        //   keeps the `Lease` until the request has completed. A caller that drops the lease earlier sends the bytes of the
        //   next owner; accesses of this process stay sound.
        unsafe { LocalSegment::new(region, self.start + range.start..self.start + range.end) }
    }
}

impl Deref for Lease {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let frozen = match &self.memory {
            LeasedMemory::Frozen(frozen) => frozen,
            LeasedMemory::Traced(traced) => return &traced.bytes[self.offset..self.offset + self.length],
        };
        let start = frozen.held().as_ptr().wrapping_add(self.offset);
        // SAFETY:
        // - Offset and length lie within the frozen buffer, as every constructor ensures, in a mapping that `frozen` keeps
        //   alive.
        // - The memory is initialised: the kernel zeroes it.
        // - Nothing writes to the memory: freezing consumed the only owner, and the region has no right to write.
        unsafe { std::slice::from_raw_parts(start, self.length) }
    }
}

impl AsRef<[u8]> for Lease {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl From<Lease> for Bytes {
    fn from(lease: Lease) -> Self {
        lease.into_bytes()
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Lease({:p}, {} bytes)", self.as_ptr(), self.length)
    }
}
