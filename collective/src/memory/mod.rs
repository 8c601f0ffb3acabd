//! Memory that a device has registered, that peers may read, and that is used again.
//!
//! ```text
//!   MemoryPool ── take(bytes) ──▶ Memory      bytes, and the number by which peers read them
//!       ▲                           │
//!       └────────── drop ───────────┘         Buffer<T>: a Memory as elements, for users
//! ```
//!
//! A dropped memory stays on offer to the peers, so the next one of its size class needs no registration and
//! no call of a peer.

use std::collections::BTreeMap;
use std::fmt;
use std::hash::{BuildHasher as _, RandomState};
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use bytemuck::Pod;

use crate::error::{CollectiveError, argument};
use tonic_rdma::unstable::lock;
use tonic_rdma_tensor::{PublishedRegion, RdmaDevice, TensorError};

/// Elements in memory that the device has registered. Other ranks read the elements from there, so an
/// operation on a buffer needs no copy of the elements at this rank.
///
/// A buffer is a `&mut [T]`. It moves into an operation, and comes back with the result. When a buffer is
/// dropped, its memory stays registered, and the next buffer of about the same size uses the memory again.
pub struct Buffer<T> {
    pub(crate) memory: Memory,
    length: usize,
    elements: PhantomData<T>,
}

impl<T: Pod> Buffer<T> {
    /// Makes a buffer of `length` elements, all zero.
    ///
    /// # Errors
    /// There is no memory, or its pinned part has reached `RDMA_PINNED_LIMIT`.
    pub(crate) fn zeroed(pool: &MemoryPool, length: usize) -> Result<Self, CollectiveError> {
        let bytes = length.checked_mul(size_of::<T>()).ok_or_else(|| {
            argument(format!(
                "a buffer of {length} elements of {} bytes is larger than memory",
                size_of::<T>()
            ))
        })?;
        let mut memory = pool.take(bytes)?;
        if memory.used
            && let Some(dirty) = memory.get_mut(..bytes)
        {
            dirty.fill(0);
        }
        Ok(Self { memory, length, elements: PhantomData })
    }

    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Returns whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Puts a buffer together again. `memory` has at least `length` elements.
    pub(crate) fn of(memory: Memory, length: usize) -> Self {
        Self { memory, length, elements: PhantomData }
    }
}

impl<T: Pod> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        let bytes = self.memory.get(..self.length * size_of::<T>()).unwrap_or_default();
        // The memory begins at a page, so it is aligned for every type.
        bytemuck::try_cast_slice(bytes).unwrap_or_default()
    }
}

impl<T: Pod> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        let bytes = self.memory.get_mut(..self.length * size_of::<T>()).unwrap_or_default();
        bytemuck::try_cast_slice_mut(bytes).unwrap_or_default()
    }
}

impl<T: Pod + fmt::Debug> fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

/// A source of registered memory that is on offer to all peers of a device. Clones share one pool.
#[derive(Clone)]
pub(crate) struct MemoryPool {
    shared: Arc<PoolShared>,
}

/// Memory of a pool: bytes of this rank that peers may read. Its content is that of its last use.
///
/// Dropping it gives it back to the pool. Peers still have the right to read it then.
pub(crate) struct Memory {
    /// `None` only while the memory is dropped.
    region: Option<PublishedRegion>,
    number: u64,
    used: bool,
    retired: bool,
    pool: Arc<PoolShared>,
}

struct PoolShared {
    device: RdmaDevice,
    /// The number of the pool, which only ranks of its group learn.
    number: u64,
    /// The largest number of idle bytes.
    kept: usize,
    state: Mutex<PoolState>,
}

#[derive(Default)]
struct PoolState {
    idle: BTreeMap<usize, Vec<(u64, PublishedRegion)>>,
    /// Bytes that wait for their next use.
    idle_bytes: usize,
    /// The number of regions that the pool has registered in its life.
    registered: u64,
}

impl MemoryPool {
    /// The default for the number of idle bytes that a pool keeps.
    pub(crate) const KEPT: usize = 1 << 30;

    /// Makes a pool over memory of `device`, which keeps at most `kept` idle bytes.
    pub(crate) fn new(device: &RdmaDevice, kept: usize) -> Self {
        static POOLS: AtomicU64 = AtomicU64::new(0);
        // The keys of the hash are random numbers of the system, so the number can't be guessed.
        let number = RandomState::new().hash_one(POOLS.fetch_add(1, Ordering::Relaxed));
        Self {
            shared: Arc::new(PoolShared { device: device.clone(), number, kept, state: Mutex::default() }),
        }
    }

    /// Returns the device.
    pub(crate) fn device(&self) -> &RdmaDevice {
        &self.shared.device
    }

    /// Returns the number of the pool, which is part of the names of its regions.
    pub(crate) fn number(&self) -> u64 {
        self.shared.number
    }

    /// Returns memory of at least `bytes` bytes.
    ///
    /// # Errors
    /// There is no memory, or `RDMA_PINNED_LIMIT` is used up also after all idle memory of this pool was
    /// freed.
    pub(crate) fn take(&self, bytes: usize) -> Result<Memory, CollectiveError> {
        let class = size_class(bytes)
            .ok_or_else(|| argument(format!("{bytes} bytes are more than memory can be")))?;
        let mut state = lock(&self.shared.state);
        if let Some((number, region)) = state.idle.get_mut(&class).and_then(Vec::pop) {
            state.idle_bytes -= class;
            return Ok(self.memory(number, region, true));
        }
        state.registered += 1;
        let number = state.registered;
        drop(state);
        let region = self.publish(class, number).or_else(|error| {
            let idle = {
                let mut state = lock(&self.shared.state);
                state.idle_bytes = 0;
                std::mem::take(&mut state.idle)
            };
            if idle.is_empty() {
                return Err(error);
            }
            drop(idle);
            self.publish(class, number)
        })?;
        Ok(self.memory(number, region, false))
    }

    fn publish(&self, bytes: usize, number: u64) -> Result<PublishedRegion, TensorError> {
        let device = &self.shared.device;
        device.publish(&name_of(self.shared.number, number), device.allocate(bytes)?)
    }

    fn memory(&self, number: u64, region: PublishedRegion, used: bool) -> Memory {
        Memory { region: Some(region), number, used, retired: false, pool: Arc::clone(&self.shared) }
    }
}

/// Returns the name under which the memory `number` of a pool is on offer.
pub(crate) fn name_of(pool: u64, number: u64) -> String {
    format!("tonic-rdma-collective/memory/{pool:016x}/{number}")
}

impl Memory {
    /// Returns the number by which messages name this memory. A pool gives each number once.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// Returns the number of the pool that the memory belongs to.
    pub(crate) fn pool(&self) -> u64 {
        self.pool.number
    }

    /// Notes that a peer may still read this memory when it is dropped, such as after an operation that
    /// failed. Dropping it then takes the rights of all peers away, and the pool does not use it again.
    pub(crate) fn retire(&mut self) {
        self.retired = true;
    }
}

impl Deref for Memory {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.region.as_deref().unwrap_or_default()
    }
}

impl DerefMut for Memory {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.region.as_deref_mut().unwrap_or_default()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let Some(region) = self.region.take() else { return };
        let bytes = region.len();
        let mut state = lock(&self.pool.state);
        if self.retired || state.idle_bytes + bytes > self.pool.kept {
            drop(state);
            // The region is freed outside the lock, because that takes system calls.
            drop(region);
            return;
        }
        state.idle_bytes += bytes;
        state.idle.entry(bytes).or_default().push((self.number, region));
    }
}

/// Returns the number of bytes that the pool allocates for `bytes`: at most a quarter more, and at least a
/// page.
fn size_class(bytes: usize) -> Option<usize> {
    const PAGE: usize = 4096;
    let bytes = bytes.max(PAGE);
    let step = (bytes.checked_next_power_of_two()? / 8).max(PAGE);
    bytes.checked_next_multiple_of(step).filter(|class| *class <= isize::MAX as usize / 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the idle bytes, and the number of regions that the pool has registered.
    fn state(pool: &MemoryPool) -> (usize, u64) {
        let state = lock(&pool.shared.state);
        (state.idle_bytes, state.registered)
    }

    #[test]
    fn a_size_class_wastes_at_most_a_quarter() {
        assert_eq!(size_class(0), Some(4096));
        assert_eq!(size_class(4097), Some(8192));
        assert_eq!(size_class(1 << 20), Some(1 << 20));
        assert_eq!(size_class(usize::MAX), None);
        for bytes in (16_384..5_000_000).step_by(1237) {
            let class = size_class(bytes).unwrap();
            assert!(class >= bytes && class - bytes <= bytes / 4, "{bytes} takes {class}");
        }
    }

    #[tokio::test]
    async fn dropped_memory_is_used_again_under_its_number() {
        let device = RdmaDevice::builder().bind("127.0.0.1:0").await.unwrap();
        let pool = MemoryPool::new(&device, 64 << 10);
        let mut memory = pool.take(30_000).unwrap();
        assert!(!memory.used);
        memory.fill(7);
        let (number, bytes) = (memory.number(), memory.len());
        assert_eq!(state(&pool), (0, 1));
        drop(memory);
        assert_eq!(state(&pool), (bytes, 1));

        let buffer = Buffer::<u8>::zeroed(&pool, 29_000).unwrap();
        assert_eq!(buffer.memory.number(), number);
        assert!(buffer.iter().all(|byte| *byte == 0), "a new buffer holds zeros");
        assert_eq!(buffer.len(), 29_000);
    }

    #[tokio::test]
    async fn memory_over_the_limit_and_retired_memory_is_freed() {
        let device = RdmaDevice::builder().bind("127.0.0.1:0").await.unwrap();
        let pool = MemoryPool::new(&device, 8192);
        drop(pool.take(100_000).unwrap());
        assert_eq!(state(&pool).0, 0);
        let mut memory = pool.take(1).unwrap();
        memory.retire();
        let number = memory.number();
        drop(memory);
        assert_eq!(state(&pool).0, 0);
        assert_ne!(pool.take(1).unwrap().number(), number);
    }

    #[tokio::test]
    async fn a_buffer_has_any_length() {
        let device = RdmaDevice::builder().bind("127.0.0.1:0").await.unwrap();
        let pool = MemoryPool::new(&device, MemoryPool::KEPT);
        assert!(Buffer::<f64>::zeroed(&pool, 0).unwrap().is_empty());
        let mut buffer = Buffer::<f64>::zeroed(&pool, 1000).unwrap();
        buffer[999] = 1.5;
        assert_eq!((buffer[0], buffer[999]), (0.0, 1.5));
        let error = Buffer::<f64>::zeroed(&pool, usize::MAX).unwrap_err();
        assert_eq!(error.kind(), crate::CollectiveErrorKind::InvalidArgument, "{error}");
    }
}
