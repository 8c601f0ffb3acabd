//! A held piece: a piece of a pool with a holder, for any purpose.

use std::ops::Range;
use std::sync::Arc;

use super::super::settings::Quota;
use super::arena::{Piece, Purpose};
use super::shared::PoolShared;
use super::slab::Slab;
use crate::{HostMemory, LocalSegment, MemoryRegion, OutOfBounds, RemoteSegment};

/// A piece that is given back to its pool on drop.
#[derive(Debug)]
pub(crate) struct HeldPiece {
    piece: Piece,
    quota: Quota,
    purpose: Purpose,
    shared: Arc<PoolShared>,
    /// The device may still write to the piece, so the pool must not lease it again.
    in_use: bool,
}

impl HeldPiece {
    /// Makes a held piece, which will return to the pool of `shared`.
    pub(crate) fn new(piece: Piece, quota: Quota, purpose: Purpose, shared: Arc<PoolShared>) -> Self {
        Self { piece, quota, purpose, shared, in_use: false }
    }

    /// Notes whether the device may still write to the piece. A piece that is dropped in use does not go back to the pool. Its slab
    /// then lives as long as the pool.
    pub(crate) fn set_in_use(&mut self, in_use: bool) {
        self.in_use = in_use;
    }

    /// Returns the address of the first byte.
    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.piece.slab.memory().as_ptr().as_ptr().wrapping_add(self.piece.offset)
    }

    /// Returns the capacity in bytes.
    pub(crate) fn capacity(&self) -> usize {
        self.piece.capacity
    }

    /// Returns the state of the pool that the piece came from.
    pub(crate) fn shared(&self) -> &PoolShared {
        &self.shared
    }

    /// Returns the offset in the slab of `length` bytes at `offset` of this piece.
    pub(crate) fn offset_in_slab(&self, offset: usize, length: usize) -> Result<usize, OutOfBounds> {
        OutOfBounds::check(offset, length, self.piece.capacity)?;
        Ok(self.piece.offset + offset)
    }

    /// Names `range` of this piece for a work request.
    pub(crate) fn segment(&self, range: Range<usize>) -> Result<LocalSegment, OutOfBounds> {
        OutOfBounds::check_range(range, self.piece.capacity).map(|range| self.segment_within(range))
    }

    /// Names `range` of this piece for a work request, without a check. A range beyond the piece names other memory of the
    /// slab, or no memory, which the device refuses.
    pub(crate) fn segment_within(&self, range: Range<usize>) -> LocalSegment {
        self.segment_by(self.piece.slab.region(), range)
    }

    /// Names `range` of this piece by another registration of its slab. If the piece is a buffer, that registration has no
    /// right to write.
    pub(crate) fn segment_by(&self, region: &dyn MemoryRegion, range: Range<usize>) -> LocalSegment {
        debug_assert!(range.end <= self.piece.capacity);
        let range = self.piece.offset + range.start..self.piece.offset + range.end;
        // SAFETY:
        // - No request writes to memory with a reference. There is never a reference to `Purpose::Block` memory, as long as
        //   the slab lives. `Purpose::Buffer` slabs are registered without the right to write, by the slab itself and by
        //   `SlabRegistrations`, so the device refuses the request. Both hold for a segment that outlives this piece, too.
        //   Segments of `Purpose::Landing` pieces never leave `Landing`, which makes no reference before its READs have
        //   completed, and whose piece is not leased again if it is dropped earlier.
        // - No request reads memory while a `&mut [u8]` to it exists. `Purpose::Buffer` pieces give out segments
        //   only when they are frozen, and the caller keeps the `Lease` until the request has completed. A caller that
        //   drops the lease earlier sends the bytes of the next owner; accesses of this process stay sound.
        unsafe { LocalSegment::new(region, range) }
    }

    /// Returns the address and key by which a peer with the access rights reaches the byte at `offset`.
    pub(crate) fn remote(&self, offset: usize) -> RemoteSegment {
        RemoteSegment {
            address: (self.as_ptr() as u64).wrapping_add(offset as u64),
            rkey: self.piece.slab.region().rkey(),
        }
    }

    /// Returns the access rights of the region.
    #[cfg(test)]
    pub(crate) fn access(&self) -> crate::Access {
        self.piece.slab.region().access()
    }

    /// Returns the slab.
    pub(crate) fn slab(&self) -> &Arc<Slab> {
        &self.piece.slab
    }

    /// Returns the memory of the slab.
    pub(crate) fn memory(&self) -> &HostMemory {
        self.piece.slab.memory()
    }
}

impl Drop for HeldPiece {
    fn drop(&mut self) {
        if self.in_use {
            return;
        }
        self.shared.give_back(&self.piece, self.quota, self.purpose);
        // A slab that the pool did not keep is dropped with the fields, outside the lock.
    }
}
