//! The buffer of an allocation site, in registered memory or on the heap, and the look-up of sent slices.

use std::alloc::Layout;
use std::fmt;
use std::io::IoSlice;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use bytes::Bytes;

use super::report::{Site, SitePlacement};
use super::table::{SHORTEST, SiteTable};
use crate::memory::index::AddressIndex;
use crate::memory::pieces::RegisteredBuf;

/// A site, and the table that it belongs to.
type SiteOf = (Arc<SiteTable>, Site);

/// The frozen buffers of all allocators that were not sent yet, because a connection does not know the allocators. A buffer is
/// removed when it is first sent, so that its other slices cost almost nothing, or when it is freed.
static UNSENT: AddressIndex<SiteOf> = AddressIndex::new();

/// Reports that `bytes` were sent. If they lie in a frozen buffer of a [`SiteAllocator`](super::SiteAllocator), the site of
/// the buffer counts as sending. Programs with their own transport call this. Connections of tonic-rdma report by
/// themselves.
///
/// The call costs one relaxed load while no frozen buffer is unsent, three loads for an address below or above all such
/// buffers, and a short lock otherwise.
///
/// ```
/// use tonic_rdma_verbs::memory::Pool;
/// use tonic_rdma_verbs::memory::sites::{SiteAllocator, SiteSettings, sent};
///
/// let sites = SiteAllocator::new(Pool::for_sending(1 << 30), SiteSettings::default());
/// let payload = sites.allocate(1 << 20).freeze();
/// // A transport of your own has written the first half:
/// sent(&payload[..1 << 19]);
/// assert_eq!(sites.report().sites[0].sent, 1);
/// ```
#[inline]
pub fn sent(bytes: &[u8]) {
    if bytes.len() >= SHORTEST
        && has_unsent()
        && let Some((table, site)) = UNSENT.take(bytes.as_ptr() as usize, bytes.len())
    {
        table.sent(&site, Layout::for_value(bytes));
    }
}

/// Returns whether a frozen buffer of any allocator was not sent yet. Takes one relaxed load.
#[inline]
pub fn has_unsent() -> bool {
    UNSENT.len() > 0
}

/// Reports that the first `taken` bytes of `slices` were sent.
pub fn sent_slices(slices: &[IoSlice<'_>], mut taken: usize) {
    for slice in slices {
        let part = slice.len().min(taken);
        sent(&slice[..part]);
        taken -= part;
    }
}

/// A buffer of a [`SiteAllocator`](super::SiteAllocator). The program fills it as a slice, then calls [`freeze`](Self::freeze)
/// and sends. No alignment is promised. To append, write to `&mut buffer[..]`, which is a [`BufMut`](bytes::BufMut) and a
/// [`Write`](std::io::Write), and [`truncate`](Self::truncate) the buffer.
///
/// All functions work alike on the heap and in registered memory. Write only bytes to be sent into the buffers of a sending
/// site: if the pool has its own protection domain, the peers of that domain may be able to read the bytes.
pub struct SiteBuf {
    pub(super) memory: BufferMemory,
    /// `None` if the buffer is not traced.
    pub(super) site: Option<SiteOf>,
}

pub(super) enum BufferMemory {
    Heap(Vec<u8>),
    Registered(RegisteredBuf),
}

impl SiteBuf {
    /// Returns the place of the buffer: the heap or registered memory.
    pub fn placement(&self) -> SitePlacement {
        match self.memory {
            BufferMemory::Heap(_) => SitePlacement::Heap,
            BufferMemory::Registered(_) => SitePlacement::Registered,
        }
    }

    /// Shortens the buffer to `length` bytes. Does nothing if the buffer is not longer.
    pub fn truncate(&mut self, length: usize) {
        match &mut self.memory {
            BufferMemory::Heap(content) => content.truncate(length),
            BufferMemory::Registered(buffer) => buffer.truncate(length),
        }
    }

    /// Makes the content immutable and shareable. From now on the site counts as sending if a connection sends the content
    /// or a slice of it. When the last reference is dropped, the memory is freed or returns to the pool.
    pub fn freeze(self) -> Bytes {
        let content = match self.memory {
            BufferMemory::Heap(content) => Bytes::from(content),
            BufferMemory::Registered(buffer) => buffer.freeze(),
        };
        match self.site {
            Some(site) if content.len() >= SHORTEST => {
                UNSENT.insert(content.as_ptr() as usize, content.len(), site);
                Bytes::from_owner(TracedContent(content))
            }
            _ => content,
        }
    }
}

/// Content that is in the index of unsent buffers until it is sent or dropped.
struct TracedContent(Bytes);

impl AsRef<[u8]> for TracedContent {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for TracedContent {
    fn drop(&mut self) {
        // The buffer leaves the index before the memory is freed, because the memory may become another buffer at once.
        drop(UNSENT.remove(self.0.as_ptr() as usize));
    }
}

impl Deref for SiteBuf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.memory {
            BufferMemory::Heap(content) => content,
            BufferMemory::Registered(buffer) => buffer,
        }
    }
}

impl DerefMut for SiteBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        match &mut self.memory {
            BufferMemory::Heap(content) => content,
            BufferMemory::Registered(buffer) => buffer,
        }
    }
}

impl From<SiteBuf> for Bytes {
    fn from(buffer: SiteBuf) -> Self {
        buffer.freeze()
    }
}

impl fmt::Debug for SiteBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SiteBuf({:p}, {} bytes, {})", self.as_ptr(), self.len(), self.placement())
    }
}
