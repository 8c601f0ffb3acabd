//! Registered regions of host memory.

use std::ops::Range;
use std::sync::Arc;

use super::domain::Domain;
use crate::{Access, HostMemory, Lkey, MemoryRegion, Rkey, VerbsError};

/// A registered region. Dropping it deregisters the memory.
#[derive(Debug)]
pub(super) struct Region {
    domain: Arc<Domain>,
    key: u32,
    access: Access,
    memory: Arc<HostMemory>,
    range: Range<usize>,
}

impl Region {
    /// Registers the bytes `range` of `memory`.
    pub(super) fn register(
        domain: &Arc<Domain>,
        memory: Arc<HostMemory>,
        range: Range<usize>,
        access: Access,
    ) -> Result<Self, VerbsError> {
        domain.device().check_process()?;
        memory.check_range(&range)?;
        let key = domain.insert_region(&memory, &range, access)?;
        Ok(Self { domain: Arc::clone(domain), key, access, memory, range })
    }
}

impl crate::sealed::Sealed for Region {}

impl MemoryRegion for Region {
    fn lkey(&self) -> Lkey {
        Lkey(self.key)
    }

    fn rkey(&self) -> Rkey {
        Rkey(self.key)
    }

    fn access(&self) -> Access {
        self.access
    }

    fn memory(&self) -> &Arc<HostMemory> {
        &self.memory
    }

    fn range(&self) -> Range<usize> {
        self.range.clone()
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // The table of regions is shared memory: a forked child would take the region from its parent.
        if !self.domain.device().is_forked() {
            self.domain.remove_region(self.key);
        }
    }
}
