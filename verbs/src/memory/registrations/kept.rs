//! Registrations that are kept from one grant to the next, for the software device.
//!
//! A peer of the software device maps a segment of shared memory at its first use. Of the segments whose keys are gone, the
//! peer keeps only some mapped. With a grant for every transfer, the peer could map the segment and fault in every page
//! each time. For this reason one region over the memory is kept as long as the memory lives. No peer gets the key of that
//! region.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use super::super::pieces::Lease;
use super::super::pool::slab::Slab;
use super::super::region::{Mapped, SharedRegion};
use crate::{Access, HostMemory, MemoryRegion, ProtectionDomain};

/// The kept registrations of one protection domain.
#[derive(Debug)]
pub struct KeptRegistrations {
    domain: Arc<dyn ProtectionDomain>,
    mapped: Kept<Mapped>,
    slabs: Kept<Slab>,
}

/// Regions by the address of their owner. While the entry holds a weak reference to the owner, no other owner gets that
/// address.
type Kept<O> = HashMap<usize, (Weak<O>, Arc<dyn MemoryRegion>)>;

impl KeptRegistrations {
    /// Makes an empty set of registrations with `domain`.
    pub fn new(domain: Arc<dyn ProtectionDomain>) -> Self {
        Self { domain, mapped: Kept::new(), slabs: Kept::new() }
    }

    /// Keeps the mapping of `shared` registered.
    pub fn region(&mut self, shared: &SharedRegion) {
        let owner = shared.region().mapped();
        keep(&*self.domain, &mut self.mapped, owner, owner.memory(), Access::LOCAL_WRITE);
    }

    /// Keeps the slab of `lease` registered.
    pub fn lease(&mut self, lease: &Lease) {
        let owner = lease.slab();
        keep(&*self.domain, &mut self.slabs, owner, owner.memory(), Access::REMOTE_READ);
    }
}

/// Registers `memory` for as long as `owner` lives. Ignores a failure, because the peer then maps the memory for every
/// transfer, which only costs time.
fn keep<O>(
    domain: &dyn ProtectionDomain,
    kept: &mut Kept<O>,
    owner: &Arc<O>,
    memory: &Arc<HostMemory>,
    access: Access,
) {
    let key = Arc::as_ptr(owner).addr();
    if kept.contains_key(&key) {
        return;
    }
    kept.retain(|_, (owner, _)| owner.strong_count() > 0);
    if let Ok(region) = domain.register(Arc::clone(memory), access) {
        kept.insert(key, (Arc::downgrade(owner), region));
    }
}
