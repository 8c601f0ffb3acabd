//! A landing: memory that READs fill, and that the application then reads.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

use super::super::error::PoolError;
use super::super::pool::held::HeldPiece;
use super::super::pool::{Pool, Purpose};
use super::super::settings::Quota;
use crate::{
    Access, MemoryRegion, Operation, OutOfBounds, PostError, PostErrorKind, QueuePair, RemoteSegment,
    SendRequest,
};

/// Registered memory that READs of one queue pair fill. When all of them have completed, [`into_bytes`](Self::into_bytes) turns the
/// memory into [`Bytes`] without a copy. The memory returns to its pool when the last clone and the last slice of these bytes are
/// dropped.
///
/// `&[u8]` of the result is sound: no segment of this memory leaves this type, so only [`post_read`](Self::post_read) posts requests
/// that write to it, and each of them is counted. Peers have no right to the memory. Where a device opens the sinks of READs to the peer
/// ([`opens_sinks`](crate::ProtectionDomain::opens_sinks)), the landing has a registration of its own, which ends before the bytes
/// can be read.
pub struct Landing {
    /// Dropped first: a peer may write to the memory as long as this registration exists.
    sink: Option<Arc<dyn MemoryRegion>>,
    /// `None` only after the piece was taken out.
    held: Option<HeldPiece>,
    /// Offset of the first byte in the piece.
    start: usize,
    length: usize,
    /// Number of READs that were posted and have not completed.
    outstanding: usize,
}

impl Landing {
    /// The place of the aligned byte is a multiple of this, in bytes.
    pub const ALIGNMENT: usize = 64;

    /// Leases `length` bytes of `pool`, against [`Quota::Receive`]. The byte at `aligned_at` gets an address that is a multiple of
    /// [`ALIGNMENT`](Self::ALIGNMENT).
    ///
    /// ```
    /// use tonic_rdma_verbs::internal::Landing;
    /// use tonic_rdma_verbs::memory::{Budget, Pool, PoolSettings};
    ///
    /// let domain = tonic_rdma_verbs::open("soft0")?.alloc_protection_domain()?;
    /// let pool = Pool::new(domain, PoolSettings::default(), Budget::new(64 << 20));
    /// let mut landing = Landing::lease(&pool, 100, 7)?;
    /// landing.copy_in(0, &[1; 100])?;
    /// let bytes = landing.into_bytes().expect("no READ is outstanding");
    /// assert_eq!(bytes[7..].as_ptr() as usize % Landing::ALIGNMENT, 0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// The quota or the budget is used up, or the device can't register the memory.
    pub fn lease(pool: &Pool, length: usize, aligned_at: usize) -> Result<Self, PoolError> {
        let asked = length.saturating_add(Self::ALIGNMENT - 1);
        let held = pool.obtain(asked, Quota::Receive, Purpose::Landing)?;
        let address = (held.as_ptr() as usize).wrapping_add(aligned_at);
        let start = address.wrapping_neg() % Self::ALIGNMENT;
        let mut landing = Self { sink: None, held: Some(held), start, length, outstanding: 0 };
        landing.register(pool)?;
        Ok(landing)
    }

    /// Registers the bytes for READs, if the device opens sinks to the peer.
    fn register(&mut self, pool: &Pool) -> Result<(), PoolError> {
        let Some(held) = &self.held else { return Ok(()) };
        let domain = pool.domain();
        if domain.opens_sinks() && self.length > 0 {
            let memory = Arc::clone(held.slab().memory());
            let start = held.as_ptr() as usize + self.start - memory.address() as usize;
            let bytes = self.length as u64;
            let region = domain.register_range(memory, start..start + self.length, Access::LOCAL_WRITE);
            self.sink = Some(region.map_err(|cause| PoolError::Verbs { bytes, cause })?);
        }
        Ok(())
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Returns whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Returns the number of READs that were posted and have not completed.
    pub fn outstanding(&self) -> usize {
        self.outstanding
    }

    /// Copies `source` to `offset`.
    ///
    /// # Errors
    /// `source` does not fit there. Nothing was copied.
    pub fn copy_in(&mut self, offset: usize, source: &[u8]) -> Result<(), OutOfBounds> {
        let (held, range) = self.place(offset, source.len())?;
        let at = held.offset_in_slab(range.start, source.len())?;
        held.memory().copy_in(at, source)
    }

    /// Posts a READ of `length` bytes from `remote` to `offset`, with a completion. Tell the landing of the completion by
    /// [`completed`](Self::completed).
    ///
    /// # Errors
    /// The bytes do not fit there, or the device refuses the request. Nothing was posted.
    pub fn post_read(
        &mut self,
        queue_pair: &dyn QueuePair,
        wr_id: u64,
        offset: usize,
        length: usize,
        remote: RemoteSegment,
    ) -> Result<(), PostError> {
        let refused = |_| PostError { index: 0, kind: PostErrorKind::Refused(libc::EINVAL) };
        let (held, range) = self.place(offset, length).map_err(refused)?;
        let region = self.sink.as_deref().unwrap_or(held.slab().region());
        let into = held.segment_by(region, range);
        let operation = Operation::Read { into: &[into], remote };
        queue_pair.post_send(&[SendRequest { wr_id, operation, signaled: true }])?;
        self.outstanding += 1;
        Ok(())
    }

    /// Notes that one of the posted READs has completed, or that its queue pair was destroyed. Call this once for each READ: the
    /// memory is read through references when the last one is noted.
    pub fn completed(&mut self) {
        self.outstanding = self.outstanding.saturating_sub(1);
    }

    /// Turns the memory into shareable bytes, without a copy.
    ///
    /// # Errors
    /// Returns `self` if a READ is outstanding.
    pub fn into_bytes(mut self) -> Result<Bytes, Self> {
        if self.outstanding > 0 {
            return Err(self);
        }
        // Ends a right of the peer, before the bytes are read.
        self.sink = None;
        let (start, length) = (self.start, self.length);
        match self.held.take() {
            Some(held) => Ok(Bytes::from_owner(Landed { held, start, length })),
            None => Err(self),
        }
    }

    /// Returns the piece, and the range in it of `length` bytes at `offset`.
    fn place(&self, offset: usize, length: usize) -> Result<(&HeldPiece, Range<usize>), OutOfBounds> {
        let outside = OutOfBounds { offset, length, available: self.length };
        let end = offset.checked_add(length).filter(|&end| end <= self.length).ok_or(outside)?;
        let held = self.held.as_ref().ok_or(outside)?;
        Ok((held, self.start + offset..self.start + end))
    }
}

impl Drop for Landing {
    fn drop(&mut self) {
        if self.outstanding > 0
            && let Some(held) = self.held.take()
        {
            // The device may still write to these bytes, so they never become another landing.
            held.abandon();
        }
    }
}

impl fmt::Debug for Landing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Landing({} bytes, {} READs outstanding)", self.length, self.outstanding)
    }
}

/// Memory that has been filled. The device does not write to it any more.
struct Landed {
    held: HeldPiece,
    start: usize,
    length: usize,
}

impl AsRef<[u8]> for Landed {
    fn as_ref(&self) -> &[u8] {
        // SAFETY:
        // - Start and length lie within the piece, as `Landing::lease` ensures, in a mapping that `held` keeps alive.
        // - The memory is initialised: the kernel zeroes it.
        // - Nothing writes to the memory: `Landing` posted the only requests that write to this piece, and made this value after
        //   they had completed. Earlier holders of the piece did the same, or abandoned the piece. Peers have no right to the slab.
        unsafe { std::slice::from_raw_parts(self.held.as_ptr().wrapping_add(self.start), self.length) }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::super::super::{Budget, PoolSettings};
    use super::*;

    fn pool(limit: u64) -> Pool {
        let domain = crate::open("soft0").unwrap().alloc_protection_domain().unwrap();
        let settings = PoolSettings { receive_quota: limit, huge_pages: false, ..PoolSettings::default() };
        Pool::new(domain, settings, Budget::new(limit))
    }

    #[test]
    fn the_wanted_byte_is_aligned_and_the_memory_comes_back() {
        let pool = pool(64 << 20);
        for length in [1, 63, 64, 65, 4096, 100_000, (3 << 20) + 1] {
            for aligned_at in [0, 1, 5, 63, 64, 65, 4097] {
                let mut landing = Landing::lease(&pool, length, aligned_at).unwrap();
                landing.copy_in(length - 1, &[9]).unwrap();
                assert!(landing.copy_in(length, &[9]).is_err(), "beyond the end");
                let bytes = landing.into_bytes().unwrap();
                assert_eq!((bytes.len(), bytes[length - 1]), (length, 9));
                assert_eq!((bytes.as_ptr() as usize + aligned_at) % Landing::ALIGNMENT, 0);
                let part = bytes.slice(length - 1..);
                drop(bytes);
                assert!(pool.statistics().leased_receive > 0, "a slice holds the memory");
                drop(part);
                assert_eq!(pool.statistics().leased_receive, 0);
            }
        }
    }

    #[test]
    fn memory_that_the_device_may_still_write_is_not_used_again() {
        let pool = pool(1 << 20);
        let mut landing = Landing::lease(&pool, 100_000, 0).unwrap();
        landing.outstanding = 1;
        let landing = landing.into_bytes().unwrap_err();
        let place = landing.held.as_ref().unwrap().as_ptr();
        drop(landing);
        let other = Landing::lease(&pool, 100_000, 0).unwrap();
        assert_ne!(other.held.as_ref().unwrap().as_ptr(), place);
        drop(other);
        let again = Landing::lease(&pool, 100_000, 0).unwrap();
        assert_ne!(again.held.as_ref().unwrap().as_ptr(), place);
    }
}
