//! Protection domains and the regions registered in them.

use std::collections::HashMap;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::completion_queue::Queue;
use super::device::Device;
use super::lock;
use super::queue_pair::{self, Inner};
use super::table::Entry;
use crate::{
    Access, CompletionQueue, HostMemory, Lkey, MemoryRegion, ProtectionDomain, QueuePair, QueuePairCapacity,
    Rkey, VerbsError,
};

/// Longest wait for a peer in the middle of an operation on memory that is taken back; its sections last microseconds.
pub(super) const QUIESCENCE: Duration = Duration::from_secs(1);

/// A protection domain.
#[derive(Debug)]
pub(super) struct Domain {
    device: Arc<Device>,
    id: u64,
    /// Shared segments registered here, by number: what peers may map.
    segments: Mutex<HashMap<u64, Registered>>,
    queue_pairs: Mutex<HashMap<u32, Arc<Inner>>>,
}

#[derive(Debug)]
struct Registered {
    memory: Arc<HostMemory>,
    regions: usize,
}

impl Domain {
    pub(super) fn alloc(device: &Arc<Device>) -> Arc<Handle> {
        let domain = Self {
            device: Arc::clone(device),
            id: device.object_id(),
            segments: Mutex::default(),
            queue_pairs: Mutex::default(),
        };
        Arc::new(Handle(Arc::new(domain)))
    }

    pub(super) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub(super) fn id(&self) -> u64 {
        self.id
    }

    pub(super) fn add_queue_pair(&self, inner: &Arc<Inner>) {
        lock(&self.queue_pairs).insert(inner.number(), Arc::clone(inner));
    }

    pub(super) fn remove_queue_pair(&self, number: u32) {
        lock(&self.queue_pairs).remove(&number);
    }

    /// Lends the descriptor of segment `id`, if it is registered here, with its length.
    pub(super) fn with_segment<T>(&self, id: u64, then: impl FnOnce(BorrowedFd<'_>, u64) -> T) -> Option<T> {
        let memory = Arc::clone(&lock(&self.segments).get(&id)?.memory);
        memory.shared_fd().map(|fd| then(fd, memory.len() as u64))
    }

    /// Looks up a piece of local memory, as [`RegionTable::find`](super::table::RegionTable::find) does.
    pub(super) fn find_local(&self, key: Lkey, address: u64, length: u64, access: Access) -> bool {
        self.device.table().find(key.0).is_some_and(|entry| {
            entry.domain == self.id
                && entry.access.contains(access)
                && entry.offset(address, length).is_some()
        })
    }

    /// Takes one region off segment `id`.
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

    /// Waits until every operation that may have seen a key valid, of our queue pairs or of their peers, is over. False
    /// if a peer stopped in the middle of one.
    fn quiesce(&self) -> bool {
        let queue_pairs: Vec<_> = lock(&self.queue_pairs).values().cloned().collect();
        let deadline = Instant::now() + QUIESCENCE;
        let mut quiet = true;
        for inner in queue_pairs {
            inner.wait_for_own_section();
            quiet &= inner.wait_for_peer_section(deadline);
        }
        quiet
    }
}

/// The user's reference to a domain.
#[derive(Debug)]
pub(super) struct Handle(Arc<Domain>);

impl ProtectionDomain for Handle {
    fn register_range(
        &self,
        memory: Arc<HostMemory>,
        range: Range<usize>,
        access: Access,
    ) -> Result<Arc<dyn MemoryRegion>, VerbsError> {
        memory.check_range(&range)?;
        let domain = &self.0;
        // What no peer has a right to is no segment: peers could not even ask for it.
        let local = access == Access::LOCAL_READ;
        let segment = if local { 0 } else { domain.device.retain_segment(&memory) };
        let entry = Entry {
            access,
            address: memory.address() + range.start as u64,
            length: range.len() as u64,
            segment,
            domain: domain.id,
            start: range.start as u64,
        };
        if segment != 0 {
            lock(&domain.segments)
                .entry(segment)
                .or_insert_with(|| Registered { memory: Arc::clone(&memory), regions: 0 })
                .regions += 1;
        }
        match domain.device.insert_region(&entry) {
            Ok(key) => {
                Ok(Arc::new(Region { domain: Arc::clone(domain), key, access, memory, range, segment }))
            }
            Err(error) => {
                domain.release_segment(segment, &memory);
                Err(error)
            }
        }
    }

    fn create_queue_pair(
        &self,
        send_queue: &Arc<dyn CompletionQueue>,
        receive_queue: &Arc<dyn CompletionQueue>,
        capacity: &QueuePairCapacity,
    ) -> Result<Arc<dyn QueuePair>, VerbsError> {
        let send_queue = Queue::of(send_queue, self.0.device())?;
        let receive_queue = Queue::of(receive_queue, self.0.device())?;
        queue_pair::create(&self.0, send_queue, receive_queue, capacity)
    }
}

/// A registered region.
#[derive(Debug)]
struct Region {
    domain: Arc<Domain>,
    key: u32,
    access: Access,
    memory: Arc<HostMemory>,
    range: Range<usize>,
    segment: u64,
}

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
        let device = &self.domain.device;
        device.table().remove(self.key);
        if !self.domain.quiesce() {
            // Whatever the peer still does to this memory, nobody else may have it.
            crate::throttled!(
                warn,
                bytes = self.memory.len(),
                "a peer stopped while using this memory, which is therefore never freed"
            );
            #[expect(
                clippy::disallowed_methods,
                reason = "the peer may still write there: it must never be freed"
            )]
            std::mem::forget(Arc::clone(&self.memory));
        }
        device.release_key(self.key);
        self.domain.release_segment(self.segment, &self.memory);
    }
}
