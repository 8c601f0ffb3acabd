//! Local memory that the device of a protection domain may access.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Weak};

use super::super::budget::Budget;
use super::super::error::PoolError;
use super::super::pieces::Lease;
use super::super::region::{Mapped, MemRegion};
use super::slabs::SlabRegistrations;
use crate::{Access, LocalSegment, MemoryRegion, ProtectionDomain, VerbsError};

/// The regions and buffers that requests of one protection domain use. Each of them is registered once, without rights for
/// peers. Where a device [opens sinks](ProtectionDomain::opens_sinks) to peers, a region is registered for reading alone, and
/// each READ gets a registration of its own.
#[derive(Debug)]
pub struct LocalRegistrations {
    domain: Arc<dyn ProtectionDomain>,
    frozen: SlabRegistrations,
    /// By the address of the mapping. While the entry holds a weak reference to the mapping, no other mapping gets that
    /// address.
    regions: HashMap<usize, MappingRegistration>,
}

#[derive(Debug)]
struct MappingRegistration {
    mapped: Weak<Mapped>,
    region: Arc<dyn MemoryRegion>,
}

impl LocalRegistrations {
    /// Makes an empty set of registrations with `domain`. Slabs of buffers will count against `budget`.
    pub fn new(domain: Arc<dyn ProtectionDomain>, budget: Arc<Budget>) -> Self {
        let frozen = SlabRegistrations::new(Arc::clone(&domain), budget);
        Self { domain, frozen, regions: HashMap::new() }
    }

    /// Returns the registration of the slab that `lease` lies in, for reading.
    pub(crate) fn lease(&mut self, lease: &Lease) -> Result<Arc<dyn MemoryRegion>, Arc<PoolError>> {
        self.frozen.region(lease)
    }

    /// Returns a registration for a READ into the bytes `range` of `region`. Drop the registration before the region is used
    /// for something else.
    pub(crate) fn sink(
        &mut self,
        region: &MemRegion,
        range: Range<usize>,
    ) -> Result<Arc<dyn MemoryRegion>, VerbsError> {
        if !self.domain.opens_sinks() {
            return self.region(region);
        }
        let start = region.range().start;
        let memory = Arc::clone(region.mapped().memory());
        self.domain.register_range(memory, start + range.start..start + range.end, Access::LOCAL_WRITE)
    }

    /// Returns the registration of the mapping of `region`, for reading, and for writing if the device keeps sinks closed.
    pub(crate) fn region(&mut self, region: &MemRegion) -> Result<Arc<dyn MemoryRegion>, VerbsError> {
        let key = Arc::as_ptr(region.mapped()).addr();
        if let Some(entry) = self.regions.get(&key) {
            return Ok(Arc::clone(&entry.region));
        }
        self.prune();
        let memory = Arc::clone(region.mapped().memory());
        let access = if self.domain.opens_sinks() { Access::LOCAL_READ } else { Access::LOCAL_WRITE };
        let registered = self.domain.register(memory, access)?;
        let entry =
            MappingRegistration { mapped: Arc::downgrade(region.mapped()), region: Arc::clone(&registered) };
        self.regions.insert(key, entry);
        Ok(registered)
    }

    /// Drops the registrations of memory that has no other owner.
    pub(crate) fn prune(&mut self) {
        self.regions.retain(|_, entry| entry.mapped.strong_count() > 0);
        self.frozen.prune();
    }
}

/// Names `range` of `region`, in bytes from its start, by the registration of its mapping.
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
