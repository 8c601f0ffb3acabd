//! A lease: a reference on a frozen buffer.

use std::fmt;
use std::ops::{Deref, Range};
use std::sync::Arc;

use bytes::Bytes;

use super::super::pool::{FrozenBuffer, FrozenIndex, HeldPiece, Slab};
use super::buffer::RegisteredBuf;
use crate::{HostMemory, LocalSegment, MemoryRegion, OutOfBounds, RemoteSegment};

/// A reference on (a part of) a frozen buffer: the bytes stay where they are, and what they are, until the last clone
/// is dropped. Hold it until the requests that read the bytes completed.
#[derive(Clone)]
pub struct Lease {
    frozen: Arc<FrozenBuffer>,
    offset: usize,
    length: usize,
}

impl Lease {
    pub(crate) fn freeze(held: HeldPiece, length: usize) -> Self {
        Self { frozen: FrozenBuffer::new(held, length), offset: 0, length }
    }

    /// The part of a frozen buffer that all of `length` bytes at `address` are, if they are in one.
    pub(crate) fn find(index: &FrozenIndex, address: usize, length: usize) -> Option<Self> {
        index.find(address, length, |start, frozen| {
            let (frozen, offset) = (frozen.upgrade()?, address - start);
            debug_assert!(offset + length <= frozen.length());
            Some(Self { frozen, offset, length })
        })
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Returns whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Names all of it for a request that reads it. As the sink of a receive or a READ it is refused by the device.
    pub fn segment(&self) -> LocalSegment {
        self.name(0..self.length)
    }

    /// Names `range` of it for a request that reads it.
    pub fn segment_of(&self, range: Range<usize>) -> Result<LocalSegment, OutOfBounds> {
        let length = range.end.saturating_sub(range.start);
        match range.start.checked_add(length) {
            Some(end) if end <= self.length => Ok(self.name(range.start..end)),
            _ => Err(OutOfBounds { offset: range.start, length, available: self.length }),
        }
    }

    /// Makes a reference on `range` of it, in bytes.
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
        let length = range.end.saturating_sub(range.start);
        match range.start.checked_add(length) {
            Some(end) if end <= self.length => {
                Ok(Self { frozen: Arc::clone(&self.frozen), offset: self.offset + range.start, length })
            }
            _ => Err(OutOfBounds { offset: range.start, length, available: self.length }),
        }
    }

    /// Returns where a peer finds the first byte, if the pool's access rights let it read.
    pub fn remote(&self) -> RemoteSegment {
        self.frozen.held().remote(self.offset)
    }

    /// Makes the buffer writable again, if this is the last reference to it, and on all of it.
    ///
    /// # Errors
    /// Gives the lease back if not: something else may read the bytes, such as a device that sends them.
    pub fn try_into_buffer(self) -> Result<RegisteredBuf, Self> {
        let Self { frozen, offset, length } = self;
        if offset != 0 || length != frozen.length() {
            return Err(Self { frozen, offset, length });
        }
        match Arc::try_unwrap(frozen) {
            // From here on, no look-up finds it: the index holds it weakly.
            Ok(frozen) => Ok(RegisteredBuf::new(frozen.thaw(), length)),
            Err(frozen) => Err(Self { frozen, offset, length }),
        }
    }

    /// Returns the same bytes, shareable.
    pub fn into_bytes(self) -> Bytes {
        Bytes::from_owner(self)
    }

    /// The slab that it lies in.
    pub(crate) fn slab(&self) -> &Arc<Slab> {
        self.frozen.held().slab()
    }

    /// Names all of it for a request that reads it, by another registration of its slab.
    pub(crate) fn segment_by(&self, region: &dyn MemoryRegion) -> LocalSegment {
        self.frozen.held().segment_by(region, self.offset..self.offset + self.length)
    }

    /// Names `range` of it, in bytes from its start, for a request that reads it, by another registration of its slab.
    pub(crate) fn segment_in(&self, region: &dyn MemoryRegion, range: Range<usize>) -> LocalSegment {
        debug_assert!(range.end <= self.length);
        self.frozen.held().segment_by(region, self.offset + range.start..self.offset + range.end)
    }

    /// The memory of its slab, and where in it the lease lies.
    pub(crate) fn place(&self) -> (Arc<HostMemory>, Range<usize>) {
        let memory = Arc::clone(self.slab().memory());
        let start = self.as_ptr() as usize - memory.as_ptr().as_ptr() as usize;
        (memory, start..start + self.length)
    }

    fn name(&self, range: Range<usize>) -> LocalSegment {
        self.frozen.held().segment_within(self.offset + range.start..self.offset + range.end)
    }
}

impl Deref for Lease {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let start = self.frozen.held().as_ptr().wrapping_add(self.offset);
        // SAFETY:
        // - offset and length lie within the frozen buffer, as every constructor sees to, in a mapping that `frozen`
        //   keeps alive,
        // - the memory is initialised: the kernel hands it out zeroed, and
        // - nobody writes to it: the one owner that could was consumed, and the region has no right to write.
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
