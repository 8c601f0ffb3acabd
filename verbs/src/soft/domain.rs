//! Protection domains and the regions registered in them.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, Weak};

use super::device::Device;
use super::peers::clients::ServedQueuePair;
use super::shared::table::Entry;
use crate::panics::lock;
use crate::{Access, HostMemory, Lkey, MemoryRegion, Rkey, VerbsError};

/// A protection domain.
#[derive(Debug)]
pub(super) struct Domain {
    pub(super) device: Arc<Device>,
    id: u64,
    queue_pairs: Mutex<HashMap<u32, Weak<dyn ServedQueuePair>>>,
}

impl Domain {
    pub(super) fn new(device: &Arc<Device>) -> Self {
        Self { device: Arc::clone(device), id: device.object_id(), queue_pairs: Mutex::default() }
    }

    pub(super) fn id(&self) -> u64 {
        self.id
    }

    pub(super) fn add_queue_pair(&self, number: u32, pair: Weak<dyn ServedQueuePair>) {
        lock(&self.queue_pairs).insert(number, pair);
    }

    pub(super) fn remove_queue_pair(&self, number: u32) {
        lock(&self.queue_pairs).remove(&number);
    }

    /// Returns whether `length` bytes at `address` lie in the region of `key`, and the region grants
    /// `access`.
    #[inline]
    pub(super) fn find_local(&self, key: Lkey, address: u64, length: u64, access: Access) -> bool {
        self.device.table.find(key.0).is_some_and(|entry| {
            entry.domain == self.id
                && entry.access.contains(access)
                && entry.offset(address, length).is_some()
        })
    }

    /// Returns the number of the memory in which `length` bytes at `address` lie, and their offset in it, if
    /// the region of `key` has them, and the memory can be shared.
    pub(super) fn find_shared(&self, key: Lkey, address: u64, length: u64) -> Option<(u64, u64)> {
        let entry = self.device.table.find(key.0)?;
        let offset = entry.offset(address, length)?;
        (entry.domain == self.id && entry.segment != 0).then_some((entry.segment, offset))
    }

    /// Enters a region of `memory` into the device's table. Returns the key of the region.
    pub(super) fn insert_region(
        &self,
        memory: &Arc<HostMemory>,
        range: &Range<usize>,
        access: Access,
    ) -> Result<u32, VerbsError> {
        let entry = Entry {
            access,
            address: memory.address() + range.start as u64,
            length: range.len() as u64,
            segment: self.device.note_memory(memory),
            domain: self.id,
            start: range.start as u64,
        };
        self.device.insert_region(&entry)
    }

    /// Takes a region out of the device's table. Afterwards no thread of this process uses the region, and a
    /// peer that still reads it finds that its key is gone and discards the bytes.
    pub(super) fn remove_region(&self, key: u32) {
        self.device.table.remove(key);
        let queue_pairs: Vec<_> = lock(&self.queue_pairs).values().filter_map(Weak::upgrade).collect();
        queue_pairs.iter().for_each(|pair| pair.wait_for_own_threads());
        self.device.release_key(key);
    }
}

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
        domain.device.check_process()?;
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
        if !self.domain.device.is_forked() {
            self.domain.remove_region(self.key);
        }
    }
}
