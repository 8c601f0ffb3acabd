//! A block: memory for the device.

use std::io::IoSlice;
use std::ops::Range;

use bytes::BufMut;

use super::super::pool::HeldPiece;
use crate::{LocalSegment, OutOfBounds, RemoteSegment, copy_bytes};

/// A piece of registered memory with one holder, which lets the device read and write it. It goes back to the pool on
/// drop, to be handed out again while warm.
///
/// The device, and peers as far as the access rights go, may write to it at any time, so there is no `&[u8]` of it:
/// content goes in and out by copying. Offsets count from the start of the block and may go up to its capacity.
///
/// Keep the block until every request over it completed: the next holder's content is at the mercy of one that did
/// not (though no `&[u8]` is, ever).
#[derive(Debug)]
pub struct Block {
    held: HeldPiece,
    length: usize,
}

impl Block {
    pub(crate) fn new(held: HeldPiece, length: usize) -> Self {
        Self { held, length }
    }

    /// Returns how many bytes were asked for.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Returns whether no bytes were asked for.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Returns how many bytes there are: what was asked for, rounded up to a size class or to pages.
    pub fn capacity(&self) -> usize {
        self.held.capacity()
    }

    /// Copies `source` to `offset`.
    pub fn copy_in(&mut self, offset: usize, source: &[u8]) -> Result<(), OutOfBounds> {
        let start = self.held.offset_in_slab(offset, source.len())?;
        self.held.memory().copy_in(start, source)
    }

    /// Copies `sources` one after the other to `offset`, all of them or none; returns how many bytes they have.
    pub fn copy_in_slices(&mut self, offset: usize, sources: &[IoSlice<'_>]) -> Result<usize, OutOfBounds> {
        let length = sources.iter().fold(0_usize, |sum, source| sum.saturating_add(source.len()));
        let mut at = self.held.offset_in_slab(offset, length)?;
        for source in sources {
            self.held.memory().copy_in(at, source)?;
            at += source.len();
        }
        Ok(length)
    }

    /// Copies from `offset` into all of `destination`.
    pub fn copy_out(&self, offset: usize, destination: &mut [u8]) -> Result<(), OutOfBounds> {
        let start = self.held.offset_in_slab(offset, destination.len())?;
        self.held.memory().copy_out(start, destination)
    }

    /// Appends `range` to `destination`, as far as it has room; returns how many bytes it took. This one copies into
    /// memory that was not initialised: read buffers of tokio and hyper, `BytesMut`.
    pub fn copy_out_to(
        &self,
        range: Range<usize>,
        destination: &mut impl BufMut,
    ) -> Result<usize, OutOfBounds> {
        let length = range.end.saturating_sub(range.start);
        self.held.offset_in_slab(range.start, length)?;
        let mut copied = 0;
        while copied < length && destination.has_remaining_mut() {
            let chunk = destination.chunk_mut();
            let count = chunk.len().min(length - copied);
            let source = self.held.as_ptr().wrapping_add(range.start + copied);
            // SAFETY:
            // - the source lies within the block, as checked above, in memory that this block keeps mapped and that
            //   is initialised, since the kernel hands it out zeroed,
            // - the destination has at least `count` bytes, and is no pool memory of a block, since that is never
            //   lent out as a slice.
            unsafe { copy_bytes(source, chunk.as_mut_ptr(), count) };
            // SAFETY: the first `count` bytes of the chunk have just been written.
            unsafe { destination.advance_mut(count) };
            copied += count;
        }
        Ok(copied)
    }

    /// Names `range` for a work request.
    pub fn segment(&self, range: Range<usize>) -> Result<LocalSegment, OutOfBounds> {
        self.held.segment(range)
    }

    /// Returns where a peer finds the byte at `offset`, if the pool's access rights let it.
    pub fn remote(&self, offset: usize) -> RemoteSegment {
        self.held.remote(offset)
    }
}
