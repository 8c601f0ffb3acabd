//! A region that peers may get rights to.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use super::owned::MemRegion;
use crate::copy::for_each_piece;
use crate::{OutOfBounds, WordError};

/// A region that peers may read or write if they have a grant. Clones share one memory.
///
/// A peer may write at any time, so content is copied in and out. A copy that is made while a peer writes may contain old
/// and new bytes. Offsets count from the start of the region.
#[derive(Clone)]
pub struct SharedRegion {
    region: Arc<MemRegion>,
}

impl SharedRegion {
    /// Makes a shared region.
    pub(super) fn new(region: MemRegion) -> Self {
        Self { region: Arc::new(region) }
    }

    /// Returns the region to one owner, if this is the last clone and no grant exists.
    ///
    /// # Errors
    /// Returns `self` if there is another clone or a grant.
    pub fn try_into_region(self) -> Result<MemRegion, Self> {
        Arc::try_unwrap(self.region).map_err(|region| Self { region })
    }

    /// Returns the length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.region.len()
    }

    /// Returns whether there are no bytes.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.region.is_empty()
    }

    /// Copies `source` to `offset`.
    ///
    /// # Errors
    /// `source` does not fit there. Nothing was copied.
    #[inline]
    pub fn copy_in(&self, offset: usize, source: &[u8]) -> Result<(), OutOfBounds> {
        let at = self.at(offset, source.len())?;
        self.region.mapped().memory().copy_in(at, source)
    }

    /// Copies from `offset` into all of `destination`.
    ///
    /// # Errors
    /// There are not enough bytes after `offset`. Nothing was copied.
    #[inline]
    pub fn copy_out(&self, offset: usize, destination: &mut [u8]) -> Result<(), OutOfBounds> {
        let at = self.at(offset, destination.len())?;
        self.region.mapped().memory().copy_out(at, destination)
    }

    /// Passes the bytes of `range` to `then` in consecutive pieces, through a small buffer that stays in the processor's
    /// cache. Every piece but the last has a multiple of 64 bytes. The first byte of each piece is aligned to 64 bytes.
    ///
    /// # Errors
    /// The range is not within the region. `then` was not called.
    pub fn for_each_piece(&self, range: Range<usize>, then: impl FnMut(&[u8])) -> Result<(), OutOfBounds> {
        let length = range.end.saturating_sub(range.start);
        self.at(range.start, length)?;
        let start = self.region.as_ptr().wrapping_add(range.start);
        // SAFETY: the range lies in the region, which keeps the mapping alive. Peers and threads may write there at the same time,
        // as `for_each_piece` allows. No `&mut` reference exists, because a shared region lends out no bytes.
        unsafe { for_each_piece(start, length, then) };
        Ok(())
    }

    /// Loads the 64-bit word at `offset` with Acquire ordering: all writes before the store of the word are visible.
    ///
    /// # Errors
    /// The word is not within the region, or not aligned.
    #[inline]
    pub fn load_u64(&self, offset: usize) -> Result<u64, WordError> {
        let at = self.at(offset, 8)?;
        self.region.mapped().memory().load_u64(at)
    }

    /// Stores the 64-bit word at `offset` with Release ordering: all earlier writes are visible before the word.
    ///
    /// # Errors
    /// The word is not within the region, or not aligned.
    #[inline]
    pub fn store_u64(&self, offset: usize, value: u64) -> Result<(), WordError> {
        let at = self.at(offset, 8)?;
        self.region.mapped().memory().store_u64(at, value)
    }

    /// Returns the bytes of `range` in place.
    ///
    /// # Safety
    /// No peer with a grant to write may write there while the slice lives. A peer that follows the rules of static placement
    /// (crate tonic-rdma-tensor) does not write between the arrival of a tensor and its release. A hostile peer can.
    ///
    /// # Errors
    /// The range is not within the region.
    pub unsafe fn as_slice(&self, range: Range<usize>) -> Result<&[u8], OutOfBounds> {
        let length = range.end.saturating_sub(range.start);
        self.at(range.start, length)?;
        let start = self.region.as_ptr().wrapping_add(range.start);
        // SAFETY:
        // - The range lies in the region, which keeps the mapping alive, and the kernel has initialised the memory.
        // - This process writes to the region only by `copy_in` and `store_u64`, whose callers share the region. Peers do not
        //   write, as the caller promises.
        Ok(unsafe { std::slice::from_raw_parts(start, length) })
    }

    /// Returns the region.
    #[inline]
    pub(crate) fn region(&self) -> &MemRegion {
        &self.region
    }

    /// Returns the offset in the mapping of `length` bytes at `offset` of the region.
    #[inline]
    fn at(&self, offset: usize, length: usize) -> Result<usize, OutOfBounds> {
        OutOfBounds::check(offset, length, self.len())?;
        Ok(self.region.range().start + offset)
    }
}

impl fmt::Debug for SharedRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedRegion({:p}, {} bytes)", self.region.as_ptr(), self.len())
    }
}
