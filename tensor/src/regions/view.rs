//! Views of regions of peers.

use std::ops::Range;

use tonic_rdma_verbs::{OutOfBounds, RemoteView, WordError};

/// A region of a peer that this process has mapped for reading ([`Channel::view`](crate::Channel::view)). A look at the region
/// costs one load: it takes no request, no completion, and no work of the peer. Clones share one mapping.
///
/// The peer may change the bytes at any time, so they are copied. A copy that is made while the peer writes may have old and new
/// bytes. A peer that stores the bytes of a message, and then a word with release semantics ([`SharedRegion::store_u64`]), shows
/// the whole message to a reader that [loads](Self::load_u64) the new word.
///
/// All calls are safe after the peer withdrew the region or died, because the mapping stays. The bytes are then old, or are what
/// the peer uses the memory for now ([`is_current`](Self::is_current)). The memory counts against the peer's `RDMA_PINNED_LIMIT`
/// until the last view of it is dropped.
///
/// [`SharedRegion::store_u64`]: crate::SharedRegion::store_u64
#[derive(Clone, Debug)]
pub struct RegionView {
    view: RemoteView,
}

impl RegionView {
    pub(crate) fn new(view: RemoteView) -> Self {
        Self { view }
    }

    /// Returns the length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.view.len()
    }

    /// Returns whether the region has no bytes.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.view.is_empty()
    }

    /// Returns whether the right to read still stands: the peer has not withdrawn the region, the link is in use, and the peer's
    /// process lives. If this function returns true after a copy, then no copied byte was stored after the peer withdrew the region.
    /// This costs some tens of nanoseconds.
    pub fn is_current(&self) -> bool {
        self.view.is_current()
    }

    /// Loads the 64-bit word at `offset` with Acquire ordering: all bytes that the peer stored before it stored the word with
    /// Release ordering are visible.
    ///
    /// # Errors
    /// The word is not within the region, or its address is not a multiple of 8. Regions begin at a multiple of 4096, if they are not
    /// parts of other regions.
    #[inline]
    pub fn load_u64(&self, offset: usize) -> Result<u64, WordError> {
        self.view.load_u64(offset)
    }

    /// Copies from `offset` into all of `destination`.
    ///
    /// # Errors
    /// There are not enough bytes after `offset`. Nothing was copied.
    #[inline]
    pub fn copy_out(&self, offset: usize, destination: &mut [u8]) -> Result<(), OutOfBounds> {
        self.view.copy_out(offset, destination)
    }

    /// Passes the bytes of `range` to `then` in consecutive pieces, through a small buffer that stays in the processor's
    /// cache. Every piece but the last has a multiple of 64 bytes. The first byte of each piece is aligned to 64 bytes.
    ///
    /// # Errors
    /// The range is not within the region. `then` was not called.
    pub fn for_each_piece(&self, range: Range<usize>, then: impl FnMut(&[u8])) -> Result<(), OutOfBounds> {
        self.view.for_each_piece(range, then)
    }
}
