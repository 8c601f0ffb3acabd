//! The device: one per process, with its limits, its thread, its table of regions and its known peers.

use std::collections::{HashMap, VecDeque};
use std::mem::ManuallyDrop;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::forked::Origin;
use super::peers::level::Policy;
use super::peers::message::DeviceId;
use super::peers::peer::Peer;
use super::peers::service::Service;
use super::peers::sockets::Sockets;
use super::reach::Reach;
use super::shared::table::{self, Entry, REGIONS, RegionTable};
use crate::panics::lock;
use crate::queue_pair::random;
use crate::{DeviceAttributes, HostMemory, VerbsError};

/// Time for which a device that did not answer is not asked again. The addresses of one negotiation may all
/// name it.
const SILENCE: Duration = Duration::from_secs(1);

/// The device of this process.
#[derive(Debug)]
pub(super) struct Device {
    me: Weak<Device>,
    pub(super) attributes: DeviceAttributes,
    pub(super) id: DeviceId,
    reach: Reach,
    origin: Origin,
    pub(super) service: Arc<Service>,
    thread: Option<JoinHandle<()>>,
    pub(super) table: RegionTable,
    pub(super) table_fd: OwnedFd,
    keys: Mutex<Keys>,
    memory: Mutex<KnownMemory>,
    peers: Mutex<HashMap<DeviceId, Weak<Peer>>>,
    /// Devices that did not answer, and when.
    silent: Mutex<HashMap<DeviceId, Instant>>,
    next_object: AtomicU64,
    next_number: AtomicU32,
}

/// The free entries of the table.
#[derive(Debug, Default)]
struct Keys {
    used: u32,
    /// Free indices in the order of release.
    free: VecDeque<u32>,
}

impl Keys {
    /// Returns the index of a free entry; `None` if there is none. An index is reused late, so that a stale
    /// key finds no new region soon.
    fn take(&mut self) -> Option<u32> {
        /// Indices that wait for their reuse: 256 KiB of the table.
        const WAITING: usize = 4096;
        if self.free.len() < WAITING && self.used < REGIONS {
            self.used += 1;
            return Some(self.used - 1);
        }
        self.free.pop_front()
    }
}

/// Shared memory that is, or was, registered.
#[derive(Debug, Default)]
struct KnownMemory {
    by_id: HashMap<u64, Weak<HostMemory>>,
    /// Number of entries at which those of memory that is gone are removed.
    prune_at: usize,
}

impl Device {
    pub(super) fn new() -> Result<Arc<Self>, VerbsError> {
        let os = |error: std::io::Error| VerbsError::os("opening the soft device", error);
        let reach = Reach::from_environment()?;
        let nonce = random().map_err(os)?;
        let id = DeviceId { process: std::process::id(), nonce, directory: reach.sockets.identity() };
        let origin = Origin::here().map_err(os)?;
        let service = Arc::new(
            Service::new(reach.sockets.listen(id, reach.policy, origin)?, reach.policy).map_err(os)?,
        );
        let (table, table_fd) = RegionTable::create().map_err(os)?;
        let runner = Arc::clone(&service);
        let thread =
            std::thread::Builder::new().name("rdma-soft".into()).spawn(move || runner.run()).map_err(os)?;
        Ok(Arc::new_cyclic(|me| Self {
            me: me.clone(),
            attributes: attributes(),
            id,
            reach,
            origin,
            service,
            thread: Some(thread),
            table,
            table_fd,
            keys: Mutex::default(),
            memory: Mutex::default(),
            peers: Mutex::default(),
            silent: Mutex::default(),
            next_object: AtomicU64::new(1),
            next_number: AtomicU32::new(1),
        }))
    }

    /// Returns the shared reference that all objects of the device hold.
    pub(super) fn shared(&self) -> Arc<Self> {
        // Every `Device` is in an `Arc`, because only `new` makes devices.
        self.me.upgrade().unwrap_or_else(|| unreachable!())
    }

    /// Returns whether this process is a forked child of the process that opened the device. Such a process
    /// must not touch anything that it shares with its parent.
    #[inline]
    pub(super) fn is_forked(&self) -> bool {
        self.origin.is_forked()
    }

    /// Fails in a forked child of the process that opened the device.
    pub(super) fn check_process(&self) -> Result<(), VerbsError> {
        if self.is_forked() {
            return Err(VerbsError::unusable(
                "this process was forked from the process that opened the soft device: open the device again",
            ));
        }
        Ok(())
    }

    /// Returns where the device finds its peers, and which peers it lets in.
    pub(super) fn reach(&self) -> (&Sockets, Policy) {
        (&self.reach.sockets, self.reach.policy)
    }

    /// Returns a new number for an object that peers ask for.
    pub(super) fn object_id(&self) -> u64 {
        self.next_object.fetch_add(1, Relaxed)
    }

    pub(super) fn queue_pair_number(&self) -> u32 {
        unused_number(&self.next_number, |number| self.service.has_queue_pair(number))
    }

    /// Enters a region into the table and returns its key.
    pub(super) fn insert_region(&self, entry: &Entry) -> Result<u32, VerbsError> {
        let random = random().map_err(|error| VerbsError::os("drawing a key", error))? as u32;
        let index = lock(&self.keys).take().ok_or_else(|| {
            let (asked, limit) = (u64::from(REGIONS) + 1, u64::from(REGIONS));
            VerbsError::limit("memory regions", asked, limit)
        })?;
        let key = key_of(random, index);
        self.table.insert(key, entry);
        Ok(key)
    }

    /// Frees the table entry of `key`. No thread of this process uses the region any more.
    pub(super) fn release_key(&self, key: u32) {
        lock(&self.keys).free.push_back(key % REGIONS);
    }

    /// Notes shared memory that is registered, so that it can be offered to peers. Returns its number; 0 for
    /// other memory.
    pub(super) fn note_memory(&self, memory: &Arc<HostMemory>) -> u64 {
        if memory.shared_fd().is_none() {
            return 0;
        }
        let mut known = lock(&self.memory);
        if known.by_id.len() >= known.prune_at {
            known.by_id.retain(|_, memory| memory.strong_count() > 0);
            known.prune_at = 2 * known.by_id.len() + 64;
        }
        known.by_id.entry(memory.id()).or_insert_with(|| Arc::downgrade(memory));
        memory.id()
    }

    /// Returns the registered memory of this number.
    pub(super) fn memory(&self, id: u64) -> Option<Arc<HostMemory>> {
        lock(&self.memory).by_id.get(&id).and_then(Weak::upgrade)
    }

    /// Returns the connection to the device `id`. If there is no connection yet, connects until `deadline`.
    pub(super) fn peer(&self, id: DeviceId, deadline: Instant) -> Result<Arc<Peer>, VerbsError> {
        let known = |peers: &HashMap<DeviceId, Weak<Peer>>| {
            peers.get(&id).and_then(Weak::upgrade).filter(|peer| !peer.is_dead())
        };
        if let Some(peer) = known(&lock(&self.peers)) {
            return Ok(peer);
        }
        let peer = Arc::new(Peer::connect(id, self.reach(), &self.service, deadline)?);
        let mut peers = lock(&self.peers);
        if let Some(other) = known(&peers) {
            return Ok(other);
        }
        self.service.watch(&peer).map_err(|error| VerbsError::os("watching the peer's device", error))?;
        peers.retain(|_, peer| peer.strong_count() > 0);
        peers.insert(id, Arc::downgrade(&peer));
        Ok(peer)
    }

    /// Fails if the device `id` did not answer a moment ago, so that an address that names it again costs no
    /// time.
    pub(super) fn check_answers(&self, id: DeviceId) -> Result<(), VerbsError> {
        match lock(&self.silent).get(&id) {
            Some(when) if when.elapsed() < SILENCE => {
                Err(VerbsError::unreachable("the peer's soft device did not answer a moment ago"))
            }
            _ => Ok(()),
        }
    }

    /// Notes that the device `id` did not answer in time.
    pub(super) fn note_silence(&self, id: DeviceId) {
        // This process is only slow.
        if id == self.id {
            return;
        }
        let mut silent = lock(&self.silent);
        silent.retain(|_, when| when.elapsed() < SILENCE);
        silent.insert(id, Instant::now());
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if self.is_forked() {
            // The thread is the parent's, so this process must not even detach it.
            let _ = ManuallyDrop::new(self.thread.take());
            return;
        }
        self.service.stop();
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
    }
}

/// Returns the next number that is not in use. After 2^32 queue pairs the numbers begin again. No queue pair
/// has the number 0.
fn unused_number(next: &AtomicU32, is_used: impl Fn(u32) -> bool) -> u32 {
    loop {
        let number = next.fetch_add(1, Relaxed);
        if number != 0 && !is_used(number) {
            return number;
        }
    }
}

/// Returns the key of the region at `index` of the table. A key is never 0, because 0 stands for memory
/// without a registration.
fn key_of(random: u32, index: u32) -> u32 {
    (random / REGIONS).max(1) * REGIONS + index
}

/// Name of the software device.
pub const NAME: &str = "soft0";
/// Most requests outstanding on one queue.
pub(super) const MAX_WORK_REQUESTS: u32 = 1 << 14;
/// Most bytes of one request.
pub(super) const MAX_MESSAGE: u64 = 1 << 31;
/// Most segments of one request.
pub(super) const MAX_SEGMENTS: u32 = 32;
/// Most READs of one queue pair that the peer serves at a time. Further READs wait in the send queue.
pub(super) const MAX_READS: usize = 128;
/// Most inline bytes of one request.
pub(super) const MAX_INLINE: u32 = 128 << 10;
/// Messages and READs of at least this length go past the caches, because they are as long as the last-level
/// cache and would not stay there.
pub(super) const PAST_CACHES: u64 = 32 << 20;

/// Returns the abilities and limits of the software device.
///
/// ```
/// use tonic_rdma_verbs::soft;
///
/// assert!(soft::attributes().immediate);
/// ```
pub fn attributes() -> DeviceAttributes {
    DeviceAttributes {
        max_message_size: MAX_MESSAGE,
        max_work_requests: MAX_WORK_REQUESTS,
        max_segments: MAX_SEGMENTS,
        max_read_segments: MAX_SEGMENTS,
        max_inline: MAX_INLINE,
        max_outstanding_reads: MAX_READS as u32,
        max_completions: 1 << 22,
        max_memory_regions: table::REGIONS,
        immediate: true,
        locks_memory: false,
        memory_windows: true,
        ..DeviceAttributes::new("soft", NAME)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A peer may still have the key of a region that is gone.
    #[test]
    fn an_index_of_the_table_is_reused_late() {
        let mut keys = Keys::default();
        let first = keys.take();
        assert_eq!(first, Some(0));
        keys.free.extend(first);
        for _ in 0..4095 {
            let next = keys.take();
            assert_ne!(next, first);
            keys.free.extend(next);
        }
        // All entries are used before there is none.
        let taken: std::collections::HashSet<_> = std::iter::from_fn(|| keys.take()).collect();
        assert_eq!(taken.len(), REGIONS as usize);
    }

    #[test]
    fn no_two_queue_pairs_have_one_number() {
        let next = AtomicU32::new(u32::MAX - 1);
        let in_use = [u32::MAX, 1, 2];
        let numbers = [(); 3].map(|()| unused_number(&next, |number| in_use.contains(&number)));
        assert_eq!(numbers, [u32::MAX - 1, 3, 4]);
    }

    #[test]
    fn no_key_is_zero_and_each_names_its_index() {
        for random in [0, 1, REGIONS - 1, REGIONS, u32::MAX] {
            for index in [0, 1, REGIONS - 1] {
                let key = key_of(random, index);
                assert_ne!(key, 0);
                assert_eq!(key % REGIONS, index);
            }
        }
        assert_eq!(key_of(u32::MAX, REGIONS - 1), u32::MAX);
    }
}
