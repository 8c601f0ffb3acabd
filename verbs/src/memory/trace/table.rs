//! The live traced allocations of the process, by address.
//!
//! The table has all allocations that executions of nodes have made, on the heap and in pools. An allocation leaves the table
//! before its memory is freed, so a later allocation at its address is not mistaken for it.

use std::alloc::Layout;
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use super::report::NodeSite;
use super::thread::Pause;
use crate::memory::pool::held::HeldPiece;
use crate::sync::lock;

/// A live traced allocation.
pub(super) struct Traced {
    /// Number of the trace.
    pub(super) trace: u64,
    pub(super) site: NodeSite,
    pub(super) layout: Layout,
    /// The piece of the pool that the allocation lies in, or `None` on the heap.
    pub(super) piece: Option<HeldPiece>,
}

/// Number of maps. Threads that allocate at once seldom need the same map.
const MAPS: usize = 16;

/// Number of counters of the filter.
const COUNTERS: usize = 8192;

/// The allocations by start address. A map is chosen by the address.
static TABLE: [Mutex<BTreeMap<usize, Traced>>; MAPS] = [const { Mutex::new(BTreeMap::new()) }; MAPS];

/// Numbers of allocations whose addresses have the same hash. Nearly all addresses that the process frees are in no map, and
/// a counter of 0 shows this without a lock.
///
/// The accesses are relaxed: a thread that frees memory got the address from the thread that allocated it, through some
/// synchronisation, and so sees the counter that [`insert`] has raised.
static FILTER: [AtomicU32; COUNTERS] = [const { AtomicU32::new(0) }; COUNTERS];

/// Number of allocations in the table.
static LIVE: AtomicUsize = AtomicUsize::new(0);

/// Number of allocations in the table that lie in a pool.
static PLACED: AtomicUsize = AtomicUsize::new(0);

/// Returns whether an allocation may start at `address`. If this returns false, none does.
#[inline]
pub(super) fn may_hold(address: usize) -> bool {
    LIVE.load(Ordering::Relaxed) > 0 && FILTER[hash(address) % COUNTERS].load(Ordering::Relaxed) > 0
}

/// Returns the number of allocations that lie in a pool.
#[inline]
pub(super) fn placed() -> usize {
    PLACED.load(Ordering::Relaxed)
}

/// Adds an allocation at `address`.
pub(super) fn insert(address: usize, traced: Traced) {
    let hash = hash(address);
    LIVE.fetch_add(1, Ordering::Relaxed);
    FILTER[hash % COUNTERS].fetch_add(1, Ordering::Relaxed);
    if traced.piece.is_some() {
        PLACED.fetch_add(1, Ordering::Relaxed);
    }
    let _pause = Pause::in_table();
    let former = lock(map(hash)).insert(address, traced);
    debug_assert!(former.is_none(), "an allocation leaves the table before its memory is freed");
}

/// Removes the allocation at `address`.
pub(super) fn remove(address: usize) -> Option<Traced> {
    let hash = hash(address);
    let traced = {
        let _pause = Pause::in_table();
        lock(map(hash)).remove(&address)
    }?;
    FILTER[hash % COUNTERS].fetch_sub(1, Ordering::Relaxed);
    LIVE.fetch_sub(1, Ordering::Relaxed);
    if traced.piece.is_some() {
        PLACED.fetch_sub(1, Ordering::Relaxed);
    }
    Some(traced)
}

/// Finds the allocation that holds all of `bytes`, and returns the result of `look`. `look` must not allocate.
pub(super) fn find<R>(bytes: &[u8], look: impl Fn(&Traced) -> Option<R>) -> Option<R> {
    if bytes.is_empty() || LIVE.load(Ordering::Relaxed) == 0 {
        return None;
    }
    let address = bytes.as_ptr() as usize;
    let end = address + bytes.len();
    TABLE.iter().find_map(|map| {
        let _pause = Pause::in_table();
        let map = lock(map);
        let (&start, traced) = map.range(..=address).next_back()?;
        if end <= start + traced.layout.size() { look(traced) } else { None }
    })
}

fn map(hash: usize) -> &'static Mutex<BTreeMap<usize, Traced>> {
    &TABLE[(hash / COUNTERS) % MAPS]
}

/// Mixes the bits of an address. (Fibonacci hashing: Knuth, The Art of Computer Programming, volume 3, section 6.4.)
#[inline]
fn hash(address: usize) -> usize {
    ((address as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as usize
}
