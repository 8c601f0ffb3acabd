//! Protection domains, the regions registered in them, and windows.

use std::any::Any;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock, Weak};

use super::device::Device;
use super::peers::clients::ServedQueuePair;
use super::shared::table::Entry;
use crate::panics::lock;
use crate::region::check_window;
use crate::{Access, HostMemory, Lkey, MemoryRegion, MemoryWindow, Rkey, VerbsError};

/// A protection domain.
#[derive(Debug)]
pub(super) struct Domain {
    pub(super) device: Arc<Device>,
    pub(super) id: u64,
    queue_pairs: Mutex<HashMap<u32, Weak<dyn ServedQueuePair>>>,
}

impl Domain {
    pub(super) fn new(device: &Arc<Device>) -> Self {
        Self { device: Arc::clone(device), id: device.object_id(), queue_pairs: Mutex::default() }
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
        self.find_for_peer(0, key.0, address, length, access)
    }

    /// Returns whether `length` bytes at `address` lie in the region or window of `key`, which grants `access`
    /// to the peer of the queue pair `number`.
    #[inline]
    pub(super) fn find_for_peer(
        &self,
        number: u32,
        key: u32,
        address: u64,
        length: u64,
        access: Access,
    ) -> bool {
        self.device.table.find(key).is_some_and(|entry| {
            entry.domain == self.id
                && entry.serves(number)
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

    /// Enters a region of `memory` into the device's table, or a window of the queue pair with this number. A
    /// region has number 0. Returns the key.
    pub(super) fn insert(
        &self,
        memory: &Arc<HostMemory>,
        range: &Range<usize>,
        access: Access,
        queue_pair: u32,
    ) -> Result<u32, VerbsError> {
        self.device.check_process()?;
        let entry = Entry {
            access,
            address: memory.address() + range.start as u64,
            length: range.len() as u64,
            segment: self.device.note_memory(memory),
            domain: self.id,
            start: range.start as u64,
            queue_pair: queue_pair.into(),
        };
        self.device.insert_region(&entry)
    }

    /// Takes a region out of the device's table, or the window of the queue pair with this number. Afterwards no
    /// thread of this process uses it, and a peer that still reads it finds that its key is gone and discards the
    /// bytes. A thread uses a window for its own queue pair only.
    pub(super) fn remove_region(&self, key: u32, queue_pair: u32) {
        self.device.table.remove(key);
        let all = lock(&self.queue_pairs);
        let users = all.iter().filter(|(number, _)| queue_pair == 0 || **number == queue_pair);
        let users: Vec<_> = users.filter_map(|(_, pair)| pair.upgrade()).collect();
        drop(all);
        users.iter().for_each(|pair| pair.wait_for_own_threads());
        self.device.release_key(key);
    }
}

/// An entry of the device's table. Dropping it takes the right away.
#[derive(Debug)]
struct Key {
    key: u32,
    /// The queue pair of a window. 0 for a region.
    queue_pair: u32,
    domain: Arc<Domain>,
}

impl Drop for Key {
    fn drop(&mut self) {
        // The table of regions is shared memory: a forked child would take the region from its parent.
        if !self.domain.device.is_forked() {
            self.domain.remove_region(self.key, self.queue_pair);
        }
    }
}

/// A registered region. Dropping it deregisters the memory.
#[derive(Debug)]
pub(super) struct Region {
    /// Dropped before the memory.
    key: Key,
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
        memory.check_range(&range)?;
        let key = domain.insert(&memory, &range, access, 0)?;
        let key = Key { key, queue_pair: 0, domain: Arc::clone(domain) };
        Ok(Self { key, access, memory, range })
    }
}

impl crate::sealed::Sealed for Region {}

impl MemoryRegion for Region {
    fn lkey(&self) -> Lkey {
        Lkey(self.key.key)
    }

    fn rkey(&self) -> Rkey {
        Rkey(self.key.key)
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

/// A right of the peer of one queue pair to a part of a region.
#[derive(Debug)]
pub(super) struct Window {
    /// Dropped before the memory.
    key: Key,
    _region: Arc<dyn MemoryRegion>,
    owner: OnceLock<Box<dyn Any + Send + Sync>>,
}

impl Window {
    /// Opens a window for the peer of the queue pair `number`.
    pub(super) fn open(
        domain: &Arc<Domain>,
        number: u32,
        region: &Arc<dyn MemoryRegion>,
        range: &Range<usize>,
        access: Access,
    ) -> Result<Self, VerbsError> {
        let any: &dyn Any = &**region;
        let ours = any.downcast_ref().is_some_and(|it: &Region| Arc::ptr_eq(&it.key.domain, domain));
        if !ours {
            return Err(VerbsError::foreign("region"));
        }
        let access = check_window(&**region, range, access)?;
        let key = domain.insert(region.memory(), range, access, number)?;
        let key = Key { key, queue_pair: number, domain: Arc::clone(domain) };
        Ok(Self { key, _region: Arc::clone(region), owner: OnceLock::new() })
    }
}

impl crate::sealed::Sealed for Window {}

impl MemoryWindow for Window {
    fn rkey(&self) -> Rkey {
        Rkey(self.key.key)
    }

    fn keep(&self, owner: Box<dyn Any + Send + Sync>) {
        let _ = self.owner.set(owner);
    }
}
