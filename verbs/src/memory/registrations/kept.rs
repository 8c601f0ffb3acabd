//! Memory that stays known to a software device between one grant and the next.
//!
//! A peer of the software device maps a segment when it first uses it, and lets go of segments without a key. A grant for
//! every transfer would have it map, and fault every page in, each time. So for as long as the memory lives one region over
//! it is kept, whose key nobody is told.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use super::super::pieces::Lease;
use super::super::pool::Slab;
use super::super::region::{Mapped, SharedRegion};
use crate::{Access, HostMemory, MemoryRegion, ProtectionDomain};

/// The regions that are kept, of one protection domain.
#[derive(Debug)]
pub struct KeptRegistrations {
    domain: Arc<dyn ProtectionDomain>,
    mapped: Kept<Mapped>,
    slabs: Kept<Slab>,
}

/// By the owner's address, which no other has as long as the entry refers to it.
type Kept<O> = HashMap<usize, (Weak<O>, Arc<dyn MemoryRegion>)>;

impl KeptRegistrations {
    /// None yet, with `domain`.
    pub fn new(domain: Arc<dyn ProtectionDomain>) -> Self {
        Self { domain, mapped: Kept::new(), slabs: Kept::new() }
    }

    /// Keeps the memory of `shared` known.
    pub fn region(&mut self, shared: &SharedRegion) {
        let owner = shared.region().mapped();
        keep(&*self.domain, &mut self.mapped, owner, owner.memory(), Access::LOCAL_WRITE);
    }

    /// Keeps the memory of `lease` known.
    pub fn lease(&mut self, lease: &Lease) {
        let owner = lease.slab();
        keep(&*self.domain, &mut self.slabs, owner, owner.memory(), Access::REMOTE_READ);
    }
}

/// What can't be registered is mapped anew each time, which costs time and nothing else.
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
