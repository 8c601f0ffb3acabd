//! Tests of the pool, with a protection domain that assigns keys and counts regions.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod blocks;
mod buffers;
mod landings;
mod limits;
mod model;
mod regions;
mod sending;
mod sinks;
mod threads;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, Weak};

use super::{Budget, Pool, PoolSettings};
use crate::{
    Access, CompletionQueue, HostMemory, Lkey, MemoryRegion, ProtectionDomain, QueuePair, QueuePairCapacity,
    Rkey, VerbsError,
};

/// A protection domain that registers any memory, unless `refuse` is set.
#[derive(Debug, Default)]
pub(super) struct Domain {
    next: AtomicU32,
    live: Arc<Mutex<BTreeMap<u32, Range<usize>>>>,
    /// What was registered.
    memories: Mutex<Vec<Weak<HostMemory>>>,
    /// The rights of the region that was registered last.
    last_access: AtomicU8,
    refuse: bool,
    opens_sinks: bool,
}

impl Domain {
    /// Returns the number of registered regions.
    pub(super) fn live(&self) -> usize {
        self.live.lock().unwrap().len()
    }

    /// Returns the addresses of the registered regions.
    pub(super) fn regions(&self) -> Vec<Range<usize>> {
        self.live.lock().unwrap().values().cloned().collect()
    }

    /// Returns the number of registrations that were made.
    pub(super) fn made(&self) -> u32 {
        self.next.load(Ordering::SeqCst)
    }

    /// Fills registered memory at these addresses, as a peer or the device does.
    pub(super) fn write(&self, range: Range<usize>, content: u8) {
        let memories = self.memories.lock().unwrap();
        let is_there = |memory: &Arc<HostMemory>| {
            let start = memory.address() as usize;
            (start..start + memory.len()).contains(&range.start)
        };
        let memory = memories.iter().filter_map(Weak::upgrade).find(is_there).unwrap();
        let at = range.start - memory.address() as usize;
        memory.copy_in(at, &vec![content; range.len()]).unwrap();
    }

    /// Returns the rights of the region that was registered last.
    pub(super) fn last_access(&self) -> Access {
        Access::from_bits_truncate(self.last_access.load(Ordering::SeqCst))
    }
}

impl crate::sealed::Sealed for Domain {}

impl ProtectionDomain for Domain {
    fn register_range(
        &self,
        memory: Arc<HostMemory>,
        range: Range<usize>,
        access: Access,
    ) -> Result<Arc<dyn MemoryRegion>, VerbsError> {
        if self.refuse {
            return Err(VerbsError::limit("memory regions", 1, 0));
        }
        self.last_access.store(access.bits(), Ordering::SeqCst);
        let key = self.next.fetch_add(1, Ordering::SeqCst);
        let start = memory.address() as usize;
        self.memories.lock().unwrap().push(Arc::downgrade(&memory));
        self.live.lock().unwrap().insert(key, start + range.start..start + range.end);
        Ok(Arc::new(Region { key, access, memory, range, live: Arc::clone(&self.live) }))
    }

    fn opens_sinks(&self) -> bool {
        self.opens_sinks
    }

    fn create_queue_pair(
        &self,
        _: &Arc<dyn CompletionQueue>,
        _: &Arc<dyn CompletionQueue>,
        _: &QueuePairCapacity,
    ) -> Result<Arc<dyn QueuePair>, VerbsError> {
        Err(VerbsError::foreign("queue pair"))
    }
}

/// Region number `key`: lkey 1000 + key, rkey 2000 + key.
#[derive(Debug)]
struct Region {
    key: u32,
    access: Access,
    memory: Arc<HostMemory>,
    range: Range<usize>,
    live: Arc<Mutex<BTreeMap<u32, Range<usize>>>>,
}

impl crate::sealed::Sealed for Region {}

impl MemoryRegion for Region {
    fn lkey(&self) -> Lkey {
        Lkey(1000 + self.key)
    }

    fn rkey(&self) -> Rkey {
        Rkey(2000 + self.key)
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
        self.live.lock().unwrap().remove(&self.key);
    }
}

/// Returns settings with slabs of 64 KiB. Extents up to 32 KiB share a slab, and longer ones get their own.
pub(super) fn small() -> PoolSettings {
    PoolSettings {
        slab_size: 64 << 10,
        send_quota: 1 << 20,
        receive_quota: 1 << 20,
        ..PoolSettings::default()
    }
}

/// Makes a pool with its own domain, and a budget of `budget` bytes.
pub(super) fn pool(settings: PoolSettings, budget: u64) -> (Pool, Arc<Domain>, Arc<Budget>) {
    let (domain, budget) = (Arc::new(Domain::default()), Budget::new(budget));
    (
        Pool::new(Arc::clone(&domain) as Arc<dyn ProtectionDomain>, settings, Arc::clone(&budget)),
        domain,
        budget,
    )
}
