//! The ways to hold an extent of a pool: a [`Block`] for the device, a [`RegisteredBuf`] for the application
//! to fill, and a [`Lease`], which is a reference to a buffer that is frozen. A [`Landing`] is for the
//! device, and then for the application.

use std::fmt;
use std::ops::{Deref, DerefMut, Range};
use std::sync::Arc;

use bytes::{BufMut, Bytes};

use crate::memory::pool::shared::{FrozenBuffer, FrozenIndex, HeldExtent, Slab};
use crate::memory::pool::{Pool, Purpose};
use crate::memory::settings::{Budget, PoolSettings, Quota};
use crate::{
    Access, HostMemory, LocalSegment, MemoryRegion, Operation, PostError, PostErrorKind, ProtectionDomain,
    QueuePair, RemoteSegment, SendRequest, VerbsError, copy_bytes,
};

/// An extent of registered memory with one holder, which the device reads and writes. Dropping the block
/// gives the memory back to the pool. The pool leases the memory again while it is in the processor's caches.
///
/// The device, and each peer with access rights, may write to a block at any time. For this reason there is
/// no `&[u8]` of a block: content is copied in and out. Offsets count from the start of the block and may go
/// up to its capacity.
///
/// Keep the block until every request over it has completed. A request that completes later reads or
/// overwrites the content of the next holder. (No `&[u8]` is affected, because none exists.)
#[derive(Debug)]
pub struct Block {
    held: HeldExtent,
    length: usize,
}

impl Block {
    /// Makes a block of a held extent, for a request of `length` bytes.
    pub(crate) fn new(held: HeldExtent, length: usize) -> Self {
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

    /// Returns the number of bytes in the block: the number asked for, rounded up to a size class or to
    /// pages.
    pub fn capacity(&self) -> usize {
        self.held.capacity()
    }

    /// Copies `source` to `offset`.
    ///
    /// # Errors
    /// `source` does not fit there. Nothing was copied.
    pub fn copy_in(&mut self, offset: usize, source: &[u8]) -> Result<(), VerbsError> {
        let start = self.held.offset_in_slab(offset, source.len())?;
        self.held.copy_in(start, source)
    }

    /// Copies from `offset` into all of `destination`.
    ///
    /// # Errors
    /// There are not enough bytes after `offset`. Nothing was copied.
    pub fn copy_out(&self, offset: usize, destination: &mut [u8]) -> Result<(), VerbsError> {
        let start = self.held.offset_in_slab(offset, destination.len())?;
        self.held.memory().copy_out(start, destination)
    }

    /// Appends `range` to `destination` as far as `destination` has room, and returns the number of bytes
    /// copied. The destination may be uninitialised memory, such as a read buffer of tokio or hyper, or a
    /// `BytesMut`.
    ///
    /// # Errors
    /// The range is not within the block. Nothing was copied.
    pub fn copy_out_to(
        &self,
        range: Range<usize>,
        destination: &mut impl BufMut,
    ) -> Result<usize, VerbsError> {
        let length = range.end.saturating_sub(range.start);
        self.held.offset_in_slab(range.start, length)?;
        let mut copied = 0;
        while copied < length && destination.has_remaining_mut() {
            let chunk = destination.chunk_mut();
            let count = chunk.len().min(length - copied);
            let source = self.held.as_ptr().wrapping_add(range.start + copied);
            // SAFETY:
            // - The source lies within the block, as checked above. The block keeps the memory mapped, and
            //   the memory is initialised, because the kernel zeroes it.
            // - The destination has at least `count` bytes. It is not the memory of a block, because a block
            //   is never lent as a slice.
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
    pub fn segment(&self, range: Range<usize>) -> Result<LocalSegment, VerbsError> {
        self.held.segment(range)
    }

    /// Returns the address and key by which a peer reaches the byte at `offset`, if the pool's access rights
    /// allow it.
    pub fn remote(&self, offset: usize) -> RemoteSegment {
        self.held.remote(offset)
    }
}

/// Registered memory that the application fills and then sends without a copy. [`freeze`](Self::freeze) turns
/// the buffer into [`Bytes`], which the transport recognises by their address
/// ([`Pool::find`](crate::memory::Pool::find)).
///
/// `&[u8]` and `&mut [u8]` of a buffer are sound: a buffer has one owner and gives out no segment before it
/// is frozen. Its slab is registered without a right to write, and holds only such buffers.
pub struct RegisteredBuf {
    held: HeldExtent,
    length: usize,
}

impl RegisteredBuf {
    /// Makes a buffer of the first `length` bytes of a held extent.
    pub(crate) fn new(held: HeldExtent, length: usize) -> Self {
        debug_assert!(length <= held.capacity());
        Self { held, length }
    }

    /// Shortens the buffer to `length` bytes. Does nothing if the buffer is not longer.
    pub fn truncate(&mut self, length: usize) {
        self.length = self.length.min(length);
    }

    /// Makes the buffer immutable and shareable. The memory returns to the pool when the last clone and the
    /// last slice of the result, and the last [`Lease`] of the buffer, are dropped.
    pub fn freeze(self) -> Bytes {
        self.into_lease().into_bytes()
    }

    /// Makes the buffer immutable, and returns a lease of all of it.
    pub fn into_lease(self) -> Lease {
        let Self { held, length } = self;
        Lease::freeze(held, length)
    }
}

impl Deref for RegisteredBuf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY:
        // - `length` is at most the capacity of the extent, which lies in a mapping that `held` keeps alive.
        // - The memory is initialised: the kernel zeroes it.
        // - Nothing writes to the memory while the reference lives: the pool gave the extent only to this
        //   owner, the owner is borrowed, and the region has no right to write.
        unsafe { std::slice::from_raw_parts(self.held.as_ptr(), self.length) }
    }
}

impl DerefMut for RegisteredBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY:
        // - As in `deref`.
        // - The owner is borrowed mutably, so no other reference exists.
        unsafe { std::slice::from_raw_parts_mut(self.held.as_ptr(), self.length) }
    }
}

impl AsRef<[u8]> for RegisteredBuf {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl fmt::Debug for RegisteredBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RegisteredBuf({:p}, {} bytes)", self.held.as_ptr(), self.length)
    }
}

/// A reference to a frozen buffer, or to a part of one. The bytes stay in place and unchanged until the last
/// clone is dropped. Keep the lease until all requests that read the bytes have completed.
///
/// A lease may also refer to memory that the allocator of [`trace`](crate::memory::trace) has placed. It then
/// holds the [`Bytes`] that the program sends, and with them their owner, which may be a tensor of an engine.
/// The last clone drops this owner, on a thread that takes completions.
#[derive(Clone)]
pub struct Lease {
    memory: LeasedMemory,
    offset: usize,
    length: usize,
}

/// The memory of a lease.
#[derive(Clone)]
enum LeasedMemory {
    Frozen(Arc<FrozenBuffer>),
    Traced(Arc<TracedBytes>),
}

/// Bytes that lie in a slab of a pool, where the tracing allocator has placed them.
struct TracedBytes {
    /// Keeps the bytes unchanged, and in their extent.
    bytes: Bytes,
    slab: Arc<Slab>,
    /// Offset of the bytes in the slab.
    start: usize,
}

impl Lease {
    /// Freezes the first `length` bytes of `held`, and returns a lease of them.
    pub(crate) fn freeze(held: HeldExtent, length: usize) -> Self {
        Self { memory: LeasedMemory::Frozen(FrozenBuffer::new(held, length)), offset: 0, length }
    }

    /// Finds the frozen buffer that holds all `length` bytes at `address`, and returns a lease of these
    /// bytes.
    pub(crate) fn find(index: &FrozenIndex, address: usize, length: usize) -> Option<Self> {
        index.find(address, length, |start, frozen| {
            let (frozen, offset) = (frozen.upgrade()?, address - start);
            debug_assert!(offset + length <= frozen.length);
            Some(Self { memory: LeasedMemory::Frozen(frozen), offset, length })
        })
    }

    /// Makes a lease of `bytes`, which lie in `slab`. Returns `None` if they lie elsewhere. The slab belongs
    /// to a pool for sending, and serves buffers.
    pub(crate) fn of_traced(slab: Arc<Slab>, bytes: Bytes) -> Option<Self> {
        let start = bytes.as_ptr().addr().checked_sub(slab.memory().as_ptr().as_ptr().addr())?;
        let length = bytes.len();
        if start.checked_add(length)? > slab.len() {
            return None;
        }
        let memory = LeasedMemory::Traced(Arc::new(TracedBytes { bytes, slab, start }));
        Some(Self { memory, offset: 0, length })
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Returns whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Names all bytes of the lease for a request that reads them. The device refuses this segment as the
    /// destination of a receive or a READ.
    pub fn segment(&self) -> LocalSegment {
        self.name(0..self.length)
    }

    /// Names `range` of the lease for a request that reads it.
    ///
    /// # Errors
    /// The range goes beyond the end.
    pub fn segment_of(&self, range: Range<usize>) -> Result<LocalSegment, VerbsError> {
        VerbsError::check_range(range, self.length).map(|range| self.name(range))
    }

    /// Makes a lease of `range`, in bytes from the start of this lease.
    ///
    /// ```
    /// let mut buffer = tonic_rdma_verbs::memory::Pool::for_sending(1 << 20).allocate(4096)?;
    /// buffer[..3].copy_from_slice(b"abc");
    /// let part = buffer.into_lease().part(1..3)?;
    /// assert_eq!(&*part, b"bc");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// The range goes beyond the end.
    pub fn part(&self, range: Range<usize>) -> Result<Self, VerbsError> {
        let range = VerbsError::check_range(range, self.length)?;
        let (offset, length) = (self.offset + range.start, range.len());
        Ok(Self { memory: self.memory.clone(), offset, length })
    }

    /// Returns the address and key by which a peer reads the first byte, if the pool's access rights allow
    /// it.
    pub fn remote(&self) -> RemoteSegment {
        RemoteSegment { address: self.as_ptr() as u64, rkey: self.slab().region().rkey() }
    }

    /// Makes the buffer writable again, if this is the last reference to the buffer and covers all of it.
    ///
    /// # Errors
    /// Returns the lease if there are other references, or if the lease covers a part: a device may still
    /// read the bytes. Also returns the lease if the memory is no frozen buffer.
    pub fn try_into_buffer(self) -> Result<RegisteredBuf, Self> {
        let Self { memory, offset, length } = self;
        let frozen = match memory {
            LeasedMemory::Frozen(frozen) if offset == 0 && length == frozen.length => frozen,
            memory => return Err(Self { memory, offset, length }),
        };
        match Arc::try_unwrap(frozen) {
            // From here on no lookup finds the buffer, because the index holds a weak reference.
            Ok(frozen) => Ok(RegisteredBuf::new(frozen.thaw(), length)),
            Err(frozen) => Err(Self { memory: LeasedMemory::Frozen(frozen), offset, length }),
        }
    }

    /// Turns the lease into shareable [`Bytes`], without a copy.
    pub fn into_bytes(self) -> Bytes {
        Bytes::from_owner(self)
    }

    /// Returns the slab that the bytes lie in.
    pub(crate) fn slab(&self) -> &Arc<Slab> {
        match &self.memory {
            LeasedMemory::Frozen(frozen) => frozen.held.slab(),
            LeasedMemory::Traced(traced) => &traced.slab,
        }
    }

    /// Names `range`, in bytes from the start of the lease, for a request that reads it, by another
    /// registration of the slab.
    pub(crate) fn segment_in(&self, region: &dyn MemoryRegion, range: Range<usize>) -> LocalSegment {
        debug_assert!(range.end <= self.length);
        let range = self.offset + range.start..self.offset + range.end;
        match &self.memory {
            LeasedMemory::Frozen(frozen) => frozen.held.segment_by(region, range),
            LeasedMemory::Traced(traced) => traced.segment_by(region, range),
        }
    }

    /// Returns the memory of the slab, and the range of the lease in that memory.
    pub(crate) fn position(&self) -> (Arc<HostMemory>, Range<usize>) {
        let memory = Arc::clone(self.slab().memory());
        let start = self.as_ptr() as usize - memory.as_ptr().as_ptr() as usize;
        (memory, start..start + self.length)
    }

    /// Names `range` of the lease. The caller has checked the range.
    fn name(&self, range: Range<usize>) -> LocalSegment {
        self.segment_in(self.slab().region(), range)
    }
}

impl TracedBytes {
    /// Names `range` of the bytes by a registration of their slab.
    fn segment_by(&self, region: &dyn MemoryRegion, range: Range<usize>) -> LocalSegment {
        debug_assert!(range.end <= self.bytes.len());
        // SAFETY:
        // - No request writes to memory with a reference: slabs of pools for sending are registered without
        //   the right to write, by the slab itself and by `SlabRegistrations`, so the device refuses the
        //   request.
        // - No request reads memory while a `&mut [u8]` to it exists: `bytes` shows the memory as `&[u8]`,
        //   and the caller keeps the `Lease` until the request has completed. A caller that drops the lease
        //   earlier sends the bytes of the next owner; accesses of this process stay sound.
        unsafe { LocalSegment::new(region, self.start + range.start..self.start + range.end) }
    }
}

impl Deref for Lease {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let frozen = match &self.memory {
            LeasedMemory::Frozen(frozen) => frozen,
            LeasedMemory::Traced(traced) => return &traced.bytes[self.offset..self.offset + self.length],
        };
        let start = frozen.held.as_ptr().wrapping_add(self.offset);
        // SAFETY:
        // - Offset and length lie within the frozen buffer, as every constructor ensures, in a mapping that
        //   `frozen` keeps alive.
        // - The memory is initialised: the kernel zeroes it.
        // - Nothing writes to the memory: freezing consumed the only owner, and the region has no right to
        //   write.
        unsafe { std::slice::from_raw_parts(start, self.length) }
    }
}

impl AsRef<[u8]> for Lease {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl From<Lease> for Bytes {
    fn from(lease: Lease) -> Self {
        lease.into_bytes()
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Lease({:p}, {} bytes)", self.as_ptr(), self.length)
    }
}

/// An extent of registered memory that READs of this process fill. When all of them have completed, it
/// becomes [`Landed`] memory, which is a `&[u8]`.
///
/// While READs are under way there is no reference to the memory. Only this type makes segments of it, and
/// the slab is registered without a right of peers. Where a device opens the sinks of READs to the peer
/// ([`opens_sinks`](crate::ProtectionDomain::opens_sinks)), READs go to a block of the pool, to which no
/// reference ever exists, and the content is copied once it is there. Without room for a block, the landing has
/// a registration of its own, which ends before the memory can be read. A landing that is dropped while READs
/// are under way, because its connection failed, is not used again: its slab is freed with its pool, after the
/// registration.
pub struct Landing {
    /// Where READs go. The peer may write to the memory as long as a registration of its own exists, so it is
    /// dropped first.
    sink: Sink,
    held: HeldExtent,
    /// Offset of the content in the extent.
    start: usize,
    length: usize,
    /// READs that were posted and have not completed.
    reads: u32,
    is_reserve: bool,
}

/// The memory that READs of a landing go to.
enum Sink {
    /// The landing itself, by its slab.
    Slab,
    /// The landing itself, by a registration of its own, which opens it to the peer.
    Alone(Arc<dyn MemoryRegion>),
    /// A block of as many bytes from the same start on, which is always open to the peer.
    Block(Box<HeldExtent>),
}

/// Memory that READs have filled. Nothing writes to it any more. Dropping it gives the memory back to the
/// pool.
pub struct Landed {
    held: HeldExtent,
    start: usize,
    length: usize,
    is_reserve: bool,
}

/// The memory of one connection for landings: a share of a budget, and a reserve that no other connection can
/// take. A share gets more as long as it holds at most as much as it leaves to other shares, and shares leave
/// an eighth of the budget to all else. Share and reserve have no memory until it is needed.
#[derive(Debug)]
pub struct LandingPool {
    share: Pool,
    reserve: Pool,
}

impl LandingPool {
    /// Makes the memory of a connection in `domain`. `reserve` bytes of the budget are its own from now on.
    ///
    /// # Errors
    /// The budget has not so many bytes left.
    pub fn new(
        domain: Arc<dyn ProtectionDomain>,
        budget: Arc<Budget>,
        reserve: usize,
    ) -> Result<Self, VerbsError> {
        let reserve = reserve.next_multiple_of(rustix::param::page_size());
        let settings = PoolSettings {
            access: Access::LOCAL_WRITE,
            slab_size: reserve,
            send_quota: 0,
            receive_quota: reserve as u64,
            ..PoolSettings::default()
        };
        let reserve = Pool::new(Arc::clone(&domain), settings, budget.part(reserve as u64)?);
        let access = Access::LOCAL_WRITE;
        let settings = PoolSettings { access, receive_quota: u64::MAX, ..PoolSettings::default() };
        Ok(Self { share: Pool::sharing(domain, settings, budget), reserve })
    }

    /// Lets at most `bytes` of content land in the share at a time. Call this before the first lease.
    pub fn limit(&mut self, bytes: u64) {
        // Content that lands in a block needs as many bytes again.
        let bytes = if self.share.domain().opens_sinks() { bytes.saturating_mul(2) } else { bytes };
        let settings = PoolSettings { receive_quota: bytes, ..self.share.settings().clone() };
        let (domain, budget) = (Arc::clone(self.share.domain()), Arc::clone(self.share.budget()));
        self.share = Pool::sharing(domain, settings, budget);
    }

    /// Makes a pool of at most `bytes` at a time that the peer may read, such as copies of content. It is
    /// another share of the same budget.
    pub fn for_peer(&self, bytes: u64) -> Pool {
        let settings = PoolSettings { send_quota: bytes, receive_quota: 0, ..PoolSettings::default() };
        Pool::sharing(Arc::clone(self.share.domain()), settings, Arc::clone(self.share.budget()))
    }

    /// Leases memory for `length` bytes, whose byte `aligned_at` lies at a multiple of
    /// [`Landing::ALIGNMENT`]: of the share, or all of the reserve if the share has none and `may_be_reserve`.
    ///
    /// # Errors
    /// [`VerbsErrorKind::QuotaExhausted`] and [`VerbsErrorKind::NoMemory`] if there is memory later;
    /// [`VerbsErrorKind::TooLarge`] if the share has none and the reserve is shorter; another kind if the
    /// system refuses the reserve.
    ///
    /// [`VerbsErrorKind::QuotaExhausted`]: crate::VerbsErrorKind::QuotaExhausted
    /// [`VerbsErrorKind::NoMemory`]: crate::VerbsErrorKind::NoMemory
    /// [`VerbsErrorKind::TooLarge`]: crate::VerbsErrorKind::TooLarge
    pub fn lease(
        &self,
        length: usize,
        aligned_at: usize,
        may_be_reserve: bool,
    ) -> Result<Landing, VerbsError> {
        let shared = Landing::lease(&self.share, length, aligned_at);
        if shared.is_ok() || !may_be_reserve {
            return shared;
        }
        let whole = self.reserve.settings().receive_quota as usize;
        let landing = Landing::within(&self.reserve, length, aligned_at, whole)?;
        Ok(Landing { is_reserve: true, ..landing })
    }

    /// Frees memory that is kept for later. The bytes of the reserve stay with the connection.
    pub fn trim(&self) {
        self.share.trim();
        self.reserve.trim();
    }
}

/// Returns the bytes of `budget` that landings of all connections may still have beside their reserves.
pub fn free_for_landings(budget: &Budget) -> u64 {
    budget.free_for_shares()
}

impl Landing {
    /// Content can be aligned to this many bytes.
    pub const ALIGNMENT: usize = 64;

    /// Leases memory of `pool` for `length` bytes, whose byte `aligned_at` lies at a multiple of
    /// [`ALIGNMENT`](Self::ALIGNMENT). The memory counts against [`Quota::Receive`], also once it has landed,
    /// until it is dropped.
    ///
    /// # Errors
    /// The quota or the budget is used up, or a slab could not be made.
    pub fn lease(pool: &Pool, length: usize, aligned_at: usize) -> Result<Self, VerbsError> {
        Self::within(pool, length, aligned_at, 0)
    }

    /// Leases memory as [`lease`](Self::lease) does, of at least `least` bytes.
    fn within(pool: &Pool, length: usize, aligned_at: usize, least: usize) -> Result<Self, VerbsError> {
        let start = (Self::ALIGNMENT - aligned_at % Self::ALIGNMENT) % Self::ALIGNMENT;
        let bytes = length.saturating_add(start).max(least);
        let held = pool.obtain(bytes, Quota::Receive, Purpose::Landing)?;
        debug_assert!(start + length <= held.capacity());
        let sink = Sink::of(pool, &held, start..start + length)?;
        Ok(Self { sink, held, start, length, reads: 0, is_reserve: false })
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
    pub fn copy_in(&mut self, offset: usize, source: &[u8]) -> Result<(), VerbsError> {
        VerbsError::check_bounds(offset, source.len(), self.length)?;
        let held = self.target();
        let start = held.offset_in_slab(self.start + offset, source.len())?;
        held.memory().copy_in(start, source)
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
        self.set_in_use(true);
        Ok(())
    }

    /// Reads the peer's memory at `remote` into `range` of the content at once, if the device can and the
    /// range is within the content. Returns whether the bytes have arrived; there is no completion. Otherwise
    /// post a READ.
    pub fn read_at_once(
        &mut self,
        queue_pair: &dyn QueuePair,
        range: Range<usize>,
        remote: RemoteSegment,
    ) -> bool {
        let Some(local) = queue_pair.local() else { return false };
        self.segment(range).is_ok_and(|into| local.read_at_once(&[into], remote))
    }

    /// Notes that one of the posted READs has completed with success.
    pub fn read_completed(&mut self) {
        self.reads = self.reads.saturating_sub(1);
        self.set_in_use(self.reads > 0);
    }

    fn set_in_use(&mut self, in_use: bool) {
        match &mut self.sink {
            Sink::Block(block) => block.set_in_use(in_use),
            Sink::Slab | Sink::Alone(_) => self.held.set_in_use(in_use),
        }
    }

    /// Returns the memory that the content arrives in.
    fn target(&self) -> &HeldExtent {
        if let Sink::Block(block) = &self.sink { block } else { &self.held }
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
        let Self { sink, held, start, length, is_reserve, .. } = self;
        if let Sink::Block(block) = &sink {
            let (from, to) = (block.as_ptr().wrapping_add(start), held.as_ptr().wrapping_add(start));
            // SAFETY:
            // - The block and the extent have at least `start + length` bytes, as `lease` and `Sink::of` ensure.
            //   They keep their mappings alive, and the kernel zeroes memory. They are different extents.
            // - There is no reference to either: none to a block ever, and none to a landing yet. The peer may
            //   write to the block at the same time, as `copy_bytes` allows.
            unsafe { copy_bytes(from, to, length) };
        }
        // Ends a right of the peer before there is a reference.
        drop(sink);
        Ok(Landed { held, start, length, is_reserve })
    }

    /// Names `range` of the content for a READ.
    pub(super) fn segment(&self, range: Range<usize>) -> Result<LocalSegment, VerbsError> {
        let range = VerbsError::check_range(range, self.length)?;
        let range = self.start + range.start..self.start + range.end;
        Ok(match &self.sink {
            Sink::Alone(sink) => self.held.segment_by(&**sink, range),
            Sink::Slab | Sink::Block(_) => self.target().segment_within(range),
        })
    }
}

impl Sink {
    /// Returns the memory for READs into `range` of an extent of `pool`.
    fn of(pool: &Pool, held: &HeldExtent, range: Range<usize>) -> Result<Self, VerbsError> {
        if !pool.domain().opens_sinks() || range.is_empty() {
            return Ok(Self::Slab);
        }
        if let Ok(block) = pool.obtain(range.end, Quota::Receive, Purpose::Block) {
            return Ok(Self::Block(Box::new(block)));
        }
        let bytes = range.len() as u64;
        let memory = Arc::clone(held.slab().memory());
        let start = held.slab_offset();
        let range = start + range.start..start + range.end;
        let registered = pool.domain().register_range(memory, range, Access::LOCAL_WRITE);
        registered.map(Self::Alone).map_err(|cause| cause.not_registered(bytes))
    }
}

impl Landed {
    /// Returns whether the memory is that of a [`LandingPool`]'s reserve.
    pub fn is_reserve(&self) -> bool {
        self.is_reserve
    }

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
        // - The range lies within the extent, as `Landing::lease` ensures, in a mapping that `held` keeps
        //   alive.
        // - The memory is initialised: the kernel zeroes it.
        // - Nothing writes to the memory: all READs into it have completed, only `Landing` makes segments of
        //   it, and a landing with READs under way never becomes this type. The slab gives peers no right.
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
