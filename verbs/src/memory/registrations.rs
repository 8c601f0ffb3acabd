//! Memory that a protection domain has registered beyond the slabs of its own pools. Each registration is
//! made once and kept as long as the memory lives.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, Weak};

use crate::memory::extents::Lease;
use crate::memory::pool::shared::Slab;
use crate::memory::region::{Grant, MemRegion, RegionPool, SharedRegion};
use crate::memory::settings::{Budget, Reservation};
use crate::panics::lock;
use crate::{Access, LocalSegment, MemoryRegion, ProtectionDomain, RemoteSegment, VerbsError};

/// The regions and buffers that requests of one protection domain use, for all queue pairs of the domain.
/// Each of their slabs is registered once, without rights for peers.
///
/// What the peer of the domain gets rights to without a window lies in slabs of its own (`PeerSlabs`): what
/// it may read, and what it may write. Where a device [opens sinks](ProtectionDomain::opens_sinks) to peers,
/// READs go to such slabs too, and their bytes are copied into the region afterwards.
#[derive(Debug)]
pub struct LocalRegistrations {
    domain: Arc<dyn ProtectionDomain>,
    slabs: Mutex<SlabRegistrations>,
    regions: Mutex<SlabRegistrations>,
    readable: PeerSlabs,
    writable: PeerSlabs,
}

impl LocalRegistrations {
    /// Makes an empty set of registrations with `domain`. Slabs of buffers, and those of the peer, will count
    /// against `budget`.
    pub fn new(domain: Arc<dyn ProtectionDomain>, budget: Arc<Budget>) -> Self {
        let access = if domain.opens_sinks() { Access::LOCAL_READ } else { Access::LOCAL_WRITE };
        let regions = |access| Mutex::new(SlabRegistrations::of_regions(&domain, access));
        let of_peer =
            |access| PeerSlabs { pool: RegionPool::new(Arc::clone(&budget)), registered: regions(access) };
        Self {
            regions: regions(access),
            readable: of_peer(Access::REMOTE_READ),
            writable: of_peer(Access::LOCAL_WRITE | Access::REMOTE_WRITE),
            slabs: Mutex::new(SlabRegistrations::new(Arc::clone(&domain), budget)),
            domain,
        }
    }

    /// Returns the registration of the slab that `lease` lies in, for reading.
    pub(crate) fn lease(&self, lease: &Lease) -> Result<Arc<dyn MemoryRegion>, VerbsError> {
        lock(&self.slabs).region(lease)
    }

    /// Returns memory for a READ into `length` bytes that the peer can write as long as the link lives. `None`
    /// if the device keeps the sinks of READs closed.
    pub(crate) fn open_sink(&self, length: usize) -> Result<Option<PeerRegion>, VerbsError> {
        let opens = self.domain.opens_sinks() && length > 0;
        opens.then(|| self.writable.take(length)).transpose()
    }

    /// Registers `range` of `region` for one READ. Drop the registration before the region is used for
    /// something else.
    pub(crate) fn sink_alone(
        &self,
        region: &MemRegion,
        range: Range<usize>,
    ) -> Result<Arc<dyn MemoryRegion>, VerbsError> {
        let start = region.range().start;
        let memory = Arc::clone(region.memory());
        self.domain.register_range(memory, start + range.start..start + range.end, Access::LOCAL_WRITE)
    }

    /// Returns the registration of the slab of `region`, for reading, and for writing if the device keeps
    /// sinks closed.
    pub(crate) fn region(&self, region: &MemRegion) -> Result<Arc<dyn MemoryRegion>, VerbsError> {
        lock(&self.regions).slab(region.slab())
    }

    /// Grants the peer of the domain the right to read a copy of `bytes`, in a slab of memory that only this
    /// peer gets rights to. In the steady state this registers nothing.
    ///
    /// The peer is able to read the slab as long as the domain lives: its own grants, also those that have
    /// ended.
    ///
    /// # Errors
    /// The budget has no room for the copy, or the device can't register the slab.
    pub fn grant_copy(&self, bytes: &[u8]) -> Result<Grant, VerbsError> {
        let copy = self.readable.take(bytes.len())?;
        copy.shared.copy_in(0, bytes)?;
        Ok(Grant::by_slab(copy.slab, copy.shared))
    }

    /// Grants the peer of the domain the right to write `length` bytes, in a slab of memory that only this peer
    /// gets rights to. In the steady state this registers nothing.
    ///
    /// The peer is able to write to the slab as long as the domain lives. So copy out what has arrived: this
    /// region [never gets one owner](SharedRegion::stays_open) again.
    ///
    /// # Errors
    /// The budget has no room for the bytes, or the device can't register the slab.
    pub fn grant_sink(&self, length: usize) -> Result<(Grant, SharedRegion), VerbsError> {
        let sink = self.writable.take(length)?;
        Ok((Grant::by_slab(sink.slab, sink.shared.clone()), sink.shared))
    }

    /// Ends a period: frees the slabs of the peer that were not used since the last call, and drops
    /// registrations as [`prune`](Self::prune) does.
    pub fn end_period(&self) {
        self.readable.pool.end_period();
        self.writable.pool.end_period();
        self.prune();
    }

    /// Frees the slabs of the peer that nothing uses, and drops registrations as [`prune`](Self::prune) does.
    pub fn trim(&self) {
        self.readable.pool.trim();
        self.writable.pool.trim();
        self.prune();
    }

    /// Drops the registrations of slabs that are gone. The memory of such a slab lives as long as its
    /// registration.
    pub fn prune(&self) {
        for slabs in [&self.slabs, &self.regions, &self.readable.registered, &self.writable.registered] {
            lock(slabs).prune();
        }
    }

    /// Returns the slabs of buffers.
    pub(crate) fn with_slabs<T>(&self, then: impl FnOnce(&mut SlabRegistrations) -> T) -> T {
        then(&mut lock(&self.slabs))
    }
}

/// Memory that only one peer has rights to: slabs that are registered once, with these rights.
/// Nothing else ever lies in them, so the peer can have their keys for its life.
#[derive(Debug)]
struct PeerSlabs {
    pool: RegionPool,
    registered: Mutex<SlabRegistrations>,
}

impl PeerSlabs {
    /// Takes a region of `length` bytes, with any content of this peer.
    fn take(&self, length: usize) -> Result<PeerRegion, VerbsError> {
        let region = self.pool.take(length)?;
        let slab = lock(&self.registered).slab(region.slab())?;
        Ok(PeerRegion { shared: SharedRegion::of_peer(region), slab })
    }
}

/// A region of `PeerSlabs`, and the registration of its slab.
#[derive(Debug)]
pub(crate) struct PeerRegion {
    pub(crate) shared: SharedRegion,
    pub(crate) slab: Arc<dyn MemoryRegion>,
}

/// Names `range` of `region`, in bytes from its start, by the registration of its slab.
///
/// # Safety
/// There must be no reference to the bytes of `region` until the request over the segment has completed.
pub(crate) unsafe fn segment_of(
    region: &MemRegion,
    registered: &dyn MemoryRegion,
    range: Range<usize>,
) -> LocalSegment {
    let start = region.range().start;
    debug_assert!(range.end <= region.len());
    // SAFETY: there is no reference to the bytes of the region, as the caller promises.
    unsafe { LocalSegment::new(registered, start + range.start..start + range.end) }
}

/// Slabs that one protection domain has registered with the same rights: of pools
/// [`for_sending`](crate::memory::Pool::for_sending), for reading by the own device only, or by peers too
/// ([`exposing`](Self::exposing)), or of regions.
#[derive(Debug)]
pub struct SlabRegistrations {
    domain: Arc<dyn ProtectionDomain>,
    /// What the registered slabs count against. `None` for those of regions, which count already.
    budget: Option<Arc<Budget>>,
    access: Access,
    /// By the address of the slab. While the entry holds a weak reference to the slab, no other slab gets
    /// that address.
    slabs: HashMap<usize, SlabRegistration>,
}

/// One slab. A refused registration is not tried again, but for slabs of regions, whose bytes can't be copied
/// instead.
#[derive(Debug)]
struct SlabRegistration {
    slab: Weak<Slab>,
    registered: Result<(Arc<dyn MemoryRegion>, Option<Reservation>), VerbsError>,
}

impl SlabRegistrations {
    /// Makes an empty set of registrations with `domain`. Registered slabs will count against `budget`.
    pub fn new(domain: Arc<dyn ProtectionDomain>, budget: Arc<Budget>) -> Self {
        Self { budget: Some(budget), ..Self::of_regions(&domain, Access::LOCAL_READ) }
    }

    /// Makes an empty set of registrations of regions with `domain`.
    fn of_regions(domain: &Arc<dyn ProtectionDomain>, access: Access) -> Self {
        Self { domain: Arc::clone(domain), budget: None, access, slabs: HashMap::new() }
    }

    /// Makes an empty set of registrations with `domain` that gives peers of this domain the right to read
    /// whole slabs.
    pub fn exposing(domain: Arc<dyn ProtectionDomain>, budget: Arc<Budget>) -> Self {
        Self { access: Access::LOCAL_READ | Access::REMOTE_READ, ..Self::new(domain, budget) }
    }

    /// Returns the address and key by which a peer reads the first byte of `lease`, of a pool for sending.
    /// Returns `None` if the slab can't be registered, or if these registrations give peers no right. Keep
    /// the lease until the peer has read the bytes.
    pub fn remote(&mut self, lease: &Lease) -> Option<RemoteSegment> {
        if !self.access.contains(Access::REMOTE_READ) {
            return None;
        }
        let region = self.region(lease).ok()?;
        Some(RemoteSegment { address: lease.as_ptr() as u64, rkey: region.rkey() })
    }

    /// Names `lease`, of a pool for sending, for a request that reads it. Returns `None` if the slab can't be
    /// registered. Keep the lease until that request has completed.
    pub fn segment(&mut self, lease: &Lease) -> Option<LocalSegment> {
        self.region(lease).map(|region| lease.segment_in(&*region, 0..lease.len())).ok()
    }

    /// Returns the registration of the slab that `lease` lies in. Registers the slab at the first call.
    ///
    /// # Errors
    /// The budget is used up, or the device refuses the slab: now, or at an earlier call.
    pub(crate) fn region(&mut self, lease: &Lease) -> Result<Arc<dyn MemoryRegion>, VerbsError> {
        self.slab(lease.slab())
    }

    fn slab(&mut self, slab: &Arc<Slab>) -> Result<Arc<dyn MemoryRegion>, VerbsError> {
        let key = Arc::as_ptr(slab).addr();
        let region_of = |entry: &SlabRegistration| match &entry.registered {
            Ok((region, _)) => Ok(Arc::clone(region)),
            Err(error) => Err(error.clone()),
        };
        if let Some(entry) = self.slabs.get(&key) {
            return region_of(entry);
        }
        self.prune();
        let entry = SlabRegistration { slab: Arc::downgrade(slab), registered: self.register(slab) };
        let region = region_of(&entry);
        if region.is_ok() || self.budget.is_some() {
            self.slabs.insert(key, entry);
        }
        region
    }

    fn register(&self, slab: &Slab) -> Result<(Arc<dyn MemoryRegion>, Option<Reservation>), VerbsError> {
        let Some(budget) = &self.budget else {
            return Ok((self.domain.register(Arc::clone(slab.memory()), self.access)?, None));
        };
        let bytes = slab.len() as u64;
        let registered = budget.reserve(bytes).and_then(|reservation| {
            let region = self.domain.register(Arc::clone(slab.memory()), self.access);
            Ok((region.map_err(|cause| cause.not_registered(bytes))?, Some(reservation)))
        });
        registered.inspect_err(|reason| {
            crate::throttled!(warn, bytes, %reason, "memory to send from can't be registered: its content is copied");
        })
    }

    /// Drops the registrations of slabs that their pool has freed. The memory of such a slab lives as long as
    /// its registration.
    pub fn prune(&mut self) {
        self.slabs.retain(|_, entry| entry.slab.strong_count() > 0);
    }
}
