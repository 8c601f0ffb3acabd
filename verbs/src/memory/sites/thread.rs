//! What the tracing allocator knows of the current thread: the node that the thread executes.
//!
//! The state has a constant start value and no destructor. The allocator may therefore use it at any time in the life of a
//! thread, and using it never allocates.

use std::cell::Cell;
use std::marker::PhantomData;

use super::report::NodeSite;
use super::table::SiteTable;

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
}

thread_local! {
    static CURRENT: Cell<ThreadUse> = const { Cell::new(ThreadUse { execution: None, in_live: false }) };
}

/// Returns the execution of this thread.
#[inline]
pub(in crate::memory) fn current() -> Option<Execution> {
    CURRENT.with(Cell::get).execution
}

/// Returns whether this thread holds a lock of the live allocations. All memory that it allocates and frees then is of their index.
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

/// An execution of a node on this thread, from [`SiteAllocator::enter`](super::SiteAllocator::enter). The execution ends when the
/// guard is dropped, also by a panic.
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

    /// Pauses the execution: the allocations of the thread are not traced. Code of this module that allocates runs in a pause, so
    /// the allocator never calls itself for a traced allocation.
    pub(in crate::memory) fn pause() -> Self {
        Self::begin(|former| ThreadUse { execution: None, ..former })
    }

    /// Pauses the execution for an access to the live allocations under their lock.
    pub(super) fn in_live() -> Self {
        Self::begin(|_| ThreadUse { execution: None, in_live: true })
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
