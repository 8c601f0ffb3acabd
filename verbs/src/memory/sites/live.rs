//! The live traced allocations of the process, by address, and the node that a thread executes.
//!
//! The index has all allocations that executions of nodes have made, on the heap and in pools. An allocation
//! leaves the index before its memory is freed, so a later allocation at its address is not mistaken for it.

use std::alloc::Layout;
use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use super::table::{NodeSite, SiteTable};
use crate::memory::index::AddressIndex;
use crate::memory::pool::shared::HeldExtent;

/// A live traced allocation.
pub(in crate::memory) struct Traced {
    /// The table that the site belongs to.
    pub(in crate::memory) sites: &'static SiteTable,
    pub(in crate::memory) site: NodeSite,
    pub(in crate::memory) layout: Layout,
    /// The extent of the pool that the allocation lies in, or `None` on the heap.
    pub(in crate::memory) extent: Option<Arc<HeldExtent>>,
}

/// Memory that the next traced allocation of its layout on this thread gets, instead of other memory.
#[cfg_attr(not(feature = "tract"), allow(dead_code, reason = "only tensors of tract are offered memory"))]
pub(in crate::memory) struct Offered {
    pub(in crate::memory) layout: Layout,
    /// `None` once an allocation has it.
    pub(in crate::memory) extent: Cell<Option<Arc<HeldExtent>>>,
}

/// Number of indexes. Threads that allocate at once seldom need the same one.
const INDEXES: usize = 16;

/// Number of counters of the filter.
const COUNTERS: usize = 8192;

/// The allocations. An index is chosen by the start address.
static LIVE: [AddressIndex<Traced>; INDEXES] = [const { AddressIndex::new() }; INDEXES];

/// Numbers of allocations whose addresses have the same hash. Nearly all addresses that the process frees are
/// in no index, and a counter of 0 shows this without a lock.
///
/// The accesses are relaxed: a thread that frees memory got the address from the thread that allocated it,
/// through some synchronisation, and so sees the counter that [`insert`] has raised.
static FILTER: [AtomicU32; COUNTERS] = [const { AtomicU32::new(0) }; COUNTERS];

/// Number of live traced allocations. While there are none, a release of memory takes one load, and leaves
/// the filter out of the caches.
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// Number of live traced allocations in pools. While there are none, a lookup for a device takes one load.
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
    PLACED.fetch_add(usize::from(traced.extent.is_some()), Ordering::Relaxed);
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
    PLACED.fetch_sub(usize::from(traced.extent.is_some()), Ordering::Relaxed);
    Some(traced)
}

/// Finds the allocation that holds all of `bytes`, and returns the result of `then`. `then` must not
/// allocate.
pub(in crate::memory) fn find<R>(bytes: &[u8], then: impl Fn(&Traced) -> Option<R>) -> Option<R> {
    if COUNT.load(Ordering::Relaxed) == 0 {
        return None;
    }
    let _pause = NodeScope::in_live();
    LIVE.iter().find_map(|index| index.find(bytes.as_ptr().addr(), bytes.len(), |_, traced| then(traced)))
}

fn index(hash: usize) -> &'static AddressIndex<Traced> {
    &LIVE[(hash / COUNTERS) % INDEXES]
}

/// Mixes the bits of an address. (Fibonacci hashing: Knuth, The Art of Computer Programming, volume 3,
/// section 6.4.)
#[inline]
fn hash(address: usize) -> usize {
    ((address as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as usize
}

/// Runs `work`, on whose way an allocation gets the memory of `offered`.
#[cfg(feature = "tract")]
pub(in crate::memory) fn offering<R>(offered: &Offered, work: impl FnOnce() -> R) -> R {
    let _scope = NodeScope::begin(|former| ThreadUse { offered: Some(offered), ..former });
    work()
}

/// Takes what is offered to an allocation of this layout.
pub(in crate::memory) fn take_offered(layout: Layout) -> Option<Arc<HeldExtent>> {
    let offered = CURRENT.with(Cell::get).offered?;
    // SAFETY: `offering` has put the pointer here, borrows what it points to, and removes the pointer
    // before it returns or unwinds. Only this thread uses it.
    let offered = unsafe { &*offered };
    if offered.layout == layout { offered.extent.take() } else { None }
}

/// A site of a node, and the table that it belongs to.
pub(in crate::memory) type SiteOf = (&'static SiteTable, NodeSite);

/// One execution of a node.
#[derive(Clone, Copy, Debug)]
pub(in crate::memory) struct Execution {
    pub(in crate::memory) sites: &'static SiteTable,
    /// The site of the next allocation.
    pub(in crate::memory) next: NodeSite,
    /// Whether allocations of the node may be placed in the pool.
    pub(in crate::memory) places: bool,
}

/// The use of a thread.
#[derive(Clone, Copy, Debug)]
struct ThreadUse {
    /// `None` also while the thread runs code of the allocator itself.
    execution: Option<Execution>,
    /// Whether the thread holds a lock of the index of live allocations.
    in_live: bool,
    /// What is offered to an allocation. It lives as long as the pointer is here ([`offering`]).
    offered: Option<*const Offered>,
}

// The state has a constant start value and no destructor. The allocator may therefore use it at any time in
// the life of a thread, and using it never allocates.
thread_local! {
    static CURRENT: Cell<ThreadUse> =
        const { Cell::new(ThreadUse { execution: None, in_live: false, offered: None }) };
}

/// Returns the execution of this thread.
#[inline]
pub(in crate::memory) fn current() -> Option<Execution> {
    CURRENT.with(Cell::get).execution
}

/// Returns whether this thread holds a lock of the live allocations. All memory that it then allocates or
/// frees belongs to their index.
pub(in crate::memory) fn is_in_live() -> bool {
    CURRENT.with(Cell::get).in_live
}

/// Counts an allocation of `execution`, which is that of this thread, and returns the site.
pub(in crate::memory) fn next_site(execution: Execution) -> SiteOf {
    let Execution { sites, next, .. } = execution;
    let following = NodeSite { ordinal: next.ordinal.saturating_add(1), ..next };
    let execution = Some(Execution { next: following, ..execution });
    CURRENT.with(|cell| cell.set(ThreadUse { execution, ..cell.get() }));
    (sites, next)
}

/// An execution of a node on this thread, from [`SiteAllocator::enter`](super::SiteAllocator::enter). The
/// execution ends when the guard is dropped, also by a panic.
#[derive(Debug)]
#[must_use = "the execution ends when the guard is dropped"]
pub struct NodeScope {
    former: ThreadUse,
    /// The guard belongs to its thread.
    _of_this_thread: PhantomData<*const ()>,
}

impl NodeScope {
    pub(super) fn enter(execution: Execution) -> Self {
        Self::begin(|former| ThreadUse { execution: Some(execution), ..former })
    }

    /// Pauses the execution: the allocations of the thread are not traced. Code of this module that allocates
    /// runs in a pause, so the allocator never calls itself for a traced allocation.
    pub(in crate::memory) fn pause() -> Self {
        Self::begin(|former| ThreadUse { execution: None, ..former })
    }

    /// Pauses the execution for an access to the live allocations under their lock.
    pub(super) fn in_live() -> Self {
        Self::begin(|former| ThreadUse { execution: None, in_live: true, ..former })
    }

    fn begin(of: impl FnOnce(ThreadUse) -> ThreadUse) -> Self {
        let former = CURRENT.with(|cell| cell.replace(of(cell.get())));
        Self { former, _of_this_thread: PhantomData }
    }
}

impl Drop for NodeScope {
    fn drop(&mut self) {
        CURRENT.with(|cell| cell.set(self.former));
    }
}
