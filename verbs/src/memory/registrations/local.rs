//! Which local memory a protection domain's device may use.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Weak};

use super::super::budget::Budget;
use super::super::pieces::Lease;
use super::super::region::{Mapped, MemRegion};
use super::slabs::SlabRegistrations;
use crate::{Access, LocalSegment, MemoryRegion, ProtectionDomain, VerbsError};

/// Regions and buffers that requests of one protection domain name, registered once each, for no peer.
#[derive(Debug)]
pub struct LocalRegistrations {
    domain: Arc<dyn ProtectionDomain>,
    frozen: SlabRegistrations,
    /// By the mapping's address, which no other has as long as the entry refers to it.
    regions: HashMap<usize, MappingRegistration>,
}

#[derive(Debug)]
struct MappingRegistration {
    mapped: Weak<Mapped>,
    region: Arc<dyn MemoryRegion>,
}

impl LocalRegistrations {
    /// None yet, with `domain`.
    pub fn new(domain: Arc<dyn ProtectionDomain>, budget: Arc<Budget>) -> Self {
        let frozen = SlabRegistrations::new(Arc::clone(&domain), budget);
        Self { domain, frozen, regions: HashMap::new() }
    }

    /// The registration of the memory that `lease` lies in, for reading.
    pub(crate) fn lease(&mut self, lease: &Lease) -> Result<Arc<dyn MemoryRegion>, VerbsError> {
        let unusable = || VerbsError::Unusable("memory to send from can't be registered".into());
        self.frozen.region(lease).ok_or_else(unusable)
    }

    /// The registration of `region`'s mapping, for reading and writing.
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

    /// Lets go of memory that nobody else has any more.
    pub(crate) fn prune(&mut self) {
        self.regions.retain(|_, entry| entry.mapped.strong_count() > 0);
        self.frozen.prune();
    }
}

/// Names `range` of `region`, in bytes from its start, by its registration.
///
/// # Safety
/// `region` must be out of everybody's hands until the request over the segment is over.
pub(crate) unsafe fn segment_of(
    region: &MemRegion,
    registered: &dyn MemoryRegion,
    range: Range<usize>,
) -> LocalSegment {
    let start = region.range().start;
    debug_assert!(range.end <= region.len());
    // SAFETY: nobody has a reference to the region, as the caller promises.
    unsafe { LocalSegment::new(registered, start + range.start..start + range.end) }
}
