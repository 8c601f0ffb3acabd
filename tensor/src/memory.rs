//! The memory of tensors that move: the regions that tensors arrive in, or are copied to before they are
//! sent, and the [`Payload`] of a tensor.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, Weak};

use bytes::Bytes;

use crate::error::TensorError;
use crate::types::Tensor;
use crate::wire::tensor_metadata::WireMetadata;
use tonic_rdma_verbs::VerbsError;
use tonic_rdma_verbs::memory::{Budget, Lease, MemRegion, SharedRegion};
use tonic_rdma_verbs::unstable::{LocalMemory, RegionPool, lock};

/// The regions of a device: for tensors that arrive, for copies of tensors that are sent, and for slots and
/// regions that peers access. They are cut from slabs, and their memory comes back when they are dropped.
#[derive(Debug)]
pub(crate) struct RegionCache {
    pub(crate) budget: Arc<Budget>,
    /// What peers write and this process reads: no peer can read these slabs.
    received: RegionPool,
    /// What peers may read.
    readable: RegionPool,
    /// What comes from peers into memory of an engine, which may send it on from there.
    pub(crate) hosted: RegionPool,
    keepers: Mutex<Vec<Weak<dyn Keeper>>>,
    ticks: AtomicU32,
}

/// Keeps memory that it can do without when memory is short.
pub(crate) trait Keeper: Send + Sync {
    /// Drops regions that nobody waits for. The [`RegionCache`] holds no lock when it calls this.
    fn give_back(&self);

    /// Frees slabs that nothing uses, and drops registrations of slabs that are gone.
    fn trim(&self);

    /// Frees slabs that were not used since the last call, and drops registrations of slabs that are gone.
    fn end_period(&self);
}

impl RegionCache {
    /// The number of ticks after which slabs are freed that were not used meanwhile.
    pub(crate) const PERIOD: u32 = 16;

    pub(crate) fn new(budget: &Arc<Budget>) -> Arc<Self> {
        let pool = || RegionPool::new(Arc::clone(budget));
        let (received, readable, hosted) = (pool(), pool(), pool());
        let (budget, ticks) = (Arc::clone(budget), AtomicU32::new(0));
        Arc::new(Self { budget, received, readable, hosted, keepers: Mutex::default(), ticks })
    }

    /// Adds a keeper, until it is dropped.
    pub(crate) fn add_keeper(&self, keeper: Weak<dyn Keeper>) {
        let mut keepers = lock(&self.keepers);
        keepers.retain(|keeper| keeper.strong_count() > 0);
        keepers.push(keeper);
    }

    /// Returns a region for a tensor of `length` bytes that arrives: `length` bytes, at least one, with any
    /// content.
    pub(crate) fn take(&self, length: u64) -> Result<MemRegion, TensorError> {
        let length = usize::try_from(length).map_err(TensorError::memory)?;
        self.obtain(|| self.received.take(length.max(1)))
    }

    /// Returns a region that begins with a copy of `bytes`, to be sent.
    pub(crate) fn copy_of(&self, bytes: &[u8]) -> Result<MemRegion, TensorError> {
        let mut copy = self.obtain(|| self.readable.take(bytes.len().max(1)))?;
        copy[..bytes.len()].copy_from_slice(bytes);
        Ok(copy)
    }

    /// Maps memory ahead for regions of exactly these lengths that peers write and do not read.
    pub(crate) fn preallocate_sinks(&self, lengths: &[usize]) -> Result<(), TensorError> {
        self.obtain(|| self.received.preallocate(lengths))
    }

    /// Returns the bytes that were mapped ahead, and those of them that were in use at least once.
    pub(crate) fn preallocated_sinks(&self) -> (u64, u64) {
        let statistics = self.received.statistics();
        (statistics.preallocated, statistics.preallocated_used)
    }

    /// Returns a region of `length` bytes, zeroed, that peers write and do not read.
    pub(crate) fn allocate_sink(&self, length: usize) -> Result<MemRegion, TensorError> {
        self.obtain(|| self.received.take_zeroed(length))
    }

    /// Returns a region of `length` bytes, zeroed, for any use.
    pub(crate) fn allocate(&self, length: usize) -> Result<MemRegion, TensorError> {
        self.obtain(|| self.readable.take_zeroed(length))
    }

    /// Copies the first `length` bytes of a tensor that has arrived. Its share is used up, so it must not be lost:
    /// if the budget has no room, the copy lies in ordinary memory.
    pub(crate) fn copy_out_of(&self, region: &SharedRegion, length: u64) -> Result<Bytes, TensorError> {
        let bytes = length as usize;
        if let Ok(mut copy) = self.take(length) {
            region.copy_out(0, &mut copy[..bytes]).map_err(TensorError::local)?;
            return Ok(freeze(copy, length));
        }
        let mut copy = vec![0; bytes];
        region.copy_out(0, &mut copy).map_err(TensorError::local)?;
        Ok(copy.into())
    }

    /// Takes memory. If the budget has no room for it, first lets the keepers of the whole device give
    /// memory back, because all share the budget, and then frees what is idle.
    pub(crate) fn obtain<T>(&self, take: impl Fn() -> Result<T, VerbsError>) -> Result<T, TensorError> {
        let region = take().or_else(|_| {
            self.keepers().iter().for_each(|keeper| keeper.give_back());
            // The software device charges a slab until the peer has unmapped it, so a slab that came back is
            // the first choice.
            take()
        });
        let region = region.or_else(|_| {
            self.received.trim();
            self.readable.trim();
            self.hosted.trim();
            self.keepers().iter().for_each(|keeper| keeper.trim());
            take()
        });
        region.map_err(TensorError::memory)
    }

    fn keepers(&self) -> Vec<Arc<dyn Keeper>> {
        lock(&self.keepers).iter().filter_map(Weak::upgrade).collect()
    }

    /// Counts a tick. With each [`PERIOD`](Self::PERIOD)-th tick frees the slabs that were not used since the
    /// `PERIOD`-th tick before it. If there are none, this makes no system call.
    pub(crate) fn tick(&self) {
        let ticks = self.ticks.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        if ticks.is_multiple_of(Self::PERIOD) {
            self.received.end_period();
            self.readable.end_period();
            self.hosted.end_period();
            self.keepers().iter().for_each(|keeper| keeper.end_period());
        }
    }

    /// Returns whether half of the budget stays free if `length` bytes are taken. Idle memory for tensors that
    /// arrive counts as free.
    pub(crate) fn leaves_half(&self, length: u64) -> bool {
        let received = self.received.statistics();
        let idle = received.registered.saturating_sub(received.leased_receive);
        let free = self.budget.available().saturating_add(idle);
        free >= length.saturating_add(self.budget.limit() / 2)
    }
}

/// Returns the first `length` bytes of a region. Its memory comes back when the last reference to the bytes is
/// dropped.
pub(crate) fn freeze(region: MemRegion, length: u64) -> Bytes {
    Bytes::from_owner(region).slice(..length as usize)
}

/// The bytes that move for a tensor, and their metadata. Clones share the bytes.
#[derive(Clone, Debug)]
pub(crate) struct Payload {
    pub(crate) metadata: WireMetadata,
    pub(crate) content: Content,
}

/// Where the bytes of a payload lie.
#[derive(Clone, Debug)]
pub(crate) enum Content {
    /// Memory that devices can read.
    Registered(Lease, Range<usize>),
    /// Any other memory.
    Bytes(Bytes),
}

impl Payload {
    /// Returns the payload of `tensor`: the elements themselves if they are contiguous and have a fixed size,
    /// otherwise the serialised form.
    pub(crate) fn of(tensor: &Tensor) -> Result<Self, TensorError> {
        match (tensor.metadata(), tensor.registered()) {
            (Some(metadata), Some((lease, range))) => {
                Ok(Self { metadata: metadata.into(), content: Content::Registered(lease, range) })
            }
            _ => {
                let (metadata, bytes) = tensor.serialize()?;
                Ok(Self { metadata: metadata.into(), content: Content::Bytes(bytes) })
            }
        }
    }

    /// Returns the bytes.
    pub(crate) fn as_slice(&self) -> &[u8] {
        match &self.content {
            Content::Registered(lease, range) => lease.get(range.clone()).unwrap_or_default(),
            Content::Bytes(bytes) => bytes,
        }
    }

    /// Returns memory to write the bytes from, and their offset in it.
    pub(crate) fn local(&self, region_cache: &RegionCache) -> Result<(LocalMemory, u64), TensorError> {
        match &self.content {
            Content::Registered(lease, range) => Ok((LocalMemory::Lease(lease.clone()), range.start as u64)),
            Content::Bytes(bytes) => Ok((LocalMemory::Region(region_cache.copy_of(bytes)?), 0)),
        }
    }
}

#[cfg(test)]
mod region_cache_tests {
    use super::*;

    #[test]
    fn unused_memory_is_used_again() {
        let region_cache = RegionCache::new(&Budget::new(8192));
        let mut region = region_cache.take(8000).unwrap();
        region[4999] = 7;
        let address = region.as_ptr();
        let bytes = freeze(region, 5000);
        assert_eq!((bytes.len(), bytes[4999]), (5000, 7));
        assert!(region_cache.take(1).is_err(), "the budget is used up");
        let part = bytes.slice(4999..);
        drop(bytes);
        assert!(region_cache.take(1).is_err(), "a slice holds it");
        drop(part);
        let again = region_cache.take(7000).unwrap();
        assert_eq!(again.as_ptr(), address);
        drop(again);
        assert_eq!(region_cache.copy_of(&[7; 8000]).unwrap()[..], [7; 8000], "idle memory makes room");
        assert_eq!(region_cache.allocate(5000).unwrap()[..], [0; 5000], "not what was there before");
    }

    #[test]
    fn memory_that_peers_read_shares_no_slab_with_what_came_from_them() {
        let region_cache = RegionCache::new(&Budget::new(64 << 20));
        let received = [region_cache.take(100).unwrap(), region_cache.allocate_sink(100).unwrap()];
        let readable = [region_cache.copy_of(&[1; 100]).unwrap(), region_cache.allocate(100).unwrap()];
        let slab = |region: &MemRegion| region.as_ptr() as usize >> 21;
        assert_eq!(slab(&received[0]), slab(&received[1]));
        assert_eq!(slab(&readable[0]), slab(&readable[1]));
        assert_ne!(slab(&received[0]), slab(&readable[0]));
    }

    /// Returns the budget after so many ticks.
    fn after(ticks: u32, region_cache: &RegionCache, budget: &Budget) -> u64 {
        (0..ticks).for_each(|_| region_cache.tick());
        budget.used()
    }

    #[test]
    fn idle_memory_is_held_for_two_periods_at_most() {
        let budget = Budget::new(u64::MAX);
        let region_cache = RegionCache::new(&budget);
        let kept = region_cache.take(100).unwrap();
        let burst: Vec<_> = (0..700).map(|_| region_cache.take(4096).unwrap()).collect();
        let copy = region_cache.copy_of(&[1; 100]).unwrap();
        drop((burst, copy, region_cache.take(1 << 30).unwrap()));
        let warm = after(RegionCache::PERIOD - 1, &region_cache, &budget);
        assert!(warm > 1 << 30, "a short pause frees nothing: {warm}");
        assert_eq!(
            after(RegionCache::PERIOD + 1, &region_cache, &budget),
            2 << 20,
            "the slab that is in use"
        );
        drop(kept);
        assert_eq!(after(2 * RegionCache::PERIOD, &region_cache, &budget), 0);
    }
}
