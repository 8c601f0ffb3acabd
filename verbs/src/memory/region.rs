//! Regions: memory for tensors, with a mapping of its own or from a slab of a [`RegionPool`]. At any time a
//! region has one owner, or a transfer holds it for the device, or peers have grants to it.
//!
//! ```text
//!                 move into a transfer                     share
//!   InFlight ◀────────────────────────── MemRegion ────────────────▶ SharedRegion ── grant ──▶ Grant
//!            ──────────────────────────▶  &mut [u8]  ◀────────────────              (the right of a peer)
//!                 with its completion                  try_into_region,
//!                                                      after the last grant
//! ```
//!
//! A [`LentRegion`] is different: peers only read it, so its owner keeps the slice while grants exist.
//!
//! The device writes to a region only while a transfer owns the region. A peer writes only while a grant
//! exists. A slice of the region exists only while there is neither a transfer nor a grant to write. For this
//! reason `&[u8]` is sound, although peers write to regions.

use std::fmt;
use std::ops::{Deref, DerefMut, Range};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

use crate::copy::for_each_chunk;
use crate::memory::extents::Lease;
use crate::memory::pool::shared::{HeldExtent, Slab};
use crate::memory::pool::{Pool, Purpose, own_slab};
use crate::memory::registrations::{LocalRegistrations, SlabRegistrations};
use crate::memory::settings::{Budget, PoolStatistics, Quota};
use crate::panics::lock;
use crate::{
    Access, HostMemory, MemoryRegion, MemoryWindow, ProtectionDomain, QueuePair, RemoteSegment, Rkey,
    VerbsError,
};

/// Memory for tensors: a mapping, or a part of one. Its owner reads and writes it as a slice.
///
/// The region moves into each operation of the device, and comes back when the device is done. For this
/// reason programs need no `unsafe`. A page uses no memory until its first access.
pub struct MemRegion {
    slab: Arc<Slab>,
    /// The bytes of the region in the slab.
    range: Range<usize>,
    /// The extent that all parts of the region lie in. The last of them gives it back to its pool. `None` if
    /// the slab belongs to no pool.
    extent: Option<Arc<HeldExtent>>,
}

impl MemRegion {
    /// Maps `length` bytes, at least one page, within `budget`. They hold zeros.
    ///
    /// ```
    /// use tonic_rdma_verbs::memory::{Budget, MemRegion};
    ///
    /// let mut region = MemRegion::allocate(4096, &Budget::new(1 << 20))?;
    /// region[..3].copy_from_slice(b"abc");
    /// # Ok::<(), tonic_rdma_verbs::VerbsError>(())
    /// ```
    ///
    /// # Errors
    /// The length exceeds the address space, the budget is used up, or the system can't map the memory.
    pub fn allocate(length: usize, budget: &Arc<Budget>) -> Result<Self, VerbsError> {
        let page = rustix::param::page_size();
        let limit = isize::MAX as u64 / 2;
        if length as u64 > limit {
            return Err(Quota::Send.too_large(length, limit));
        }
        let bytes = length.max(1).next_multiple_of(page);
        let slab = own_slab(budget.reserve(bytes as u64)?)?;
        Ok(Self { slab: Arc::new(slab), range: 0..length, extent: None })
    }

    /// Makes a region of the first `length` bytes of an extent. Owners of other clones of the extent
    /// do not use its bytes as long as the region is there.
    pub(super) fn of_extent(extent: Arc<HeldExtent>, length: usize) -> Result<Self, VerbsError> {
        let start = extent.offset_in_slab(0, length)?;
        let slab = Arc::clone(extent.slab());
        Ok(Self { slab, range: start..start + length, extent: Some(extent) })
    }

    /// Splits the region at byte `at`, and returns the part from there on. `self` keeps the first part. Both
    /// parts are independent.
    ///
    /// # Panics
    /// If `at` is beyond the end.
    #[must_use]
    pub fn split_off(&mut self, at: usize) -> Self {
        assert!(at <= self.len(), "split at {at}, but there are {} bytes", self.len());
        let middle = self.range.start + at;
        let (slab, extent) = (Arc::clone(&self.slab), self.extent.clone());
        let back = Self { slab, range: middle..self.range.end, extent };
        self.range.end = middle;
        back
    }

    /// Turns the region into memory that peers may get rights to. This process then reads and writes it by
    /// copying.
    pub fn share(self) -> SharedRegion {
        SharedRegion { region: Arc::new(self), stays_open: false }
    }

    /// Returns the length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// Returns whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }

    /// Returns the address of the first byte.
    #[inline]
    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.slab.memory().as_ptr().as_ptr().wrapping_add(self.range.start)
    }

    /// Returns the slab that the region lies in.
    pub(crate) fn slab(&self) -> &Arc<Slab> {
        &self.slab
    }

    /// Returns the memory of the slab.
    #[inline]
    pub(crate) fn memory(&self) -> &Arc<HostMemory> {
        self.slab.memory()
    }

    /// Returns the range of the region in its slab.
    #[inline]
    pub(crate) fn range(&self) -> Range<usize> {
        self.range.clone()
    }

    /// Returns the memory that the region lies in, and where.
    fn position(&self) -> (Arc<HostMemory>, Range<usize>) {
        (Arc::clone(self.memory()), self.range())
    }
}

impl Deref for MemRegion {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY:
        // - The range lies in the slab, which is a mapping that lives as long as this value, and the memory is
        //   initialised: the kernel zeroes it.
        // - No device writes to the memory: only `InFlight` posts requests over a region, and it owns the
        //   region until the requests have completed.
        // - No peer writes to the memory: grants are made from a `SharedRegion`, which owns the region until
        //   the last grant is dropped.
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.len()) }
    }
}

impl DerefMut for MemRegion {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY:
        // - As in `deref`.
        // - The owner is borrowed mutably. Other regions of the slab are disjoint: those of other extents,
        //   because the pool leases each byte once at a time, and has this extent back only when the last part
        //   of it is dropped; and those of this extent, because `split_off` makes them so.
        unsafe { std::slice::from_raw_parts_mut(self.as_ptr(), self.len()) }
    }
}

impl AsRef<[u8]> for MemRegion {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl fmt::Debug for MemRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MemRegion({:p}, {} bytes)", self.as_ptr(), self.len())
    }
}

/// Keeps the memory of a region mapped, and out of other regions, whatever becomes of the region: it may be with
/// an operation, be shared with peers, or be gone. It gives no access to the bytes.
#[derive(Clone)]
pub struct RegionMapping {
    slab: Arc<Slab>,
    range: Range<usize>,
    /// The pool has the extent back only when this is dropped, too.
    _extent: Option<Arc<HeldExtent>>,
}

impl RegionMapping {
    /// Keeps the memory of `region`.
    ///
    /// ```
    /// use tonic_rdma_verbs::memory::Budget;
    /// use tonic_rdma_verbs::unstable::{RegionMapping, RegionPool};
    ///
    /// let pool = RegionPool::new(Budget::new(64 << 20));
    /// let region = pool.take(4096)?;
    /// let mapping = RegionMapping::of(&region);
    /// drop(region);
    /// assert_ne!(pool.take(4096)?.as_ptr(), mapping.as_ptr());
    /// # Ok::<(), tonic_rdma_verbs::VerbsError>(())
    /// ```
    pub fn of(region: &MemRegion) -> Self {
        Self { slab: Arc::clone(&region.slab), range: region.range(), _extent: region.extent.clone() }
    }

    /// Returns the address of the first byte.
    pub fn as_ptr(&self) -> *mut u8 {
        self.slab.memory().as_ptr().as_ptr().wrapping_add(self.range.start)
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// Returns whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }
}

impl fmt::Debug for RegionMapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RegionMapping({:p}, {} bytes)", self.as_ptr(), self.len())
    }
}

/// Memory of many regions, in slabs that are mapped, and registered with each domain, once. Thread-safe.
///
/// A region of up to 8 MiB is cut from a slab that it shares with others, and costs no descriptor, mapping or
/// registration of its own in the steady state. The first slab has 2 MiB; further ones have a quarter of all
/// slabs, up to 16 MiB. A longer region gets a slab of its own. A region that is dropped gives its memory back
/// at once, and the next region of its size class gets it. So drop a region that peers had rights to after
/// these rights.
///
/// The pool keeps slabs that are in use no more. The long ones among them have at most as many bytes as were in
/// use at a time in this period and the last one. [`end_period`](Self::end_period) frees all that were not used
/// in a whole period.
///
/// Peers that are able to read one region may be able to read all of its slab, as those of the software device
/// that belong to this user are. So use different pools for what peers read and for what only this process
/// reads.
#[derive(Debug)]
pub struct RegionPool {
    pool: Pool,
}

impl RegionPool {
    /// Bytes of the largest slab that regions share.
    const LARGEST_SLAB: usize = 16 << 20;
    /// Bytes of the longest region in a slab that it shares.
    pub const LONGEST_SHARED: usize = Self::LARGEST_SLAB / 2;

    /// Makes a pool without slabs. Its slabs will count against `budget`.
    ///
    /// ```
    /// use tonic_rdma_verbs::memory::Budget;
    /// use tonic_rdma_verbs::unstable::RegionPool;
    ///
    /// let pool = RegionPool::new(Budget::new(64 << 20));
    /// let mut regions: Vec<_> = (0..100).map(|_| pool.take(4096)).collect::<Result<_, _>>()?;
    /// regions[7][..3].copy_from_slice(b"abc");
    /// assert_eq!(pool.statistics().slabs, 1);
    /// # Ok::<(), tonic_rdma_verbs::VerbsError>(())
    /// ```
    pub fn new(budget: Arc<Budget>) -> Self {
        Self { pool: Pool::for_regions(budget, Self::LARGEST_SLAB) }
    }

    /// Takes a region of `length` bytes, with zeros or old content of this pool.
    ///
    /// # Errors
    /// The length exceeds the address space, the budget is used up, or the system can't map the memory.
    pub fn take(&self, length: usize) -> Result<MemRegion, VerbsError> {
        MemRegion::of_extent(self.extent(length)?, length)
    }

    /// Takes an extent for a region of `length` bytes.
    pub(super) fn extent(&self, length: usize) -> Result<Arc<HeldExtent>, VerbsError> {
        Ok(Arc::new(self.pool.obtain(length.max(1), Quota::Receive, Purpose::Region)?))
    }

    /// Takes a region of `length` bytes, which hold zeros. A region that would get a slab of its own gets a new
    /// mapping, which the pool does not keep: its pages use no memory before they are written.
    ///
    /// # Errors
    /// Those of [`take`](Self::take).
    pub fn take_zeroed(&self, length: usize) -> Result<MemRegion, VerbsError> {
        let preallocated = self.pool.obtain_preallocated(length.max(1), Quota::Receive, Purpose::Region);
        if preallocated.is_none() && length > Self::LONGEST_SHARED {
            return MemRegion::allocate(length, self.pool.budget());
        }
        let obtain = || self.pool.obtain(length.max(1), Quota::Receive, Purpose::Region);
        let extent = preallocated.map_or_else(obtain, Ok)?;
        let is_new = extent.is_new();
        let mut region = MemRegion::of_extent(Arc::new(extent), length)?;
        if !is_new {
            region.fill(0);
        }
        Ok(region)
    }

    /// Maps memory ahead for regions of exactly these lengths, as [`Pool::preallocate`] does for buffers.
    ///
    /// # Errors
    /// The budget is used up, or the system can't map the memory.
    pub fn preallocate(&self, lengths: &[usize]) -> Result<(), VerbsError> {
        self.pool.preallocate_for(lengths, Purpose::Region)
    }

    /// Ends a period: frees the slabs of which no region was in use since the last call. The caller decides how
    /// long periods are. If there is nothing to free, this makes no system call.
    pub fn end_period(&self) {
        self.pool.end_period();
    }

    /// Frees all slabs of which no region is in use.
    pub fn trim(&self) {
        self.pool.trim();
    }

    /// Returns the numbers of the pool at this moment. All regions count as received.
    pub fn statistics(&self) -> PoolStatistics {
        self.pool.statistics()
    }
}

/// A region that only its owner writes, and that peers may read if they have a grant. The owner uses it as a
/// slice. A peer that reads while the owner writes may get old and new bytes.
#[derive(Debug)]
pub struct LentRegion {
    loan: RegionLoan,
}

/// The part of a lent region of which peers get grants to read. It gives this process no access to the bytes.
#[derive(Clone, Debug)]
pub struct RegionLoan {
    region: Arc<MemRegion>,
}

impl LentRegion {
    /// Lends `region` to peers. None has a grant yet.
    ///
    /// ```
    /// use tonic_rdma_verbs::unstable::LentRegion;
    /// use tonic_rdma_verbs::memory::{Budget, MemRegion};
    ///
    /// let mut lent = LentRegion::new(MemRegion::allocate(4096, &Budget::new(1 << 20))?);
    /// lent[..3].copy_from_slice(b"abc");
    /// assert_eq!(lent.try_into_region().map_err(drop).expect("no grant exists")[..3], *b"abc");
    /// # Ok::<(), tonic_rdma_verbs::VerbsError>(())
    /// ```
    pub fn new(region: MemRegion) -> Self {
        Self { loan: RegionLoan { region: Arc::new(region) } }
    }

    /// Returns the part of which peers get grants ([`Grant::of_loan`](Grant::of_loan)).
    pub fn loan(&self) -> RegionLoan {
        self.loan.clone()
    }

    /// Returns the region to its one owner, if there is no grant and no loan any more.
    ///
    /// # Errors
    /// Returns `self` if there is a grant or a loan.
    pub fn try_into_region(self) -> Result<MemRegion, Self> {
        Arc::try_unwrap(self.loan.region).map_err(|region| Self { loan: RegionLoan { region } })
    }
}

impl Deref for LentRegion {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        &self.loan.region
    }
}

impl DerefMut for LentRegion {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        let region = &self.loan.region;
        // SAFETY:
        // - The range lies in the mapping, which the region keeps alive, and the memory is initialised.
        // - No other code of this process makes a reference to the bytes: loans and grants only keep the
        //   region alive, and `deref` borrows `self`, which is borrowed mutably here.
        // - Peers and devices never write to the memory: grants are for reading only (`Grant::of_loan`).
        // - They may read it at the same time, in another process, by a device, or by assembly (`copy_bytes`)
        //   through an address that does not come from this slice. What they read reaches only the peer.
        unsafe { std::slice::from_raw_parts_mut(region.as_ptr(), region.len()) }
    }
}

/// A region that peers may read or write if they have a grant. Clones share one memory.
///
/// A peer may write at any time, so content is copied in and out. A copy that is made while a peer writes may
/// contain old and new bytes. Offsets count from the start of the region.
#[derive(Clone, Debug)]
pub struct SharedRegion {
    region: Arc<MemRegion>,
    stays_open: bool,
}

impl SharedRegion {
    /// Makes a shared region of a slab that a peer has rights to, whatever becomes of this region.
    pub(crate) fn of_peer(region: MemRegion) -> Self {
        Self { region: Arc::new(region), stays_open: true }
    }

    /// Returns the region to one owner, if this is the last clone and no grant exists.
    ///
    /// # Errors
    /// Returns `self` if there is another clone or a grant, or if the region [stays open](Self::stays_open).
    pub fn try_into_region(self) -> Result<MemRegion, Self> {
        let stays_open = self.stays_open;
        if stays_open {
            return Err(self);
        }
        Arc::try_unwrap(self.region).map_err(|region| Self { region, stays_open })
    }

    /// Returns whether a peer keeps its rights to the memory when the grant has ended, because they are rights
    /// to the whole slab. Such a region gives no slice.
    pub fn stays_open(&self) -> bool {
        self.stays_open
    }

    /// Returns the region, which gives no access to the bytes.
    pub(crate) fn region(&self) -> &MemRegion {
        &self.region
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
    pub fn copy_in(&self, offset: usize, source: &[u8]) -> Result<(), VerbsError> {
        let at = self.at(offset, source.len())?;
        self.region.memory().copy_in(at, source)
    }

    /// Copies from `offset` into all of `destination`.
    ///
    /// # Errors
    /// There are not enough bytes after `offset`. Nothing was copied.
    #[inline]
    pub fn copy_out(&self, offset: usize, destination: &mut [u8]) -> Result<(), VerbsError> {
        let at = self.at(offset, destination.len())?;
        self.region.memory().copy_out(at, destination)
    }

    /// Passes the bytes of `range` to `then` in consecutive chunks, through a small buffer that stays in the
    /// processor's cache. Every chunk but the last has a multiple of 64 bytes. The first byte of each chunk
    /// is aligned to 64 bytes.
    ///
    /// # Errors
    /// The range is not within the region. `then` was not called.
    pub fn for_each_chunk(&self, range: Range<usize>, then: impl FnMut(&[u8])) -> Result<(), VerbsError> {
        let length = range.end.saturating_sub(range.start);
        self.at(range.start, length)?;
        let start = self.region.as_ptr().wrapping_add(range.start);
        // SAFETY: the range lies in the region, which keeps the mapping alive. Peers and threads may write
        // there at the same time, as `for_each_chunk` allows. No `&mut` reference exists, because a shared
        // region lends out no bytes.
        unsafe { for_each_chunk(start, length, then) };
        Ok(())
    }

    /// Loads the 64-bit word at `offset` with Acquire ordering: all writes before the store of the word are
    /// visible.
    ///
    /// # Errors
    /// The word is not within the region, or not aligned.
    #[inline]
    pub fn load_u64(&self, offset: usize) -> Result<u64, VerbsError> {
        let at = self.at(offset, 8)?;
        self.region.memory().load_u64(at)
    }

    /// Stores the 64-bit word at `offset` with Release ordering: all earlier writes are visible before the
    /// word.
    ///
    /// # Errors
    /// The word is not within the region, or not aligned.
    #[inline]
    pub fn store_u64(&self, offset: usize, value: u64) -> Result<(), VerbsError> {
        let at = self.at(offset, 8)?;
        self.region.memory().store_u64(at, value)
    }

    /// Returns the bytes of `range` in place.
    ///
    /// # Safety
    /// No peer with a grant to write may write there while the slice lives. A peer that follows the rules of
    /// static placement (crate tonic-rdma-tensor) does not write between the arrival of a tensor and its
    /// release. A hostile peer can.
    ///
    /// # Errors
    /// The range is not within the region.
    pub unsafe fn as_slice(&self, range: Range<usize>) -> Result<&[u8], VerbsError> {
        let length = range.end.saturating_sub(range.start);
        self.at(range.start, length)?;
        let start = self.region.as_ptr().wrapping_add(range.start);
        // SAFETY:
        // - The range lies in the region, which keeps the mapping alive, and the kernel has initialised the
        //   memory.
        // - This process writes to the region only by `copy_in` and `store_u64`, whose callers share the
        //   region. Peers do not write, as the caller promises.
        Ok(unsafe { std::slice::from_raw_parts(start, length) })
    }

    /// Returns the offset in the mapping of `length` bytes at `offset` of the region.
    #[inline]
    fn at(&self, offset: usize, length: usize) -> Result<usize, VerbsError> {
        VerbsError::check_bounds(offset, length, self.len())?;
        Ok(self.region.range().start + offset)
    }
}

/// The right of a peer to access a range of memory, exact to the byte: a window of one queue pair, or a
/// registration in one protection domain, which serves one peer.
///
/// Dropping the grant revokes the right. A registration ends before the drop returns, which waits some
/// microseconds for operations of the peer that are in progress. A window may end a moment later. Until then
/// the memory stays with the window, so that it is not used for something else. [`revoke`](Self::revoke) tells when.
#[derive(Debug)]
pub struct Grant {
    right: Right,
    range: RemoteRange,
}

/// What gives the peer its right, and keeps the memory.
#[derive(Debug)]
enum Right {
    Registration {
        /// This is the first field, so that it is dropped first: the right must end before the memory is
        /// freed.
        _region: Arc<dyn MemoryRegion>,
        _memory: GrantedMemory,
    },
    Window {
        _window: Arc<dyn MemoryWindow>,
        ended: Arc<Ended>,
    },
}

/// Whether a right has ended, and the task that waits for that.
#[derive(Debug, Default)]
struct Ended(Mutex<(bool, Option<Waker>)>);

/// The memory of a window. The window drops this when the right has ended.
#[derive(Debug)]
struct WindowMemory {
    memory: Option<GrantedMemory>,
    ended: Arc<Ended>,
}

impl Drop for WindowMemory {
    fn drop(&mut self) {
        // First, so that the task finds the memory free.
        drop(self.memory.take());
        let mut ended = lock(&self.ended.0);
        ended.0 = true;
        let waker = ended.1.take();
        drop(ended);
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

/// A future that is ready when a right has ended ([`Grant::revoke`]). The default is ready. Dropping it changes
/// nothing.
#[derive(Debug, Default)]
pub struct Revocation(Option<Arc<Ended>>);

impl Revocation {
    /// Returns whether the right has ended.
    pub fn is_over(&self) -> bool {
        self.0.as_ref().is_none_or(|ended| lock(&ended.0).0)
    }
}

impl Future for Revocation {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let Some(ended) = &self.0 else { return Poll::Ready(()) };
        let mut ended = lock(&ended.0);
        if ended.0 {
            return Poll::Ready(());
        }
        ended.1 = Some(context.waker().clone());
        Poll::Pending
    }
}

/// The owner that keeps the memory alive.
#[derive(Debug)]
enum GrantedMemory {
    Shared(#[expect(dead_code, reason = "held for its drop")] SharedRegion),
    Lent(#[expect(dead_code, reason = "held for its drop")] RegionLoan),
    Frozen(#[expect(dead_code, reason = "held for its drop")] Lease),
}

/// The address, key and length by which requests of the other process name a range of memory: memory of the
/// peer for requests of this process, or memory of this process for requests of the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteRange {
    /// Address and key of the first byte.
    pub start: RemoteSegment,
    /// Length in bytes.
    pub length: u64,
}

impl RemoteRange {
    /// Returns the address of `length` bytes at `offset`, or `None` if they are not within the range.
    pub fn at(&self, offset: u64, length: u64) -> Option<RemoteSegment> {
        let end = offset.checked_add(length)?;
        let address = self.start.address.checked_add(offset)?;
        (end <= self.length).then_some(RemoteSegment { address, ..self.start })
    }
}

impl Grant {
    /// Grants the peer of `domain` the rights `access` to all of `shared`.
    ///
    /// # Errors
    /// The device can't register the memory.
    pub fn of_region(
        domain: &dyn ProtectionDomain,
        shared: &SharedRegion,
        access: Access,
    ) -> Result<Self, VerbsError> {
        // Devices give peers the right to write only together with the local right. The local right alone may
        // let peers write, too (see `ProtectionDomain::opens_sinks`).
        let writes = access.contains(Access::REMOTE_WRITE);
        let access = if writes { access | Access::LOCAL_WRITE } else { access };
        let granted = GrantedMemory::Shared(shared.clone());
        Self::register(domain, shared.region.position(), access, granted)
    }

    /// Grants the peer of `domain` the right to read all of a lent region.
    ///
    /// # Errors
    /// The device can't register the memory.
    pub fn of_loan(domain: &dyn ProtectionDomain, loan: &RegionLoan) -> Result<Self, VerbsError> {
        let granted = GrantedMemory::Lent(loan.clone());
        Self::register(domain, loan.region.position(), Access::REMOTE_READ, granted)
    }

    /// Grants the peer of `domain` the right to read the bytes of `lease`.
    ///
    /// # Errors
    /// The device can't register the memory.
    pub fn of_lease(domain: &dyn ProtectionDomain, lease: &Lease) -> Result<Self, VerbsError> {
        Self::register(domain, lease.position(), Access::REMOTE_READ, GrantedMemory::Frozen(lease.clone()))
    }

    /// Grants the peer of `queue_pair` the right to read the bytes of `lease`, by a window in its slab, which
    /// `slabs` registers once. Returns `None` if the device has no window for them, or can't register the slab.
    ///
    /// # Errors
    /// The device refuses the window.
    pub fn in_slab(
        queue_pair: &dyn QueuePair,
        slabs: &mut SlabRegistrations,
        lease: &Lease,
    ) -> Result<Option<Self>, VerbsError> {
        let slab = if queue_pair.has_windows() { slabs.region(lease).ok() } else { None };
        let granted = GrantedMemory::Frozen(lease.clone());
        Self::by_window(queue_pair, slab, lease.position(), Access::REMOTE_READ, granted)
    }

    /// Grants the peer of `queue_pair` the rights `access` to all of `shared`, by a window in its slab, which
    /// `known` registers once. Returns `None` if the device has no window for it, or can't register the slab.
    ///
    /// # Errors
    /// The device refuses the window.
    pub(super) fn in_region(
        queue_pair: &dyn QueuePair,
        known: &LocalRegistrations,
        shared: &SharedRegion,
        access: Access,
    ) -> Result<Option<Self>, VerbsError> {
        let slab = if queue_pair.has_windows() { known.region(&shared.region).ok() } else { None };
        let granted = GrantedMemory::Shared(shared.clone());
        Self::by_window(queue_pair, slab, shared.region.position(), access, granted)
    }

    /// Makes the right to `shared` that the registration of its slab gives.
    pub(crate) fn by_slab(slab: Arc<dyn MemoryRegion>, shared: SharedRegion) -> Self {
        let range = remote_range(shared.region.memory(), &shared.region.range(), slab.rkey());
        Self { right: Right::Registration { _region: slab, _memory: GrantedMemory::Shared(shared) }, range }
    }

    fn by_window(
        queue_pair: &dyn QueuePair,
        slab: Option<Arc<dyn MemoryRegion>>,
        (memory, range): (Arc<HostMemory>, Range<usize>),
        access: Access,
        granted: GrantedMemory,
    ) -> Result<Option<Self>, VerbsError> {
        let Some(slab) = slab else { return Ok(None) };
        let Some(window) = queue_pair.open_window(&slab, range.clone(), access)? else { return Ok(None) };
        let ended = Arc::new(Ended::default());
        window.keep(Box::new(WindowMemory { memory: Some(granted), ended: Arc::clone(&ended) }));
        let range = remote_range(&memory, &range, window.rkey());
        Ok(Some(Self { right: Right::Window { _window: window, ended }, range }))
    }

    fn register(
        domain: &dyn ProtectionDomain,
        (memory, range): (Arc<HostMemory>, Range<usize>),
        access: Access,
        granted: GrantedMemory,
    ) -> Result<Self, VerbsError> {
        let region = domain.register_range(Arc::clone(&memory), range.clone(), access)?;
        let range = remote_range(&memory, &range, region.rkey());
        Ok(Self { right: Right::Registration { _region: region, _memory: granted }, range })
    }

    /// Returns the range, for requests of the peer.
    pub fn range(&self) -> RemoteRange {
        self.range
    }

    /// Revokes the right. The result is ready when the peer has no right any more, and the grant keeps the
    /// memory no longer.
    pub fn revoke(self) -> Revocation {
        match self.right {
            Right::Registration { .. } => Revocation::default(),
            Right::Window { ended, .. } => Revocation(Some(ended)),
        }
    }
}

/// Returns the bytes `range` of `memory` as requests of a peer name them.
fn remote_range(memory: &HostMemory, range: &Range<usize>, rkey: Rkey) -> RemoteRange {
    let start = RemoteSegment { address: memory.address() + range.start as u64, rkey };
    RemoteRange { start, length: range.len() as u64 }
}
