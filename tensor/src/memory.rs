//! The memory of tensors that move: the regions that tensors arrive in, or are copied to before they are
//! sent, and the [`Payload`] of a tensor.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, Weak};

use bytes::Bytes;

use crate::error::{TensorError, TensorErrorKind};
use crate::types::Tensor;
use crate::wire::tensor_metadata::WireMetadata;
use tonic_rdma_verbs::memory::{Budget, Lease, MemRegion};
use tonic_rdma_verbs::unstable::{LocalMemory, lock};

/// Regions for tensors that arrive, and for copies of tensors that are sent. A region that comes back stays
/// here for the next tensor of its length, because fresh pages cost more than the bytes that are written to
/// them.
#[derive(Debug)]
pub(crate) struct RegionCache {
    budget: Arc<Budget>,
    idle: Mutex<IdleRegions>,
    keepers: Mutex<Vec<Weak<dyn Keeper>>>,
}

/// Keeps regions that may be freed when memory is short.
pub(crate) trait Keeper: Send + Sync {
    /// Puts these regions back into the [`RegionCache`], which holds no lock when it calls this.
    fn give_back(&self);
}

#[derive(Debug, Default)]
struct IdleRegions {
    by_length: HashMap<usize, Vec<MemRegion>>,
    bytes: usize,
}

impl RegionCache {
    /// The largest number of idle bytes.
    const KEPT: usize = 2 << 30;

    pub(crate) fn new(budget: &Arc<Budget>) -> Arc<Self> {
        Arc::new(Self { budget: Arc::clone(budget), idle: Mutex::default(), keepers: Mutex::default() })
    }

    /// Adds a keeper, until it is dropped.
    pub(crate) fn add_keeper(&self, keeper: Weak<dyn Keeper>) {
        let mut keepers = lock(&self.keepers);
        keepers.retain(|keeper| keeper.strong_count() > 0);
        keepers.push(keeper);
    }

    /// Returns a region of at least `length` bytes, with any content.
    pub(crate) fn take(&self, length: u64) -> Result<MemRegion, TensorError> {
        let length = usize::try_from(length).map_err(TensorError::memory)?;
        let page = rustix::param::page_size();
        let length = length.max(1).checked_next_multiple_of(page);
        let length = length.ok_or_else(|| {
            TensorError::new(TensorErrorKind::NoMemory, "no memory: a tensor longer than memory can be")
        })?;
        if let Some(region) = self.idle(length) {
            return Ok(region);
        }
        self.allocate_idle_freed(length).or_else(|_| {
            self.call_keepers();
            // The software device charges a region until the peer has unmapped it, so a region that came back
            // is the first choice.
            self.idle(length).map_or_else(|| self.allocate_idle_freed(length), Ok)
        })
    }

    /// Returns a region that begins with a copy of `bytes`.
    pub(crate) fn copy_of(&self, bytes: &[u8]) -> Result<MemRegion, TensorError> {
        let mut copy = self.take(bytes.len() as u64)?;
        copy[..bytes.len()].copy_from_slice(bytes);
        Ok(copy)
    }

    /// Returns a new region of `length` bytes, zeroed.
    pub(crate) fn allocate(&self, length: usize) -> Result<MemRegion, TensorError> {
        self.allocate_idle_freed(length).or_else(|_| {
            self.call_keepers();
            self.allocate_idle_freed(length)
        })
    }

    fn idle(&self, length: usize) -> Option<MemRegion> {
        let mut idle = lock(&self.idle);
        let region = idle.by_length.get_mut(&length)?.pop()?;
        idle.bytes -= region.len();
        Some(region)
    }

    /// Allocates a region. If the budget has no room for it, frees the idle regions, which use up the budget
    /// too, and tries again.
    fn allocate_idle_freed(&self, length: usize) -> Result<MemRegion, TensorError> {
        MemRegion::allocate(length, &self.budget).or_else(|_| {
            let idle = std::mem::take(&mut *lock(&self.idle));
            // Outside the lock, because unmapping takes system calls.
            drop(idle);
            MemRegion::allocate(length, &self.budget).map_err(TensorError::memory)
        })
    }

    /// Lets the keepers of the whole device put their regions back, because all share the budget.
    fn call_keepers(&self) {
        let keepers: Vec<_> = lock(&self.keepers).iter().filter_map(Weak::upgrade).collect();
        keepers.iter().for_each(|keeper| keeper.give_back());
    }

    /// Takes a region back.
    pub(crate) fn put(&self, region: MemRegion) {
        let mut idle = lock(&self.idle);
        if idle.bytes + region.len() > Self::KEPT {
            let old = std::mem::take(&mut *idle);
            drop(idle);
            // The regions are freed outside the lock, because unmapping takes system calls.
            drop(old);
            idle = lock(&self.idle);
        }
        if region.len() <= Self::KEPT {
            idle.bytes += region.len();
            idle.by_length.entry(region.len()).or_default().push(region);
        }
    }

    /// Returns the first `length` bytes of a region. The region comes back when the last reference to the
    /// bytes is dropped.
    pub(crate) fn freeze(self: &Arc<Self>, region: MemRegion, length: u64) -> Bytes {
        Bytes::from_owner(CachedRegion { region: Some(region), region_cache: Arc::clone(self) })
            .slice(..length as usize)
    }
}

struct CachedRegion {
    region: Option<MemRegion>,
    region_cache: Arc<RegionCache>,
}

impl AsRef<[u8]> for CachedRegion {
    fn as_ref(&self) -> &[u8] {
        self.region.as_deref().unwrap_or_default()
    }
}

impl Drop for CachedRegion {
    fn drop(&mut self) {
        if let Some(region) = self.region.take() {
            self.region_cache.put(region);
        }
    }
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
        let mut region = region_cache.take(5000).unwrap();
        region[4999] = 7;
        let address = region.as_ptr();
        let bytes = region_cache.freeze(region, 5000);
        assert_eq!((bytes.len(), bytes[4999]), (5000, 7));
        assert!(region_cache.take(1).is_err(), "the budget is used up");
        let part = bytes.slice(4999..);
        drop(bytes);
        assert!(region_cache.take(1).is_err(), "a slice holds it");
        drop(part);
        let again = region_cache.take(8000).unwrap();
        assert_eq!(again.as_ptr(), address);
        region_cache.put(again);
        assert_eq!(region_cache.take(1).unwrap().len(), 4096, "idle memory of another length makes room");
    }
}
