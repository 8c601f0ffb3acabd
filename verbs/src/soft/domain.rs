//! Protection domains and the regions registered in them.

use std::collections::HashMap;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::device::Device;
use super::queue_pair::core::Core;
use super::shared::table::Entry;
use crate::sync::lock;
use crate::{Access, HostMemory, Lkey, VerbsError};

/// Longest wait for a peer that is in the middle of an operation on memory to be taken back. Sections of a well-behaved
/// peer last microseconds.
pub(super) const QUIESCENCE: Duration = Duration::from_secs(1);

/// A protection domain.
#[derive(Debug)]
pub(super) struct Domain {
    device: Arc<Device>,
    id: u64,
    /// Shared segments that are registered here, by number. Peers may map them.
    segments: Mutex<HashMap<u64, Registered>>,
    queue_pairs: Mutex<HashMap<u32, Arc<Core>>>,
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

    pub(super) fn add_queue_pair(&self, core: &Arc<Core>) {
        lock(&self.queue_pairs).insert(core.number(), Arc::clone(core));
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

    /// Takes a region out of the device's table, and waits until no peer can be using the region.
    pub(super) fn remove_region(&self, key: u32, segment: u64, memory: &Arc<HostMemory>) {
        self.device.table().remove(key);
        if !self.quiesce() {
            crate::throttled!(
                warn,
                bytes = memory.len(),
                "a peer stopped while using this memory, which is therefore never freed"
            );
            #[expect(
                clippy::disallowed_methods,
                reason = "the peer may still write there: it must never be freed"
            )]
            std::mem::forget(Arc::clone(memory));
        }
        self.device.release_key(key);
        self.release_segment(segment, memory);
    }

    /// Waits until every operation that may have seen a removed key as valid is over, on our queue pairs and on those of
    /// their peers. Returns false if a peer stopped in the middle of an operation.
    fn quiesce(&self) -> bool {
        let queue_pairs: Vec<_> = lock(&self.queue_pairs).values().cloned().collect();
        let deadline = Instant::now() + QUIESCENCE;
        let mut quiet = true;
        for core in queue_pairs {
            core.wait_for_own_section();
            quiet &= core.wait_for_peer_section(deadline);
        }
        quiet
    }
}
