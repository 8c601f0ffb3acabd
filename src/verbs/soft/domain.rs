//! Protection domains: the table that peers look keys up in, and our own list behind it.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, RwLock, Weak};
use std::time::{Duration, Instant};

use super::super::{
    Access, CompletionQueue, HostMemory, Lkey, LocalSegment, MemoryRegion, ProtectionDomain, QueuePair,
    QueuePairCapacity, Rkey, VerbsError,
};
use super::device::Device;
use super::layout::table;
use super::lock;
use super::queue_pair::SoftQueuePair;
use super::shared::{Words, fd_of, random};

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct SoftDomain {
    pub(super) device: Arc<Device>,
    table: Words,
    memory: Arc<HostMemory>,
    regions: RwLock<Vec<Option<Registered>>>,
    queue_pairs: Mutex<Vec<Weak<SoftQueuePair>>>,
    next: AtomicU32,
    this: Weak<Self>,
}

#[derive(Clone, Debug)]
struct Registered {
    key: u32,
    access: Access,
    segment: u64,
    memory: Arc<HostMemory>,
}

/// A region of this device.
#[derive(Debug)]
pub(super) struct SoftRegion {
    domain: Arc<SoftDomain>,
    key: u32,
    access: Access,
    memory: Arc<HostMemory>,
}

impl SoftDomain {
    /// How long deregistration waits for a peer that is in the middle of an operation. Copies are shorter; a peer that
    /// was stopped by a debugger is not waited for without end.
    const PATIENCE: Duration = Duration::from_secs(1);

    pub(super) fn new(device: Arc<Device>) -> Result<Arc<Self>, VerbsError> {
        let (table, memory) = Words::create(table::WORDS)?;
        Ok(Arc::new_cyclic(|this| Self {
            device,
            table,
            memory,
            regions: RwLock::default(),
            queue_pairs: Mutex::default(),
            next: AtomicU32::new(0),
            this: Weak::clone(this),
        }))
    }

    /// What peers map, to look keys up in.
    pub(super) fn memory(&self) -> &HostMemory {
        &self.memory
    }

    /// Finds the memory behind a local segment, if the segment lies within and the region has the rights.
    pub(super) fn resolve(&self, segment: &LocalSegment, access: Access) -> Option<(Arc<HostMemory>, usize)> {
        let key = segment.lkey().0;
        let regions = self.regions.read().ok()?;
        let region = regions.get(table::index_of(key))?.as_ref()?;
        if region.key != key || !region.access.contains(access) {
            return None;
        }
        let offset = segment.address().checked_sub(region.memory.address())?;
        let end = offset.checked_add(segment.length())?;
        (end <= region.memory.len() as u64).then(|| (Arc::clone(&region.memory), offset as usize))
    }

    /// The shared memory that regions of this domain lie in, by its number.
    pub(super) fn segment(&self, number: u64) -> Option<Arc<HostMemory>> {
        let regions = self.regions.read().ok()?;
        let found = regions.iter().flatten().find(|region| region.segment == number && number != 0)?;
        Some(Arc::clone(&found.memory))
    }

    pub(super) fn attach(&self, queue_pair: Weak<SoftQueuePair>) {
        let mut queue_pairs = lock(&self.queue_pairs);
        queue_pairs.retain(|other| other.strong_count() > 0);
        queue_pairs.push(queue_pair);
    }

    fn insert(&self, memory: &Arc<HostMemory>, access: Access) -> Result<u32, VerbsError> {
        let segment = match fd_of(memory) {
            Ok(fd) => {
                rustix::fs::fstat(fd)
                    .map_err(|error| VerbsError::os("looking at shared memory", error))?
                    .st_ino
            }
            Err(_) => 0,
        };
        let full = VerbsError::Limit {
            what: "memory regions of a protection domain",
            asked: table::REGIONS as u64 + 1,
            limit: table::REGIONS as u64,
        };
        let mut regions = self.regions.write().unwrap_or_else(std::sync::PoisonError::into_inner);
        if regions.is_empty() {
            regions.resize(table::REGIONS, None);
        }
        let start = self.next.fetch_add(1, Ordering::Relaxed) as usize;
        let index = (0..table::REGIONS)
            .map(|step| (start + step) % table::REGIONS)
            .find(|&index| regions[index].is_none())
            .ok_or(full)?;
        let key = (random() as u32) / table::REGIONS as u32 * table::REGIONS as u32 + index as u32;
        let word = |field: usize| self.table.at(index * table::ENTRY + field);
        word(table::ADDRESS).store(memory.address(), Ordering::Relaxed);
        word(table::LENGTH).store(memory.len() as u64, Ordering::Relaxed);
        word(table::SEGMENT).store(segment, Ordering::Relaxed);
        // SYNC: the key makes the entry valid, so it comes last.
        word(table::KEY).store(table::key_word(key, access.bits()), Ordering::SeqCst);
        regions[index] = Some(Registered { key, access, segment, memory: Arc::clone(memory) });
        Ok(key)
    }

    /// Takes the entry out, and waits for peers that are working with it.
    fn remove(&self, key: u32) {
        let index = table::index_of(key);
        // SYNC: before the hazards are read. A peer publishes its hazard and then looks at the key again, so either it
        // sees the key gone, or we see its hazard.
        self.table.at(index * table::ENTRY + table::KEY).store(0, Ordering::SeqCst);
        if let Ok(mut regions) = self.regions.write() {
            regions[index] = None;
        }
        let queue_pairs: Vec<_> = lock(&self.queue_pairs).iter().filter_map(Weak::upgrade).collect();
        let deadline = Instant::now() + Self::PATIENCE;
        for queue_pair in queue_pairs {
            while queue_pair.peer_works_with(key) && Instant::now() < deadline {
                std::thread::yield_now();
            }
        }
    }
}

impl ProtectionDomain for SoftDomain {
    fn register(&self, memory: Arc<HostMemory>, access: Access) -> Result<Arc<dyn MemoryRegion>, VerbsError> {
        let domain = self.this.upgrade().ok_or(VerbsError::Foreign("protection domain"))?;
        let key = self.insert(&memory, access)?;
        Ok(Arc::new(SoftRegion { domain, key, access, memory }))
    }

    fn create_queue_pair(
        &self,
        send_queue: &Arc<dyn CompletionQueue>,
        receive_queue: &Arc<dyn CompletionQueue>,
        capacity: &QueuePairCapacity,
    ) -> Result<Arc<dyn QueuePair>, VerbsError> {
        let domain = self.this.upgrade().ok_or(VerbsError::Foreign("protection domain"))?;
        Ok(SoftQueuePair::create(domain, send_queue, receive_queue, capacity)?)
    }
}

impl MemoryRegion for SoftRegion {
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
}

impl Drop for SoftRegion {
    fn drop(&mut self) {
        self.domain.remove(self.key);
    }
}
