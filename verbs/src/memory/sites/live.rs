//! The live traced allocations of the process, by address.
//!
//! The index has all allocations that executions of nodes have made, on the heap and in pools. An allocation leaves the
//! index before its memory is freed, so a later allocation at its address is not mistaken for it.

use std::alloc::Layout;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use super::report::NodeSite;
use super::table::SiteTable;
use super::thread::NodeScope;
use crate::memory::index::AddressIndex;
use crate::memory::pool::held::HeldPiece;

/// A live traced allocation.
pub(in crate::memory) struct Traced {
    /// The table that the site belongs to.
    pub(in crate::memory) sites: &'static SiteTable,
    pub(in crate::memory) site: NodeSite,
    pub(in crate::memory) layout: Layout,
    /// The piece of the pool that the allocation lies in, or `None` on the heap.
    pub(in crate::memory) piece: Option<HeldPiece>,
}

/// Number of indexes. Threads that allocate at once seldom need the same one.
const INDEXES: usize = 16;

/// Number of counters of the filter.
const COUNTERS: usize = 8192;

/// The allocations. An index is chosen by the start address.
static LIVE: [AddressIndex<Traced>; INDEXES] = [const { AddressIndex::new() }; INDEXES];

/// Numbers of allocations whose addresses have the same hash. Nearly all addresses that the process frees are in no index, and
/// a counter of 0 shows this without a lock.
///
/// The accesses are relaxed: a thread that frees memory got the address from the thread that allocated it, through some
/// synchronisation, and so sees the counter that [`insert`] has raised.
static FILTER: [AtomicU32; COUNTERS] = [const { AtomicU32::new(0) }; COUNTERS];

/// Number of live traced allocations. While there are none, a release of memory takes one load, and leaves the filter out of the caches.
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// Number of live traced allocations in pools. While there are none, a look-up for a device takes one load.
static PLACED: AtomicUsize = AtomicUsize::new(0);

/// Returns whether any traced allocation lies in a pool.
#[inline]
pub(super) fn any_placed() -> bool {
    PLACED.load(Ordering::Relaxed) > 0
}

/// Returns whether an allocation may start at `address`. If this returns false, none does.
#[inline]
pub(in crate::memory) fn may_hold(address: usize) -> bool {
    COUNT.load(Ordering::Relaxed) > 0 && FILTER[hash(address) % COUNTERS].load(Ordering::Relaxed) > 0
}

/// Adds an allocation at `start`.
pub(in crate::memory) fn insert(start: *mut u8, traced: Traced) {
    let hash = hash(start.addr());
    COUNT.fetch_add(1, Ordering::Relaxed);
    PLACED.fetch_add(usize::from(traced.piece.is_some()), Ordering::Relaxed);
    FILTER[hash % COUNTERS].fetch_add(1, Ordering::Relaxed);
    let _pause = NodeScope::in_live();
    index(hash).insert(start.addr(), traced.layout.size(), traced);
}

/// Removes the allocation at `start`.
pub(in crate::memory) fn remove(start: *mut u8) -> Option<Traced> {
    let hash = hash(start.addr());
    let traced = {
        let _pause = NodeScope::in_live();
        index(hash).remove(start.addr())
    }?;
    FILTER[hash % COUNTERS].fetch_sub(1, Ordering::Relaxed);
    COUNT.fetch_sub(1, Ordering::Relaxed);
    PLACED.fetch_sub(usize::from(traced.piece.is_some()), Ordering::Relaxed);
    Some(traced)
}

/// Finds the allocation that holds all of `bytes`, and returns the result of `look`. `look` must not allocate.
pub(in crate::memory) fn find<R>(bytes: &[u8], look: impl Fn(&Traced) -> Option<R>) -> Option<R> {
    if COUNT.load(Ordering::Relaxed) == 0 {
        return None;
    }
    let _pause = NodeScope::in_live();
    LIVE.iter().find_map(|index| index.find(bytes.as_ptr().addr(), bytes.len(), |_, traced| look(traced)))
}

fn index(hash: usize) -> &'static AddressIndex<Traced> {
    &LIVE[(hash / COUNTERS) % INDEXES]
}

/// Mixes the bits of an address. (Fibonacci hashing: Knuth, The Art of Computer Programming, volume 3, section 6.4.)
#[inline]
fn hash(address: usize) -> usize {
    ((address as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as usize
}
