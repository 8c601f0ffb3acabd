//! Protection domains and the regions registered in them.

use std::collections::HashMap;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, Weak};

use super::device::Device;
use super::queue_pair::Pair;
use super::shared::table::Entry;
use crate::sync::lock;
use crate::{Access, HostMemory, Lkey, VerbsError};

/// A protection domain.
#[derive(Debug)]
pub(super) struct Domain {
    device: Arc<Device>,
    id: u64,
    /// Shared segments that are registered here, by number. Peers may map them.
    segments: Mutex<HashMap<u64, Registered>>,
    queue_pairs: Mutex<HashMap<u32, Weak<Pair>>>,
}

#[derive(Debug)]
struct Registered {
    memory: Arc<HostMemory>,
    regions: usize,
}

impl Domain {
    pub(super) fn new(device: &Arc<Device>) -> Self {
        Self {
            device: Arc::clone(device),
            id: device.object_id(),
            segments: Mutex::default(),
            queue_pairs: Mutex::default(),
        }
    }

    pub(super) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub(super) fn id(&self) -> u64 {
        self.id
    }

    pub(super) fn add_queue_pair(&self, pair: &Arc<Pair>) {
        lock(&self.queue_pairs).insert(pair.number(), Arc::downgrade(pair));
    }

    pub(super) fn remove_queue_pair(&self, number: u32) {
        lock(&self.queue_pairs).remove(&number);
    }

    /// Calls `then` with the descriptor and the length of segment `id`, if the segment is registered in this domain.
    pub(super) fn with_segment<T>(&self, id: u64, then: impl FnOnce(BorrowedFd<'_>, u64) -> T) -> Option<T> {
        let memory = Arc::clone(&lock(&self.segments).get(&id)?.memory);
        memory.shared_fd().map(|fd| then(fd, memory.len() as u64))
    }

    /// Returns whether `length` bytes at `address` lie in the region of `key`, and the region grants `access`.
    pub(super) fn find_local(&self, key: Lkey, address: u64, length: u64, access: Access) -> bool {
        self.device.table().find(key.0).is_some_and(|entry| {
            entry.domain == self.id
                && entry.access.contains(access)
                && entry.offset(address, length).is_some()
        })
    }

    /// Counts one more region of `memory` and returns the number of its segment, which peers may map; 0 for memory that is
    /// not shared.
    fn retain_segment(&self, memory: &Arc<HostMemory>) -> u64 {
        let id = self.device.retain_segment(memory);
        if id != 0 {
            lock(&self.segments)
                .entry(id)
                .or_insert_with(|| Registered { memory: Arc::clone(memory), regions: 0 })
                .regions += 1;
        }
        id
    }

    /// Counts one region less of segment `id`. Peers can't map the segment any more when its last region is gone.
    fn release_segment(&self, id: u64, memory: &Arc<HostMemory>) {
        if id == 0 {
            return;
        }
        let mut segments = lock(&self.segments);
        if let Some(registered) = segments.get_mut(&id) {
            registered.regions -= 1;
            if registered.regions == 0 {
                segments.remove(&id);
            }
        }
        drop(segments);
        self.device.release_segment(memory);
    }

    /// Enters a region of `memory` into the device's table. Returns the key of the region and the number of its segment.
    pub(super) fn insert_region(
        &self,
        memory: &Arc<HostMemory>,
        range: &Range<usize>,
        access: Access,
    ) -> Result<(u32, u64), VerbsError> {
        // Peers never access memory that has only the right of local reading. Such memory is no segment, so peers can't ask
        // for it. Memory with the right of local writing is a segment, because peers write to receive buffers.
        let segment = if access == Access::LOCAL_READ { 0 } else { self.retain_segment(memory) };
        let entry = Entry {
            access,
            address: memory.address() + range.start as u64,
            length: range.len() as u64,
            segment,
            domain: self.id,
            start: range.start as u64,
        };
        let key = self.device.insert_region(&entry).inspect_err(|_| self.release_segment(segment, memory))?;
        Ok((key, segment))
    }

    /// Takes a region out of the device's table. Afterwards no thread of this process uses the region, and a peer that still
    /// reads it finds that its key is gone and discards the bytes.
    pub(super) fn remove_region(&self, key: u32, segment: u64, memory: &Arc<HostMemory>) {
        self.device.table().remove(key);
        let queue_pairs: Vec<_> = lock(&self.queue_pairs).values().filter_map(Weak::upgrade).collect();
        queue_pairs.iter().for_each(|pair| pair.wait_for_own_threads());
        self.device.release_key(key);
        self.release_segment(segment, memory);
    }
}
