//! A slab: memory that is mapped and registered as one.

use std::sync::Arc;

use super::super::budget::Reservation;
use super::super::error::PoolError;
use super::super::settings::PoolSettings;
use crate::{Access, HostMemory, MemoryRegion, ProtectionDomain, VerbsError};

const HUGE_PAGE: usize = 2 << 20;

/// Shared memory, registered whole. Fields are dropped in this order: the device lets go before the memory does, and
/// the budget comes back last.
#[derive(Debug)]
pub(crate) struct Slab {
    region: Arc<dyn MemoryRegion>,
    memory: Arc<HostMemory>,
    reservation: Reservation,
}

impl Slab {
    /// Maps and registers as many bytes as `reservation` has; a system call per step.
    pub(crate) fn new(
        domain: &dyn ProtectionDomain,
        access: Access,
        settings: &PoolSettings,
        reservation: Reservation,
    ) -> Result<Self, PoolError> {
        let bytes = reservation.bytes();
        Self::register(domain, access, settings, reservation)
            .map_err(|source| PoolError::Verbs { bytes, source })
    }

    fn register(
        domain: &dyn ProtectionDomain,
        access: Access,
        settings: &PoolSettings,
        reservation: Reservation,
    ) -> Result<Self, VerbsError> {
        let length = reservation.bytes() as usize;
        let alignment = if length >= HUGE_PAGE { HUGE_PAGE } else { rustix::param::page_size() };
        let memory = HostMemory::shared(length, alignment)
            .map_err(|error| VerbsError::os(format!("mapping {length} bytes of shared memory"), error))?;
        if settings.huge_pages && length >= HUGE_PAGE {
            advise_huge_pages(&memory);
        }
        let memory = Arc::new(memory);
        let region = domain.register(Arc::clone(&memory), access)?;
        Ok(Self { region, memory, reservation })
    }

    /// The region over all of it.
    pub(crate) fn region(&self) -> &dyn MemoryRegion {
        &*self.region
    }

    /// The memory itself.
    pub(crate) fn memory(&self) -> &Arc<HostMemory> {
        &self.memory
    }

    /// Length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.reservation.bytes() as usize
    }
}

/// Only a hint: a kernel that does not take it serves small pages.
pub(crate) fn advise_huge_pages(memory: &HostMemory) {
    // SAFETY:
    // - the range is one live mapping of our own, by `HostMemory`, and
    // - this advice changes neither content nor validity of a page.
    let _ = unsafe {
        rustix::mm::madvise(memory.as_ptr().as_ptr().cast(), memory.len(), rustix::mm::Advice::LinuxHugepage)
    };
}
