//! A piece of a pool in somebody's hands, whatever it is used as.

use std::ops::Range;
use std::sync::Arc;

use super::super::settings::Quota;
use super::arena::{Piece, Purpose};
use super::shared::PoolShared;
use super::slab::Slab;
use crate::{HostMemory, LocalSegment, MemoryRegion, OutOfBounds, RemoteSegment};

/// A piece that goes back to its pool on drop.
#[derive(Debug)]
pub(crate) struct HeldPiece {
    piece: Piece,
    quota: Quota,
    purpose: Purpose,
    shared: Arc<PoolShared>,
}

impl HeldPiece {
    pub(crate) fn new(piece: Piece, quota: Quota, purpose: Purpose, shared: Arc<PoolShared>) -> Self {
        Self { piece, quota, purpose, shared }
    }

    /// First byte.
    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.piece.slab.memory().as_ptr().as_ptr().wrapping_add(self.piece.offset)
    }

    /// Bytes there are.
    pub(crate) fn capacity(&self) -> usize {
        self.piece.capacity
    }

    /// The pool it came from.
    pub(crate) fn shared(&self) -> &PoolShared {
        &self.shared
    }

    /// Offset of `length` bytes at `offset` of this piece, from the start of the slab.
    pub(crate) fn offset_in_slab(&self, offset: usize, length: usize) -> Result<usize, OutOfBounds> {
        match offset.checked_add(length) {
            Some(end) if end <= self.piece.capacity => Ok(self.piece.offset + offset),
            _ => Err(OutOfBounds { offset, length, available: self.piece.capacity }),
        }
    }

    /// Names `range` of this piece for a work request.
    pub(crate) fn segment(&self, range: Range<usize>) -> Result<LocalSegment, OutOfBounds> {
        let length = range.end.saturating_sub(range.start);
        self.offset_in_slab(range.start, length)?;
        Ok(self.segment_within(range.start..range.start + length))
    }

    /// Names `range` of this piece for a work request. One that is not within the piece names memory of the same slab,
    /// or none, which the device refuses.
    pub(crate) fn segment_within(&self, range: Range<usize>) -> LocalSegment {
        self.segment_by(self.piece.slab.region(), range)
    }

    /// The same, by any registration of the slab without the right to write to what is no block.
    pub(crate) fn segment_by(&self, region: &dyn MemoryRegion, range: Range<usize>) -> LocalSegment {
        debug_assert!(range.end <= self.piece.capacity);
        let range = self.piece.offset + range.start..self.piece.offset + range.end;
        // SAFETY:
        // - a request that writes to the range: `Purpose::Block` memory is never referred to, as long as the slab
        //   lives; `Purpose::Buffer` slabs are registered without the right to write, by the slab itself and by
        //   `Registrations`, so that the device refuses the request. Both hold for a segment that outlives this piece, too.
        // - a request that reads the range while a `&mut [u8]` to it exists: `Purpose::Buffer` pieces give segments
        //   out only when frozen, and those who post them keep the `Lease` until the request completed. One that
        //   does not sends whatever the next owner writes; our own accesses stay as they are.
        unsafe { LocalSegment::new(region, range) }
    }

    /// Where a peer finds the byte at `offset`, provided that the access rights let it.
    pub(crate) fn remote(&self, offset: usize) -> RemoteSegment {
        RemoteSegment {
            address: (self.as_ptr() as u64).wrapping_add(offset as u64),
            rkey: self.piece.slab.region().rkey(),
        }
    }

    /// Rights of the region.
    #[cfg(test)]
    pub(crate) fn access(&self) -> crate::Access {
        self.piece.slab.region().access()
    }

    /// The slab.
    pub(crate) fn slab(&self) -> &Arc<Slab> {
        &self.piece.slab
    }

    /// The memory of the slab.
    pub(crate) fn memory(&self) -> &HostMemory {
        self.piece.slab.memory()
    }
}

impl Drop for HeldPiece {
    fn drop(&mut self) {
        self.shared.give_back(&self.piece, self.quota, self.purpose);
        // What is left, a slab that the pool did not keep, goes with the fields: outside the lock.
    }
}
