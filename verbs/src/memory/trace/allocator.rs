//! The global allocator that traces.

use std::alloc::{GlobalAlloc, Layout, System};
use std::mem::ManuallyDrop;

use super::report::NodeSite;
use super::state::room;
use super::table::{self, Traced};
use super::thread::{self, Current, Execution, Pause};

/// A global allocator that numbers the allocations of graph nodes, and places those that are sent in registered memory. All
/// other allocations go to the allocator `A`. The [module](super) has an example.
///
/// ```
/// use std::alloc::System;
/// use tonic_rdma_verbs::memory::trace::TracingAllocator;
///
/// #[global_allocator]
/// static ALLOCATOR: TracingAllocator = TracingAllocator::new(System);
/// # fn main() {}
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct TracingAllocator<A = System> {
    inner: A,
}

impl<A> TracingAllocator<A> {
    /// Makes an allocator that passes on to `inner` what it does not place.
    ///
    /// ```
    /// use std::alloc::System;
    /// use tonic_rdma_verbs::memory::trace::TracingAllocator;
    ///
    /// static ALLOCATOR: TracingAllocator = TracingAllocator::new(System);
    /// ```
    pub const fn new(inner: A) -> Self {
        Self { inner }
    }
}

/// The content of new memory.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Content {
    Any,
    Zeros,
}

// SAFETY:
// - Memory that is not placed comes from `inner`, which keeps the contract of `GlobalAlloc`, and returns to `inner`.
// - Memory that is placed lies in a piece of a pool. The table holds the piece until the memory is freed, the pool gives the piece
//   to no other user meanwhile, and the piece has room for the layout from an address of its alignment on (`Place`).
// - No device and no peer writes to this memory, because slabs of `Purpose::Buffer` are registered without that right.
// - `table::remove` says which of the two a pointer is: an allocation is in the table from its `alloc` to its `dealloc`.
// - No method unwinds: `AbortOnUnwind` ends the process instead.
unsafe impl<A: GlobalAlloc> GlobalAlloc for TracingAllocator<A> {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        match thread::current() {
            // SAFETY: the caller keeps the contract of `alloc`.
            Current::Idle => unsafe { self.inner.alloc(layout) },
            // SAFETY: as above.
            current => unsafe { self.alloc_for(current, layout, Content::Any) },
        }
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        match thread::current() {
            // SAFETY: the caller keeps the contract of `alloc_zeroed`.
            Current::Idle => unsafe { self.inner.alloc_zeroed(layout) },
            // SAFETY: as above.
            current => unsafe { self.alloc_for(current, layout, Content::Zeros) },
        }
    }

    #[inline]
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        if table::may_hold(pointer.addr()) && forget(pointer) {
            return;
        }
        // SAFETY:
        // - The pointer came from `inner`, because it is no piece of a pool.
        // - The layout is that of the allocation, as the caller promises.
        unsafe { self.inner.dealloc(pointer, layout) }
    }

    #[inline]
    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if matches!(thread::current(), Current::Node(_)) || table::may_hold(pointer.addr()) {
            // SAFETY: the caller keeps the contract of `realloc`.
            return unsafe { self.realloc_traced(pointer, layout, size) };
        }
        // SAFETY:
        // - The pointer came from `inner`, because the table does not have it.
        // - The caller keeps the contract of `realloc`.
        unsafe { self.inner.realloc(pointer, layout, size) }
    }
}

impl<A: GlobalAlloc> TracingAllocator<A> {
    /// Allocates memory on a thread that executes a node, or asks whether this allocator is installed.
    ///
    /// # Safety
    /// The layout is not of size zero.
    #[cold]
    unsafe fn alloc_for(&self, current: Current, layout: Layout, content: Content) -> *mut u8 {
        let abort = AbortOnUnwind;
        let start = if let Current::Node(execution) = current {
            let site = next_site(execution);
            let placed = if execution.places { place(execution, site, layout, content) } else { None };
            placed.unwrap_or_else(|| {
                // SAFETY: the layout is not of size zero, as the caller promises.
                let start = unsafe { self.alloc_inner(layout, content) };
                record(start, Traced { trace: execution.trace.number(), site, layout, piece: None });
                start
            })
        } else {
            // This answers the question.
            thread::replace(Current::Idle);
            // SAFETY: the layout is not of size zero, as the caller promises.
            unsafe { self.alloc_inner(layout, content) }
        };
        abort.defuse();
        start
    }

    /// Reallocates memory that may be in the table, on a thread that may execute a node. An allocation of the table keeps its
    /// site.
    ///
    /// # Safety
    /// That of [`GlobalAlloc::realloc`].
    #[cold]
    unsafe fn realloc_traced(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        let abort = AbortOnUnwind;
        let execution = match thread::current() {
            Current::Node(execution) => Some(execution),
            Current::Idle | Current::Probe => None,
        };
        // While this thread holds a lock of the table, it reallocates only memory of the table, which comes from `inner`.
        let may_be_known = !thread::is_in_table() && table::may_hold(pointer.addr());
        let known = if may_be_known { table::remove(pointer.addr()) } else { None };
        // SAFETY: the size does not overflow when rounded up to the alignment, as the caller promises.
        let wanted = unsafe { Layout::from_size_align_unchecked(size, layout.align()) };
        let start = match (known, execution) {
            // SAFETY: the caller keeps the contract of `realloc`, and the pointer came from `inner`.
            (None, None) => unsafe { self.inner.realloc(pointer, layout, size) },
            (Some(known), execution) => {
                // SAFETY: as the caller promises, and `known` was the entry of the pointer.
                unsafe { self.realloc_known(pointer, known, wanted, execution) }
            }
            (None, Some(execution)) => {
                let trace = execution.trace.number();
                let known = Traced { trace, site: next_site(execution), layout, piece: None };
                // SAFETY: as the caller promises, and the pointer came from `inner`.
                unsafe { self.realloc_known(pointer, known, wanted, Some(execution)) }
            }
        };
        abort.defuse();
        start
    }

    /// Reallocates memory that `known` describes, and that is not in the table. Adds the result to the table, or the old
    /// memory if there is no new memory.
    ///
    /// # Safety
    /// - That of [`GlobalAlloc::realloc`].
    /// - `known` describes the memory, and has its piece if it lies in a pool.
    unsafe fn realloc_known(
        &self,
        pointer: *mut u8,
        mut known: Traced,
        wanted: Layout,
        execution: Option<Execution>,
    ) -> *mut u8 {
        let former = known.layout;
        if let Some(piece) = &known.piece {
            let room = room(piece, pointer);
            if wanted.size() <= room && wanted.size() >= room / 4 {
                known.layout = wanted;
                record(pointer, known);
                return pointer;
            }
        }
        let may_place = known.piece.is_some() || execution.is_some_and(|execution| execution.places);
        let execution = execution.filter(|execution| may_place && execution.trace.number() == known.trace);
        let placed = execution.and_then(|execution| place(execution, known.site, wanted, Content::Any));
        let start = match placed {
            Some(start) => start,
            None if known.piece.is_none() => {
                // SAFETY:
                // - The pointer came from `inner`, because it has no piece, with this layout.
                // - The new size keeps the contract, as the caller promises.
                let start = unsafe { self.inner.realloc(pointer, former, wanted.size()) };
                if start.is_null() {
                    record(pointer, known);
                } else {
                    known.layout = wanted;
                    record(start, known);
                }
                return start;
            }
            None => {
                // SAFETY: the new size is not zero, as the caller promises.
                let start = unsafe { self.inner.alloc(wanted) };
                if start.is_null() {
                    record(pointer, known);
                    return start;
                }
                let Traced { trace, site, .. } = known;
                record(start, Traced { trace, site, layout: wanted, piece: None });
                start
            }
        };
        // SAFETY:
        // - Both memories have at least this size.
        // - They do not overlap: the old one is not freed yet.
        unsafe { std::ptr::copy_nonoverlapping(pointer, start, former.size().min(wanted.size())) };
        if known.piece.is_none() {
            // SAFETY:
            // - The pointer came from `inner`, because it has no piece, with this layout.
            // - It is not used any more: its content is in the new memory.
            unsafe { self.inner.dealloc(pointer, former) };
        }
        let _pause = Pause::begin();
        drop(known);
        start
    }

    /// Allocates memory of the inner allocator.
    ///
    /// # Safety
    /// The layout is not of size zero.
    unsafe fn alloc_inner(&self, layout: Layout, content: Content) -> *mut u8 {
        match content {
            // SAFETY: the layout is not of size zero, as the caller promises.
            Content::Any => unsafe { self.inner.alloc(layout) },
            // SAFETY: as above.
            Content::Zeros => unsafe { self.inner.alloc_zeroed(layout) },
        }
    }
}

/// Counts an allocation of the execution on this thread, and returns its site.
fn next_site(execution: Execution) -> NodeSite {
    let Execution { node, ordinal, .. } = execution;
    thread::replace(Current::Node(Execution { ordinal: ordinal.saturating_add(1), ..execution }));
    NodeSite { node, ordinal }
}

/// Places an allocation of `site` in the pool, if memory of this site was sent and the pool has room. Adds it to the table.
fn place(execution: Execution, site: NodeSite, layout: Layout, content: Content) -> Option<*mut u8> {
    let _pause = Pause::begin();
    let place = execution.trace.place(site, layout)?;
    let start = place.start;
    if content == Content::Zeros {
        // SAFETY: the place has room for the layout, and no other user.
        unsafe { start.write_bytes(0, layout.size()) };
    }
    let piece = Some(place.piece);
    table::insert(start.addr(), Traced { trace: execution.trace.number(), site, layout, piece });
    Some(start)
}

/// Adds the allocation at `start` to the table, unless the allocation has failed.
fn record(start: *mut u8, traced: Traced) {
    if !start.is_null() {
        let _pause = Pause::begin();
        table::insert(start.addr(), traced);
    }
}

/// Removes the allocation at `pointer` from the table. Returns true if it lay in a pool, and has gone back to the pool.
#[cold]
fn forget(pointer: *mut u8) -> bool {
    // While this thread holds a lock of the table, it frees only memory of the table, which comes from `inner`.
    if thread::is_in_table() {
        return false;
    }
    let abort = AbortOnUnwind;
    let _pause = Pause::begin();
    let placed = table::remove(pointer.addr()).is_some_and(|traced| traced.piece.is_some());
    abort.defuse();
    placed
}

/// Ends the process when it is dropped. An allocator must not unwind.
struct AbortOnUnwind;

impl AbortOnUnwind {
    fn defuse(self) {
        let _ = ManuallyDrop::new(self);
    }
}

impl Drop for AbortOnUnwind {
    #[expect(
        clippy::disallowed_methods,
        reason = "to unwind out of a global allocator is undefined behaviour"
    )]
    fn drop(&mut self) {
        std::process::abort();
    }
}
