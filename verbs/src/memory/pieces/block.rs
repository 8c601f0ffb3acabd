//! A block: memory for the device.

use std::ops::Range;

use bytes::BufMut;

use super::super::pool::held::HeldPiece;
use crate::{LocalSegment, OutOfBounds, RemoteSegment, copy_bytes};

/// A piece of registered memory with one holder, which the device reads and writes. Dropping the block gives the memory back to
/// the pool. The pool leases the memory again while it is in the processor's caches.
///
/// The device, and each peer with access rights, may write to a block at any time. For this reason there is no `&[u8]` of
/// a block: content is copied in and out. Offsets count from the start of the block and may go up to its capacity.
///
/// Keep the block until every request over it has completed. A request that completes later reads or overwrites the
/// content of the next holder. (No `&[u8]` is affected, because none exists.)
#[derive(Debug)]
pub struct Block {
    held: HeldPiece,
    length: usize,
}

impl Block {
    /// Makes a block of a held piece, for a request of `length` bytes.
    pub(crate) fn new(held: HeldPiece, length: usize) -> Self {
        Self { held, length }
    }

    /// Returns the number of bytes that were asked for.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Returns whether no bytes were asked for.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Returns the number of bytes in the block: the number asked for, rounded up to a size class or to pages.
    pub fn capacity(&self) -> usize {
        self.held.capacity()
    }

    /// Copies `source` to `offset`.
    ///
    /// # Errors
    /// `source` does not fit there. Nothing was copied.
    pub fn copy_in(&mut self, offset: usize, source: &[u8]) -> Result<(), OutOfBounds> {
        let start = self.held.offset_in_slab(offset, source.len())?;
        self.held.memory().copy_in(start, source)
    }

    /// Copies from `offset` into all of `destination`.
    ///
    /// # Errors
    /// There are not enough bytes after `offset`. Nothing was copied.
    pub fn copy_out(&self, offset: usize, destination: &mut [u8]) -> Result<(), OutOfBounds> {
        let start = self.held.offset_in_slab(offset, destination.len())?;
        self.held.memory().copy_out(start, destination)
    }

    /// Appends `range` to `destination` as far as `destination` has room, and returns the number of bytes copied. The
    /// destination may be uninitialised memory, such as a read buffer of tokio or hyper, or a `BytesMut`.
    ///
    /// # Errors
    /// The range is not within the block. Nothing was copied.
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
            // - The source lies within the block, as checked above. The block keeps the memory mapped, and the memory is
            //   initialised, because the kernel zeroes it.
            // - The destination has at least `count` bytes. It is not the memory of a block, because a block is never
            //   lent as a slice.
            unsafe { copy_bytes(source, chunk.as_mut_ptr(), count) };
            // SAFETY: the first `count` bytes of the chunk have just been written.
            unsafe { destination.advance_mut(count) };
            copied += count;
        }
        Ok(copied)
    }

    /// Names `range` for a work request.
    ///
    /// # Errors
    /// The range is not within the block.
    pub fn segment(&self, range: Range<usize>) -> Result<LocalSegment, OutOfBounds> {
        self.held.segment(range)
    }

    /// Returns the address and key by which a peer reaches the byte at `offset`, if the pool's access rights allow it.
    pub fn remote(&self, offset: usize) -> RemoteSegment {
        self.held.remote(offset)
    }
}
