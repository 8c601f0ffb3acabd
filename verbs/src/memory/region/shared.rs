//! A region that peers may be given rights to.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use super::owned::MemRegion;
use crate::{OutOfBounds, WordError};

/// A region that peers may read or write, as far as they were granted it. Clones are the same memory.
///
/// As a peer may write at any time, content goes in and out by copying; what a copy yields while a peer writes is some mix
/// of old and new bytes. Offsets count from the start of the region.
#[derive(Clone)]
pub struct SharedRegion {
    region: Arc<MemRegion>,
}

impl SharedRegion {
    pub(super) fn new(region: MemRegion) -> Self {
        Self { region: Arc::new(region) }
    }

    /// Takes the region back for its owner alone, if this is the last clone and no peer has a right to it any more.
    ///
    /// # Errors
    /// Gives `self` back.
    pub fn try_into_region(self) -> Result<MemRegion, Self> {
        Arc::try_unwrap(self.region).map_err(|region| Self { region })
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.region.len()
    }

    /// Returns whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.region.is_empty()
    }

    /// Copies `source` to `offset`.
    ///
    /// # Errors
    /// It does not fit there; nothing was copied.
    pub fn copy_in(&self, offset: usize, source: &[u8]) -> Result<(), OutOfBounds> {
        let at = self.at(offset, source.len())?;
        self.region.mapped().memory().copy_in(at, source)
    }

    /// Copies from `offset` into all of `destination`.
    ///
    /// # Errors
    /// There are not as many bytes; nothing was copied.
    pub fn copy_out(&self, offset: usize, destination: &mut [u8]) -> Result<(), OutOfBounds> {
        let at = self.at(offset, destination.len())?;
        self.region.mapped().memory().copy_out(at, destination)
    }

    /// Hands the bytes of `range` to `then` in pieces, the next one following the last, through a small buffer that stays in
    /// the processor's cache. Every piece but the last has a multiple of 64 bytes, and the first byte of each is aligned to
    /// 64 bytes.
    ///
    /// # Errors
    /// The range is not within the region; `then` was not called.
    pub fn for_each_piece(
        &self,
        range: Range<usize>,
        mut then: impl FnMut(&[u8]),
    ) -> Result<(), OutOfBounds> {
        /// Fits the first-level cache beside what `then` works with.
        const PIECE: usize = 8 << 10;
        #[repr(align(64))]
        struct Piece([u8; PIECE]);
        let length = range.end.saturating_sub(range.start);
        self.at(range.start, length)?;
        let mut piece = Piece([0; PIECE]);
        let mut done = 0;
        while done < length {
            let count = PIECE.min(length - done);
            self.copy_out(range.start + done, &mut piece.0[..count])?;
            then(&piece.0[..count]);
            done += count;
        }
        Ok(())
    }

    /// Loads the 64-bit word at `offset`, and sees all that was written before it (Acquire).
    ///
    /// # Errors
    /// It is not within the region, or not aligned.
    pub fn load_u64(&self, offset: usize) -> Result<u64, WordError> {
        let at = self.at(offset, 8)?;
        self.region.mapped().memory().load_u64(at)
    }

    /// Writes the 64-bit word at `offset` after all that was written before it (Release).
    ///
    /// # Errors
    /// It is not within the region, or not aligned.
    pub fn store_u64(&self, offset: usize, value: u64) -> Result<(), WordError> {
        let at = self.at(offset, 8)?;
        self.region.mapped().memory().store_u64(at, value)
    }

    /// Returns the bytes of `range`, where they are.
    ///
    /// # Safety
    /// No peer that was granted the right to write may write there while the slice lives. One that keeps to the rules of
    /// [static placement](crate::tensor) does not between a tensor's arrival and its release; a hostile one can.
    ///
    /// # Errors
    /// The range is not within the region.
    pub unsafe fn as_slice(&self, range: Range<usize>) -> Result<&[u8], OutOfBounds> {
        let length = range.end.saturating_sub(range.start);
        self.at(range.start, length)?;
        let start = self.region.as_ptr().wrapping_add(range.start);
        // SAFETY:
        // - the range lies in the region, in a mapping that it keeps alive, initialised by the kernel;
        // - this process writes to it through `copy_in` and `store_u64` alone, whose callers share the region; and peers do
        //   not, as the caller promises.
        Ok(unsafe { std::slice::from_raw_parts(start, length) })
    }

    pub(crate) fn region(&self) -> &MemRegion {
        &self.region
    }

    /// Offset of `length` bytes at `offset` from the start of the mapping.
    fn at(&self, offset: usize, length: usize) -> Result<usize, OutOfBounds> {
        match offset.checked_add(length) {
            Some(end) if end <= self.len() => Ok(self.region.range().start + offset),
            _ => Err(OutOfBounds { offset, length, available: self.len() }),
        }
    }
}

impl fmt::Debug for SharedRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedRegion({:p}, {} bytes)", self.region.as_ptr(), self.len())
    }
}
