//! The buffer of an allocation site, in registered memory or on the heap.

use std::fmt;
use std::io;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use bytes::buf::UninitSlice;
use bytes::{BufMut, Bytes};

use super::record::SiteRecord;
use super::report::SitePlacement;
use super::unsent::{self, SHORTEST};
use crate::memory::pieces::{Lease, RegisteredBuf};

/// A buffer of a [`SiteAllocator`](super::SiteAllocator). The program writes to it as a slice, or appends up to its fixed
/// capacity, then calls [`freeze`](Self::freeze) and sends. No alignment is promised.
///
/// All functions work alike on the heap and in registered memory. Write only bytes to be sent into the buffers of a sending
/// site: if the pool has its own protection domain, the peers of that domain may be able to read the bytes.
pub struct SiteBuf {
    memory: BufferMemory,
    capacity: usize,
    record: Option<Arc<SiteRecord>>,
}

enum BufferMemory {
    Heap(Vec<u8>),
    /// The buffer, and the number of bytes that are filled.
    Registered(RegisteredBuf, usize),
}

impl SiteBuf {
    /// Makes a buffer on the heap. `content` has room for `capacity` bytes.
    pub(super) fn heap(content: Vec<u8>, capacity: usize, record: Option<Arc<SiteRecord>>) -> Self {
        debug_assert!(content.len() <= capacity && capacity <= content.capacity());
        Self { memory: BufferMemory::Heap(content), capacity, record }
    }

    /// Makes a buffer in registered memory, whose first `length` bytes count as filled.
    pub(super) fn registered(buffer: RegisteredBuf, length: usize, record: Option<Arc<SiteRecord>>) -> Self {
        let capacity = buffer.len();
        Self { memory: BufferMemory::Registered(buffer, length.min(capacity)), capacity, record }
    }

    /// Returns the place of the buffer: the heap or registered memory.
    pub fn placement(&self) -> SitePlacement {
        match self.memory {
            BufferMemory::Heap(_) => SitePlacement::Heap,
            BufferMemory::Registered(..) => SitePlacement::Registered,
        }
    }

    /// Returns the number of bytes that the buffer can hold.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Shortens the content to `length` bytes. Does nothing if the content is not longer.
    pub fn truncate(&mut self, length: usize) {
        match &mut self.memory {
            BufferMemory::Heap(content) => content.truncate(length),
            BufferMemory::Registered(_, filled) => *filled = length.min(*filled),
        }
    }

    /// Makes the content immutable and shareable. From now on the site counts as sending if a connection sends the content
    /// or a slice of it. When the last reference is dropped, the memory is freed or returns to the pool.
    pub fn freeze(self) -> Bytes {
        let frozen = match self.memory {
            BufferMemory::Heap(content) => FrozenMemory::Heap(content),
            BufferMemory::Registered(mut buffer, filled) => {
                buffer.truncate(filled);
                FrozenMemory::Registered(buffer.into_lease())
            }
        };
        match (self.record, frozen) {
            (Some(record), frozen) if frozen.as_ref().len() >= SHORTEST => {
                Bytes::from_owner(TracedBuffer::new(frozen, record))
            }
            (_, FrozenMemory::Heap(content)) => content.into(),
            (_, FrozenMemory::Registered(lease)) => lease.into(),
        }
    }
}

/// Content that is not written to any more.
enum FrozenMemory {
    Heap(Vec<u8>),
    Registered(Lease),
}

impl AsRef<[u8]> for FrozenMemory {
    fn as_ref(&self) -> &[u8] {
        match self {
            Self::Heap(content) => content,
            Self::Registered(lease) => lease,
        }
    }
}

/// A frozen buffer that is in the index of unsent buffers until it is sent or dropped.
struct TracedBuffer {
    frozen: FrozenMemory,
}

impl TracedBuffer {
    fn new(frozen: FrozenMemory, record: Arc<SiteRecord>) -> Self {
        unsent::insert(frozen.as_ref(), record);
        Self { frozen }
    }
}

impl AsRef<[u8]> for TracedBuffer {
    fn as_ref(&self) -> &[u8] {
        self.frozen.as_ref()
    }
}

impl Drop for TracedBuffer {
    fn drop(&mut self) {
        // The buffer leaves the index before the memory is freed, because the memory may become another buffer at once.
        unsent::remove(self.as_ref().as_ptr());
    }
}

impl Deref for SiteBuf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.memory {
            BufferMemory::Heap(content) => content,
            BufferMemory::Registered(buffer, filled) => &buffer[..*filled],
        }
    }
}

impl DerefMut for SiteBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        match &mut self.memory {
            BufferMemory::Heap(content) => content,
            BufferMemory::Registered(buffer, filled) => &mut buffer[..*filled],
        }
    }
}

// SAFETY:
// - `chunk_mut` is the memory after the filled bytes, up to the capacity, and `remaining_mut` is its length.
// - `advance_mut` counts as filled the bytes that the caller has initialised, and never more than remain.
unsafe impl BufMut for SiteBuf {
    fn remaining_mut(&self) -> usize {
        self.capacity - self.len()
    }

    unsafe fn advance_mut(&mut self, count: usize) {
        let room = self.remaining_mut();
        assert!(count <= room, "advanced by {count} bytes where {room} were left");
        match &mut self.memory {
            // SAFETY:
            // - The new length is at most `capacity`, which the vector has, because `count` is at most the rest.
            // - The bytes are initialised, as the caller promises for the chunk.
            BufferMemory::Heap(content) => unsafe { content.set_len(content.len() + count) },
            BufferMemory::Registered(_, filled) => *filled += count,
        }
    }

    fn chunk_mut(&mut self) -> &mut UninitSlice {
        let room = self.remaining_mut();
        match &mut self.memory {
            BufferMemory::Heap(content) => UninitSlice::uninit(&mut content.spare_capacity_mut()[..room]),
            BufferMemory::Registered(buffer, filled) => UninitSlice::new(&mut buffer[*filled..]),
        }
    }
}

impl io::Write for SiteBuf {
    /// Appends as many bytes as there is room for.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = bytes.len().min(self.remaining_mut());
        self.put_slice(&bytes[..count]);
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl AsRef<[u8]> for SiteBuf {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl AsMut<[u8]> for SiteBuf {
    fn as_mut(&mut self) -> &mut [u8] {
        self
    }
}

impl From<SiteBuf> for Bytes {
    fn from(buffer: SiteBuf) -> Self {
        buffer.freeze()
    }
}

impl fmt::Debug for SiteBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "SiteBuf({:p}, {} of {} bytes, {})",
            self.as_ptr(),
            self.len(),
            self.capacity,
            self.placement()
        )
    }
}
