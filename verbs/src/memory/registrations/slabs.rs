//! What a connection has registered of the memory that it sends from but that is not its own.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use super::super::budget::{Budget, Reservation};
use super::super::pieces::Lease;
use super::super::pool::Slab;
use crate::{Access, LocalSegment, MemoryRegion, ProtectionDomain};

/// Slabs of pools [`for_sending`](super::Pool::for_sending), registered with one protection domain for local reading
/// alone: no key opens them to a peer.
#[derive(Debug)]
pub struct SlabRegistrations {
    domain: Arc<dyn ProtectionDomain>,
    budget: Arc<Budget>,
    /// By the slab's address, which no other slab has as long as the entry refers to it.
    slabs: HashMap<usize, SlabRegistration>,
}

#[derive(Debug)]
struct SlabRegistration {
    slab: Weak<Slab>,
    /// `None` if it was refused: it is not tried again.
    registered: Option<(Arc<dyn MemoryRegion>, Reservation)>,
}

impl SlabRegistrations {
    /// None yet, with `domain`; what is registered counts against `budget`.
    pub fn new(domain: Arc<dyn ProtectionDomain>, budget: Arc<Budget>) -> Self {
        Self { domain, budget, slabs: HashMap::new() }
    }

    /// Names `lease`, of a pool for sending, for a request that reads it; `None` if its slab can't be registered. Keep
    /// the lease until that request completed.
    pub fn segment(&mut self, lease: &Lease) -> Option<LocalSegment> {
        self.region(lease).map(|region| lease.segment_by(&*region))
    }

    /// The registration of the slab that `lease` lies in; `None` if it can't be registered.
    pub fn region(&mut self, lease: &Lease) -> Option<Arc<dyn MemoryRegion>> {
        let slab = lease.slab();
        let key = Arc::as_ptr(slab).addr();
        if !self.slabs.contains_key(&key) {
            self.prune();
            let entry = SlabRegistration { slab: Arc::downgrade(slab), registered: self.register(slab) };
            self.slabs.insert(key, entry);
        }
        let (region, _) = self.slabs.get(&key)?.registered.as_ref()?;
        Some(Arc::clone(region))
    }

    /// Lets go of slabs that their pool has given up, whose memory lives on for as long as they are registered.
    pub fn prune(&mut self) {
        self.slabs.retain(|_, entry| entry.slab.strong_count() > 0);
    }

    fn register(&self, slab: &Slab) -> Option<(Arc<dyn MemoryRegion>, Reservation)> {
        let bytes = slab.len();
        let refused = |reason: &dyn std::fmt::Display| {
            crate::throttled!(warn, bytes, %reason, "memory to send from can't be registered: its content is copied");
        };
        let reservation = self.budget.reserve(bytes as u64).inspect_err(|error| refused(error)).ok()?;
        let region = self.domain.register(Arc::clone(slab.memory()), Access::LOCAL_READ);
        Some((region.inspect_err(|error| refused(error)).ok()?, reservation))
    }
}
