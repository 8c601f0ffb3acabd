//! Registered memory that READs fill, and that the application then reads in place.

use std::fmt;
use std::ops::{Deref, Range};
use std::sync::Arc;

use bytes::Bytes;

use super::super::error::PoolError;
use super::super::pool::held::HeldPiece;
use super::super::pool::{Pool, Purpose};
use super::super::settings::Quota;
use crate::{
    Access, LocalSegment, MemoryRegion, Operation, OutOfBounds, PostError, PostErrorKind, QueuePair,
    RemoteSegment, SendRequest,
};

/// A piece of registered memory that READs of this process fill. When all of them have completed, it becomes [`Landed`] memory, which
/// is a `&[u8]`.
///
/// While READs are under way there is no reference to the memory. Only this type makes segments of it, and the slab is registered
/// without a right of peers. Where a device opens the sinks of READs to the peer
/// ([`opens_sinks`](crate::ProtectionDomain::opens_sinks)), the slab is registered for reading, and each landing has a registration of its
/// own, which ends before the memory can be read. A landing that is dropped while READs are under way, because its connection failed, is not used
/// again: its slab is freed with its pool, after the registration.
pub struct Landing {
    /// The landing's own registration. The peer may write to the memory as long as this exists, so it is dropped first.
    sink: Option<Arc<dyn MemoryRegion>>,
    held: HeldPiece,
    /// Offset of the content in the piece.
    start: usize,
    length: usize,
    /// READs that were posted and have not completed.
    reads: u32,
}

/// Memory that READs have filled. Nothing writes to it any more. Dropping it gives the memory back to the pool.
pub struct Landed {
    held: HeldPiece,
    start: usize,
    length: usize,
}

impl Landing {
    /// Content can be aligned to this many bytes.
    pub const ALIGNMENT: usize = 64;

    /// Leases memory of `pool` for `length` bytes, whose byte `aligned_at` lies at a multiple of [`ALIGNMENT`](Self::ALIGNMENT). The
    /// memory counts against [`Quota::Receive`], also once it has landed, until it is dropped.
    ///
    /// # Errors
    /// The quota or the budget is used up, or a slab could not be made ([`PoolError`]).
    pub fn lease(pool: &Pool, length: usize, aligned_at: usize) -> Result<Self, PoolError> {
        let start = (Self::ALIGNMENT - aligned_at % Self::ALIGNMENT) % Self::ALIGNMENT;
        let held = pool.obtain(length.saturating_add(start), Quota::Receive, Purpose::Landing)?;
        debug_assert!(start + length <= held.capacity());
        let sink = own_registration(pool, &held, start..start + length)?;
        Ok(Self { sink, held, start, length, reads: 0 })
    }

    /// Returns the length of the content in bytes.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Returns whether the content has no bytes.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Copies `source` to `offset` of the content.
    ///
    /// # Errors
    /// `source` does not fit there. Nothing was copied.
    pub fn copy_in(&mut self, offset: usize, source: &[u8]) -> Result<(), OutOfBounds> {
        OutOfBounds::check(offset, source.len(), self.length)?;
        let start = self.held.offset_in_slab(self.start + offset, source.len())?;
        self.held.memory().copy_in(start, source)
    }

    /// Posts a READ of the peer's memory at `remote` into `range` of the content. Report its completion by
    /// [`read_completed`](Self::read_completed).
    ///
    /// # Errors
    /// The range is not within the content ([`PostErrorKind::Refused`]), or the device refuses the request.
    pub fn post_read(
        &mut self,
        queue_pair: &dyn QueuePair,
        wr_id: u64,
        range: Range<usize>,
        remote: RemoteSegment,
    ) -> Result<(), PostError> {
        let refused = |_| PostError { index: 0, kind: PostErrorKind::Refused(libc::EINVAL) };
        let into = [self.segment(range).map_err(refused)?];
        let operation = Operation::Read { into: &into, remote };
        queue_pair.post_send(&[SendRequest { wr_id, operation, signaled: true }])?;
        self.reads += 1;
        self.held.set_in_use(true);
        Ok(())
    }

    /// Reads the peer's memory at `remote` into `range` of the content at once, if the device can and the range is within the content.
    /// Returns whether the bytes have arrived; there is no completion. Otherwise post a READ.
    pub fn read_at_once(
        &mut self,
        queue_pair: &dyn QueuePair,
        range: Range<usize>,
        remote: RemoteSegment,
    ) -> bool {
        self.segment(range).is_ok_and(|into| queue_pair.read_at_once(&[into], remote))
    }

    /// Notes that one of the posted READs has completed with success.
    pub fn read_completed(&mut self) {
        self.reads = self.reads.saturating_sub(1);
        self.held.set_in_use(self.reads > 0);
    }

    /// Returns the number of READs that were posted and have not completed.
    pub fn reads(&self) -> u32 {
        self.reads
    }

    /// Turns the memory into a slice, if no READ is under way.
    ///
    /// # Errors
    /// Returns the landing if READs are under way.
    pub fn finish(self) -> Result<Landed, Self> {
        if self.reads > 0 {
            return Err(self);
        }
        let Self { sink, held, start, length, .. } = self;
        // Ends a right of the peer before there is a reference.
        drop(sink);
        Ok(Landed { held, start, length })
    }

    /// Names `range` of the content for a READ.
    fn segment(&self, range: Range<usize>) -> Result<LocalSegment, OutOfBounds> {
        let range = OutOfBounds::check_range(range, self.length)?;
        let range = self.start + range.start..self.start + range.end;
        Ok(match &self.sink {
            Some(sink) => self.held.segment_by(&**sink, range),
            None => self.held.segment_within(range),
        })
    }
}

/// Registers `range` of a piece for READs, if the device opens sinks to the peer.
fn own_registration(
    pool: &Pool,
    held: &HeldPiece,
    range: Range<usize>,
) -> Result<Option<Arc<dyn MemoryRegion>>, PoolError> {
    if !pool.domain().opens_sinks() || range.is_empty() {
        return Ok(None);
    }
    let bytes = range.len() as u64;
    let memory = Arc::clone(held.slab().memory());
    let start = (held.as_ptr() as u64 - memory.address()) as usize;
    let range = start + range.start..start + range.end;
    let registered = pool.domain().register_range(memory, range, Access::LOCAL_WRITE);
    registered.map(Some).map_err(|cause| PoolError::Verbs { bytes, cause })
}

impl Landed {
    /// Turns the memory into [`Bytes`], without a copy.
    pub fn into_bytes(self) -> Bytes {
        Bytes::from_owner(self)
    }
}

impl Deref for Landed {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let start = self.held.as_ptr().wrapping_add(self.start);
        // SAFETY:
        // - The range lies within the piece, as `Landing::lease` ensures, in a mapping that `held` keeps alive.
        // - The memory is initialised: the kernel zeroes it.
        // - Nothing writes to the memory: all READs into it have completed, only `Landing` makes segments of it, and a landing with
        //   READs under way never becomes this type. The slab gives peers no right.
        unsafe { std::slice::from_raw_parts(start, self.length) }
    }
}

impl AsRef<[u8]> for Landed {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl fmt::Debug for Landed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Landed({:p}, {} bytes)", self.held.as_ptr(), self.length)
    }
}

impl fmt::Debug for Landing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Landing({:p}, {} bytes, {} READs)", self.held.as_ptr(), self.length, self.reads)
    }
}
