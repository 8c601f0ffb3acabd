//! The buffer: in registered memory or on the heap, and the same to its owner.

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

/// A buffer of a [`SiteAllocator`](super::SiteAllocator). The program writes to it as a slice, or appends up to a capacity
/// that is fixed, then calls [`freeze`](Self::freeze) and sends. No alignment is promised.
///
/// Reading and writing are the same wherever it is. What goes into a buffer of a site that sends should be what is sent: in a
/// pool that has a protection domain of its own, that domain's peers may be able to read it.
pub struct SiteBuf {
    memory: BufferMemory,
    capacity: usize,
    record: Option<Arc<SiteRecord>>,
}

enum BufferMemory {
    Heap(Vec<u8>),
    /// With how much of it is filled.
    Registered(RegisteredBuf, usize),
}

impl SiteBuf {
    /// On the heap; `content` has room for `capacity` bytes.
    pub(super) fn heap(content: Vec<u8>, capacity: usize, record: Option<Arc<SiteRecord>>) -> Self {
        debug_assert!(content.len() <= capacity && capacity <= content.capacity());
        Self { memory: BufferMemory::Heap(content), capacity, record }
    }

    /// All of `buffer`, of which the first `length` bytes count as filled.
    pub(super) fn registered(buffer: RegisteredBuf, length: usize, record: Option<Arc<SiteRecord>>) -> Self {
        let capacity = buffer.len();
        Self { memory: BufferMemory::Registered(buffer, length.min(capacity)), capacity, record }
    }

    /// Returns where the buffer is: on the heap, or in registered memory.
    pub fn placement(&self) -> SitePlacement {
        match self.memory {
            BufferMemory::Heap(_) => SitePlacement::Heap,
            BufferMemory::Registered(..) => SitePlacement::Registered,
        }
    }

    /// Returns how many bytes the buffer can hold.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Shortens the content to `length` bytes. Changes nothing if it is no longer than that.
    pub fn truncate(&mut self, length: usize) {
        match &mut self.memory {
            BufferMemory::Heap(content) => content.truncate(length),
            BufferMemory::Registered(_, filled) => *filled = length.min(*filled),
        }
    }

    /// Makes the content immutable and shareable. From now on it counts for the site if a connection sends it, or a slice of
    /// it. The memory is freed, or goes back to the pool, with the last reference.
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

/// Content that nobody writes to any more.
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

/// A frozen buffer that is looked for among what is sent.
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
        // Before the memory goes back: it may become another buffer at once.
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
// - `chunk_mut` is the memory that follows what is filled, up to the capacity, and `remaining_mut` its length, and
// - `advance_mut` counts as filled what the caller has initialised of it, and nothing that is not there.
unsafe impl BufMut for SiteBuf {
    fn remaining_mut(&self) -> usize {
        self.capacity - self.len()
    }

    unsafe fn advance_mut(&mut self, count: usize) {
        let room = self.remaining_mut();
        assert!(count <= room, "advanced by {count} bytes where {room} were left");
        match &mut self.memory {
            // SAFETY:
            // - no more than `capacity`, which the vector has, as `count` is no more than what remains, and
            // - initialised: by the caller's promise about the chunk it was given.
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
    /// Appends what there is room for.
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
