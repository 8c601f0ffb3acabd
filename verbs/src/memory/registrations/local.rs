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
/// peers.
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

    /// Returns the registration of the mapping of `region`, for reading and writing.
    pub(crate) fn region(&mut self, region: &MemRegion) -> Result<Arc<dyn MemoryRegion>, VerbsError> {
        let key = Arc::as_ptr(region.mapped()).addr();
        if let Some(entry) = self.regions.get(&key) {
            return Ok(Arc::clone(&entry.region));
        }
        self.prune();
        let memory = Arc::clone(region.mapped().memory());
        let registered = self.domain.register(memory, Access::LOCAL_WRITE)?;
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
