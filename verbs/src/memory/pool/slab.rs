//! A slab: memory that is mapped and registered as a whole.

use std::sync::Arc;

use super::super::budget::Reservation;
use super::super::error::PoolError;
use super::super::settings::PoolSettings;
use crate::{Access, HostMemory, MemoryRegion, ProtectionDomain, VerbsError};

/// Bytes of a huge page.
const HUGE_PAGE: usize = 2 << 20;

/// Shared memory that is registered as a whole. The order of the fields is the order of their drop: first the registration,
/// then the memory. The memory holds the reservation of the budget, which peers that map the memory may hold longer.
#[derive(Debug)]
pub(crate) struct Slab {
    region: Arc<dyn MemoryRegion>,
    memory: Arc<HostMemory>,
}

impl Slab {
    /// Maps and registers the bytes of `reservation`. Each step is a system call.
    pub(crate) fn new(
        domain: &dyn ProtectionDomain,
        access: Access,
        settings: &PoolSettings,
        reservation: Reservation,
    ) -> Result<Self, PoolError> {
        let bytes = reservation.bytes();
        Self::register(domain, access, settings, reservation)
            .map_err(|cause| PoolError::Verbs { bytes, cause })
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
        memory.set_charge(Arc::new(reservation));
        let memory = Arc::new(memory);
        let region = domain.register(Arc::clone(&memory), access)?;
        Ok(Self { region, memory })
    }

    /// Returns the region over all of the slab.
    pub(crate) fn region(&self) -> &dyn MemoryRegion {
        &*self.region
    }

    /// Returns the memory.
    pub(crate) fn memory(&self) -> &Arc<HostMemory> {
        &self.memory
    }

    /// Returns the length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.memory.len()
    }
}

/// Asks the kernel for huge pages. This is a hint: a kernel that ignores it uses small pages.
pub(crate) fn advise_huge_pages(memory: &HostMemory) {
    // SAFETY:
    // - The range is one live mapping of this process (`HostMemory`).
    // - This advice changes neither the content nor the validity of a page.
    let _ = unsafe {
        rustix::mm::madvise(memory.as_ptr().as_ptr().cast(), memory.len(), rustix::mm::Advice::LinuxHugepage)
    };
}
