//! The pool: slabs of registered memory, and the extents that are cut from them.
//!
//! ```text
//!  Pool ─▶ PoolShared ─▶ Arena, one for blocks and one for buffers ─▶ Slab ─▶ Extent
//!               ▲                                                               │
//!               └──────────────── gives the extent back on drop ──────────── HeldExtent ─▶ FrozenBuffer
//! ```
//!
//! [`Block`], [`RegisteredBuf`] and [`Lease`] in `extents` are the public types for a held extent.

mod arena;
pub(super) mod shared;

use std::ops::Range;
use std::sync::{Arc, LazyLock};

use self::shared::{FrozenIndex, HeldExtent, PoolKind, PoolShared, Slab};
use super::extents::{Block, Lease, RegisteredBuf};
use super::settings::{Budget, PoolSettings, PoolStatistics, Quota, Reservation};
use crate::{
    Access, CompletionQueue, HostMemory, Lkey, MemoryRegion, ProtectionDomain, QueuePair, QueuePairCapacity,
    Rkey, VerbsError,
};

use self::arena::Arena;
pub(crate) use self::arena::{EXTENT_ALIGNMENT, Purpose};

/// A pool of registered memory, for a connection or an application. Clones are one pool.
///
/// A new pool has no memory. It maps and registers slabs on demand and keeps them for reuse. After the last
/// clone is dropped, each slab is freed with the last of its extents that is in use, and its bytes return to
/// the budget.
///
/// Thread-safe. If a free extent of the right size class exists, [`lease`](Self::lease) and
/// [`allocate`](Self::allocate) hold a lock for some ten nanoseconds and make no system call. Otherwise they
/// map and register a slab, which takes microseconds, and the kernel clears the pages of the slab at their
/// first use.
#[derive(Clone, Debug)]
pub struct Pool {
    handle: Arc<PoolHandle>,
}

impl Pool {
    /// Makes a pool that registers its memory with `domain`, within `budget`. Programs that post verbs
    /// themselves use this function. Programs that only send use [`for_sending`](Self::for_sending).
    ///
    /// ```
    /// use tonic_rdma_verbs::memory::{Budget, Pool, PoolSettings, Quota};
    ///
    /// let device = tonic_rdma_verbs::open("soft0")?;
    /// let domain = device.alloc_protection_domain()?;
    /// let pool = Pool::new(domain, PoolSettings::default(), Budget::new(64 << 20));
    /// let block = pool.lease(4096, Quota::Receive)?;
    /// # drop(block);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn new(domain: Arc<dyn ProtectionDomain>, settings: PoolSettings, budget: Arc<Budget>) -> Self {
        let index = Arc::new(FrozenIndex::new());
        Self::of(PoolShared::new(domain, settings, budget, index, PoolKind::Ordinary))
    }

    /// Makes a pool whose slabs are a share of `budget` ([`Budget::reserve_in_share`]).
    pub(crate) fn sharing(
        domain: Arc<dyn ProtectionDomain>,
        settings: PoolSettings,
        budget: Arc<Budget>,
    ) -> Self {
        Self::of(PoolShared::new(domain, settings, budget, Arc::new(FrozenIndex::new()), PoolKind::Share))
    }

    /// Makes a pool for regions, which only the budget limits. Its slabs have up to `slab_size` bytes. It has
    /// no domain: each link that uses a region registers its slab ([`LocalRegistrations`]).
    ///
    /// [`LocalRegistrations`]: super::registrations::LocalRegistrations
    pub(crate) fn for_regions(budget: Arc<Budget>, slab_size: usize) -> Self {
        let settings = PoolSettings {
            access: Access::LOCAL_WRITE,
            slab_size,
            send_quota: 0,
            receive_quota: u64::MAX,
            ..PoolSettings::default()
        };
        let index = Arc::new(FrozenIndex::new());
        Self::of(PoolShared::new(Arc::new(Unbound), settings, budget, index, PoolKind::Regions))
    }

    fn of(shared: PoolShared) -> Self {
        Self { handle: Arc::new(PoolHandle { shared: Arc::new(shared) }) }
    }

    /// Makes a pool whose buffers every connection can send without a copy, over any device. The application
    /// allocates and fills a buffer, and passes it on as [`Bytes`](bytes::Bytes). A connection that sends
    /// such bytes registers their slab once with its own protection domain, so that its device can read the
    /// slab. Peers get no right to the slab, except the peers of native calls that carry content of this
    /// pool: they are able to read the whole slab (`CallConfig::send_in_place` of the crate tonic-rdma).
    /// Together with the `gather` codec of the crate tonic-rdma, the sending side does not copy the content
    /// of a large `bytes` field at all.
    ///
    /// `limit` is the number of bytes that may be in use at a time. Registrations count against the budget of
    /// the connections (`RDMA_PINNED_LIMIT`). If that budget is used up, a connection copies the bytes as it
    /// copies any others. The counter `copies_avoided_bytes` of tonic-rdma counts the bytes that were sent
    /// without a copy.
    ///
    /// Use only [`allocate`](Self::allocate) with this pool: the segments of its blocks and leases name no
    /// registered memory, and every device refuses them.
    ///
    /// ```
    /// let pool = tonic_rdma_verbs::memory::Pool::for_sending(1 << 30);
    /// let mut tensor = pool.allocate(4 << 20)?;
    /// tensor.fill(1);
    /// let payload: bytes::Bytes = tensor.freeze();
    /// # assert_eq!(payload.len(), 4 << 20);
    /// # Ok::<(), tonic_rdma_verbs::VerbsError>(())
    /// ```
    pub fn for_sending(limit: u64) -> Self {
        let settings = PoolSettings {
            access: Access::LOCAL_READ,
            send_quota: limit,
            receive_quota: 0,
            ..PoolSettings::default()
        };
        let (budget, index) = (Budget::new(limit), Arc::clone(&SENDABLE));
        Self::of(PoolShared::new(Arc::new(Unbound), settings, budget, index, PoolKind::Ordinary))
    }

    /// Leases a block of at least `length` bytes, which the device may read and write. The block holds zeros,
    /// or old content of this pool. [`new`](Self::new) shows how to make a pool.
    ///
    /// ```
    /// # use tonic_rdma_verbs::VerbsError;
    /// # use tonic_rdma_verbs::memory::{Budget, Pool, PoolSettings};
    /// use tonic_rdma_verbs::memory::Quota;
    ///
    /// # fn take(pool: &Pool) -> Result<(), VerbsError> {
    /// let mut block = pool.lease(4096, Quota::Send)?;
    /// block.copy_in(0, b"content").expect("it fits");
    /// let segment = block.segment(0..7).expect("within the block"); // for a work request
    /// # drop(segment);
    /// # Ok(())
    /// # }
    /// # let domain = tonic_rdma_verbs::open("soft0")?.alloc_protection_domain()?;
    /// # take(&Pool::new(domain, PoolSettings::default(), Budget::new(64 << 20)))?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// The quota or the budget is used up, or a slab could not be made.
    pub fn lease(&self, length: usize, quota: Quota) -> Result<Block, VerbsError> {
        Ok(Block::new(self.obtain(length, quota, Purpose::Block)?, length))
    }

    /// Allocates a buffer of `length` bytes for content to be sent. The buffer counts against [`Quota::Send`]
    /// until all [`Bytes`](bytes::Bytes) and leases made from the buffer are dropped. The buffer holds zeros,
    /// or old content of this pool.
    ///
    /// ```
    /// use tonic_rdma_verbs::memory::Pool;
    ///
    /// let pool = Pool::for_sending(1 << 20);
    /// let mut buffer = pool.allocate(4096)?;
    /// buffer.fill(7); // the buffer is a `&mut [u8]`
    /// let payload: bytes::Bytes = buffer.freeze();
    /// # assert_eq!(payload.len(), 4096);
    /// # Ok::<(), tonic_rdma_verbs::VerbsError>(())
    /// ```
    ///
    /// # Errors
    /// The quota or the budget is used up, or a slab could not be made.
    pub fn allocate(&self, length: usize) -> Result<RegisteredBuf, VerbsError> {
        Ok(RegisteredBuf::new(self.obtain(length, Quota::Send, Purpose::Buffer)?, length))
    }

    /// Maps memory ahead for buffers of exactly these lengths, in bytes, in one slab. Requests of these
    /// lengths get these buffers, in turn. Other requests don't. If all buffers of a length are in use, the
    /// pool grows as usual. The slab stays as long as the pool.
    ///
    /// ```
    /// use tonic_rdma_verbs::memory::Pool;
    ///
    /// let pool = Pool::for_sending(1 << 30);
    /// pool.preallocate([3_000_000; 2])?;
    /// let (one, two) = (pool.allocate(3_000_000)?, pool.allocate(3_000_000)?);
    /// let statistics = pool.statistics();
    /// assert_eq!((statistics.slabs, statistics.preallocated), (1, 2 * Pool::preallocated_bytes(3_000_000)));
    /// assert_eq!(statistics.preallocated_used, statistics.preallocated);
    /// # drop((one, two));
    /// # Ok::<(), tonic_rdma_verbs::VerbsError>(())
    /// ```
    ///
    /// # Errors
    /// The budget is used up, or the slab could not be made.
    pub fn preallocate(&self, lengths: impl IntoIterator<Item = usize>) -> Result<(), VerbsError> {
        let lengths: Vec<usize> = lengths.into_iter().collect();
        self.handle.shared.preallocate(&lengths, Purpose::Buffer)
    }

    /// Returns the bytes of a buffer of `length` bytes that is [preallocated](Self::preallocate).
    pub fn preallocated_bytes(length: usize) -> u64 {
        Arena::reserved_capacity(length) as u64
    }

    /// Maps memory ahead as [`preallocate`](Self::preallocate) does, for extents of `purpose`.
    pub(crate) fn preallocate_for(&self, lengths: &[usize], purpose: Purpose) -> Result<(), VerbsError> {
        self.handle.shared.preallocate(lengths, purpose)
    }

    /// Obtains an extent that was preallocated for `length` bytes, if one is free.
    pub(crate) fn obtain_preallocated(
        &self,
        length: usize,
        quota: Quota,
        purpose: Purpose,
    ) -> Option<HeldExtent> {
        let extent = self.handle.shared.obtain_preallocated(length, quota, purpose)?;
        Some(HeldExtent::new(extent, quota, purpose, Arc::clone(&self.handle.shared)))
    }

    /// Finds the frozen buffer of this pool that holds all `length` bytes at `address`, and returns a
    /// reference that keeps these bytes in place and unchanged. If no buffer can be at that address, the call
    /// takes a few nanoseconds.
    ///
    /// A caller that holds a slice calls `pool.find(slice.as_ptr() as usize, slice.len())`.
    pub fn find(&self, address: usize, length: usize) -> Option<Lease> {
        Lease::find(&self.handle.shared.index, address, length)
    }

    /// Frees all slabs without an extent in use. Call this when a connection becomes idle, because its slabs
    /// count against the budget of all connections.
    pub fn trim(&self) {
        self.handle.shared.trim();
    }

    /// Ends a period: frees the slabs that had no extent in use since the last call.
    pub(crate) fn end_period(&self) {
        self.handle.shared.end_period();
    }

    /// Returns the numbers of the pool at this moment.
    pub fn statistics(&self) -> PoolStatistics {
        self.handle.shared.statistics()
    }

    /// Returns the settings of the pool, with the slab size rounded.
    pub fn settings(&self) -> &PoolSettings {
        &self.handle.shared.settings
    }

    /// Returns the budget of the pool. The slabs of the pool count against this budget.
    pub fn budget(&self) -> &Arc<Budget> {
        &self.handle.shared.budget
    }

    /// Obtains an extent for `length` bytes.
    pub(crate) fn obtain(
        &self,
        length: usize,
        quota: Quota,
        purpose: Purpose,
    ) -> Result<HeldExtent, VerbsError> {
        let extent = self.handle.shared.obtain(length, quota, purpose)?;
        Ok(HeldExtent::new(extent, quota, purpose, Arc::clone(&self.handle.shared)))
    }

    /// Returns the protection domain of the pool.
    pub(crate) fn domain(&self) -> &Arc<dyn ProtectionDomain> {
        &self.handle.shared.domain
    }
}

/// Closes the pool when the last clone of it is dropped. [`PoolShared`] lives until the last extent is given
/// back.
#[derive(Debug)]
struct PoolHandle {
    shared: Arc<PoolShared>,
}

impl Drop for PoolHandle {
    fn drop(&mut self) {
        self.shared.close();
    }
}

/// The frozen buffers of all pools for sending.
static SENDABLE: LazyLock<Arc<FrozenIndex>> = LazyLock::new(|| Arc::new(FrozenIndex::new()));

/// Finds the frozen buffer of any pool for sending that holds all of `bytes`. While there are no frozen
/// buffers, a lookup takes two loads.
pub fn find_sendable(bytes: &[u8]) -> Option<Lease> {
    Lease::find(&SENDABLE, bytes.as_ptr() as usize, bytes.len())
}

/// Maps the bytes of `reservation`, as a slab that is registered with no device and belongs to no pool.
pub(super) fn own_slab(reservation: Reservation) -> Result<Slab, VerbsError> {
    Slab::new(&Unbound, Access::LOCAL_READ, &PoolSettings::default(), reservation)
}

/// A placeholder for the protection domain, in a pool that has none.
#[derive(Debug)]
struct Unbound;

impl crate::sealed::Sealed for Unbound {}

impl ProtectionDomain for Unbound {
    fn register_range(
        &self,
        memory: Arc<HostMemory>,
        range: Range<usize>,
        _: Access,
    ) -> Result<Arc<dyn MemoryRegion>, VerbsError> {
        memory.check_range(&range)?;
        Ok(Arc::new(Unregistered(memory, range)))
    }

    fn create_queue_pair(
        &self,
        _: &Arc<dyn CompletionQueue>,
        _: &Arc<dyn CompletionQueue>,
        _: &QueuePairCapacity,
    ) -> Result<Arc<dyn QueuePair>, VerbsError> {
        Err(VerbsError::foreign("protection domain"))
    }
}

/// Memory that is registered with no device. A device refuses its keys.
#[derive(Debug)]
struct Unregistered(Arc<HostMemory>, Range<usize>);

impl crate::sealed::Sealed for Unregistered {}

impl MemoryRegion for Unregistered {
    fn lkey(&self) -> Lkey {
        Lkey(0)
    }

    fn rkey(&self) -> Rkey {
        Rkey(0)
    }

    fn access(&self) -> Access {
        Access::LOCAL_READ
    }

    fn memory(&self) -> &Arc<HostMemory> {
        &self.0
    }

    fn range(&self) -> Range<usize> {
        self.1.clone()
    }
}
