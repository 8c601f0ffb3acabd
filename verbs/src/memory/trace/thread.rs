//! What the allocator knows of the current thread: the node that the thread executes.
//!
//! The state has a constant start value and no destructor. The allocator may therefore use it at any time in the life of a
//! thread, and using it never allocates.

use std::cell::Cell;
use std::marker::PhantomData;

use super::state::TraceState;

/// The use of the current thread.
#[derive(Clone, Copy)]
pub(super) enum Current {
    /// The thread executes no node, or it runs code of the allocator itself.
    Idle,
    /// The thread asks whether the tracing allocator is the global allocator.
    Probe,
    /// The thread executes a node.
    Node(Execution),
}

/// One execution of a node.
#[derive(Clone, Copy)]
pub(super) struct Execution {
    pub(super) trace: &'static TraceState,
    pub(super) node: u32,
    /// Number of allocations that this execution has made before.
    pub(super) ordinal: u32,
    /// Whether allocations of the node may be placed in the pool.
    pub(super) places: bool,
}

thread_local! {
    static CURRENT: Cell<Current> = const { Cell::new(Current::Idle) };
    /// Whether the thread holds a lock of the table of live allocations.
    static IN_TABLE: Cell<bool> = const { Cell::new(false) };
}

/// Returns the use of this thread.
#[inline]
pub(super) fn current() -> Current {
    CURRENT.with(Cell::get)
}

/// Changes the use of this thread, and returns the former use.
pub(super) fn replace(current: Current) -> Current {
    CURRENT.with(|cell| cell.replace(current))
}

/// Returns whether this thread holds a lock of the table. All memory that it allocates and frees then is the table's own.
pub(super) fn is_in_table() -> bool {
    IN_TABLE.with(Cell::get)
}

/// While this value lives, the thread executes no node, so its allocations are not traced. Code of this module that allocates
/// runs in such a pause, so the allocator never calls itself for a traced allocation.
pub(super) struct Pause {
    former: Current,
    was_in_table: bool,
    _of_this_thread: PhantomData<*const ()>,
}

impl Pause {
    /// Pauses the execution.
    pub(super) fn begin() -> Self {
        Self { former: replace(Current::Idle), was_in_table: is_in_table(), _of_this_thread: PhantomData }
    }

    /// Pauses the execution for an access to the table under its lock.
    pub(super) fn in_table() -> Self {
        let pause = Self::begin();
        IN_TABLE.with(|cell| cell.set(true));
        pause
    }
}

impl Drop for Pause {
    fn drop(&mut self) {
        IN_TABLE.with(|cell| cell.set(self.was_in_table));
        replace(self.former);
    }
}
