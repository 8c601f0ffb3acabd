//! Memory that a protection domain has registered beyond the slabs of its own pools. Each registration is
//! made once and kept as long as the memory lives.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Weak};

use crate::memory::extents::Lease;
use crate::memory::pool::shared::Slab;
use crate::memory::region::MemRegion;
use crate::memory::settings::{Budget, Reservation};
use crate::{Access, LocalSegment, MemoryRegion, ProtectionDomain, RemoteSegment, VerbsError};

/// The regions and buffers that requests of one protection domain use. Each of them is registered once,
/// without rights for peers. Where a device [opens sinks](ProtectionDomain::opens_sinks) to peers, a region
/// is registered for reading alone, and each READ gets a registration of its own.
#[derive(Debug)]
pub struct LocalRegistrations {
    domain: Arc<dyn ProtectionDomain>,
    frozen: SlabRegistrations,
    /// By the address of the slab. While the entry holds a weak reference to the slab, no other slab gets that
    /// address.
    regions: HashMap<usize, (Weak<Slab>, Arc<dyn MemoryRegion>)>,
}

impl LocalRegistrations {
    /// Makes an empty set of registrations with `domain`. Slabs of buffers will count against `budget`.
    pub fn new(domain: Arc<dyn ProtectionDomain>, budget: Arc<Budget>) -> Self {
        let frozen = SlabRegistrations::new(Arc::clone(&domain), budget);
        Self { domain, frozen, regions: HashMap::new() }
    }

    /// Returns the slabs of buffers.
    pub(crate) fn slabs(&mut self) -> &mut SlabRegistrations {
        &mut self.frozen
    }

    /// Returns the registration of the slab that `lease` lies in, for reading.
    pub(crate) fn lease(&mut self, lease: &Lease) -> Result<Arc<dyn MemoryRegion>, VerbsError> {
        self.frozen.region(lease)
    }

    /// Returns a registration for a READ into the bytes `range` of `region`. Drop the registration before the
    /// region is used for something else.
    pub(crate) fn sink(
        &mut self,
        region: &MemRegion,
        range: Range<usize>,
    ) -> Result<Arc<dyn MemoryRegion>, VerbsError> {
        if !self.domain.opens_sinks() {
            return self.region(region);
        }
        let start = region.range().start;
        let memory = Arc::clone(region.memory());
        self.domain.register_range(memory, start + range.start..start + range.end, Access::LOCAL_WRITE)
    }

    /// Returns the registration of the slab of `region`, for reading, and for writing if the device keeps
    /// sinks closed.
    pub(crate) fn region(&mut self, region: &MemRegion) -> Result<Arc<dyn MemoryRegion>, VerbsError> {
        let key = Arc::as_ptr(region.slab()).addr();
        if let Some((_, registered)) = self.regions.get(&key) {
            return Ok(Arc::clone(registered));
        }
        self.prune();
        let memory = Arc::clone(region.memory());
        let access = if self.domain.opens_sinks() { Access::LOCAL_READ } else { Access::LOCAL_WRITE };
        let registered = self.domain.register(memory, access)?;
        self.regions.insert(key, (Arc::downgrade(region.slab()), Arc::clone(&registered)));
        Ok(registered)
    }

    /// Drops the registrations of slabs that are gone. The memory of such a slab lives as long as its
    /// registration.
    pub(crate) fn prune(&mut self) {
        self.regions.retain(|_, (slab, _)| slab.strong_count() > 0);
        self.frozen.prune();
    }
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

/// Slabs of pools [`for_sending`](crate::memory::Pool::for_sending) that one protection domain has registered
/// for reading: by the own device only, or by peers too ([`exposing`](Self::exposing)).
#[derive(Debug)]
pub struct SlabRegistrations {
    domain: Arc<dyn ProtectionDomain>,
    budget: Arc<Budget>,
    access: Access,
    /// By the address of the slab. While the entry holds a weak reference to the slab, no other slab gets
    /// that address.
    slabs: HashMap<usize, SlabRegistration>,
}

/// One slab. A refused registration is not tried again.
#[derive(Debug)]
struct SlabRegistration {
    slab: Weak<Slab>,
    registered: Result<(Arc<dyn MemoryRegion>, Reservation), VerbsError>,
}

impl SlabRegistrations {
    /// Makes an empty set of registrations with `domain`. Registered slabs will count against `budget`.
    pub fn new(domain: Arc<dyn ProtectionDomain>, budget: Arc<Budget>) -> Self {
        Self { domain, budget, access: Access::LOCAL_READ, slabs: HashMap::new() }
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
        self.region(lease).map(|region| lease.segment_by(&*region)).ok()
    }

    /// Returns the registration of the slab that `lease` lies in. Registers the slab at the first call.
    ///
    /// # Errors
    /// The budget is used up, or the device refuses the slab: now, or at an earlier call.
    pub(crate) fn region(&mut self, lease: &Lease) -> Result<Arc<dyn MemoryRegion>, VerbsError> {
        let slab = lease.slab();
        let key = Arc::as_ptr(slab).addr();
        if !self.slabs.contains_key(&key) {
            self.prune();
        }
        let (domain, budget, access) = (&*self.domain, &self.budget, self.access);
        let entry = self.slabs.entry(key).or_insert_with(|| SlabRegistration {
            slab: Arc::downgrade(slab),
            registered: register(domain, budget, access, slab),
        });
        match &entry.registered {
            Ok((region, _)) => Ok(Arc::clone(region)),
            Err(error) => Err(error.clone()),
        }
    }

    /// Drops the registrations of slabs that their pool has freed. The memory of such a slab lives as long as
    /// its registration.
    pub fn prune(&mut self) {
        self.slabs.retain(|_, entry| entry.slab.strong_count() > 0);
    }
}

/// Registers `slab` for reading, within `budget`.
fn register(
    domain: &dyn ProtectionDomain,
    budget: &Arc<Budget>,
    access: Access,
    slab: &Slab,
) -> Result<(Arc<dyn MemoryRegion>, Reservation), VerbsError> {
    let bytes = slab.len() as u64;
    let registered = budget.reserve(bytes).and_then(|reservation| {
        let region = domain.register(Arc::clone(slab.memory()), access);
        Ok((region.map_err(|cause| cause.not_registered(bytes))?, reservation))
    });
    registered.inspect_err(|reason| {
        crate::throttled!(warn, bytes, %reason, "memory to send from can't be registered: its content is copied");
    })
}
