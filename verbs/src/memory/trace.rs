//! Traces: registered memory for the tensors of a graph that are sent, without a change of the engine that
//! allocates them.
//!
//! An engine that executes the nodes of a data-flow graph allocates its tensors from the global allocator.
//! This module has a global allocator that knows which node a thread executes, because the graph's runtime
//! says so. A **site** is a node and an ordinal: the number of allocations that the execution of the node has
//! made before. The first execution shows which sites allocate the tensors that are sent. From the next
//! execution on, the allocator places the allocations of these sites in a pool
//! ([`Pool::for_sending`](super::Pool::for_sending)), so that a device can send the tensors without a copy.
//! This is the analysis of Xue et al., *Fast Distributed Deep Learning over RDMA* (EuroSys 2019), section
//! 3.4.
//!
//! ```text
//!  runtime of the graph                 SiteAllocator                   TracingAllocator
//!  enter(node) ────────────────────────▶ node, ordinal 0 ─────────────▶ thread
//!     │ the engine computes, and allocates                                │ site was sent before: pool
//!     │                                                                   │ otherwise: heap
//!     ▼                                                                   ▼
//!  crossed(bytes), then send ──────────▶ site of these bytes ◀────────── table: address ─▶ site, extent of the pool
//! ```
//!
//! This is the second front of [`sites`](super::sites): the handle, the table of sites and the decision are
//! those of the programs that allocate their buffers from the handle. Such programs need no global allocator.
//!
//! # How to use it
//!
//! The main file of the program declares the allocator. It costs some nanoseconds for each allocation that
//! belongs to no node.
//!
//! ```
//! use std::alloc::System;
//! use tonic_rdma_verbs::memory::sites::SiteAllocator;
//! use tonic_rdma_verbs::memory::trace::TracingAllocator;
//!
//! #[global_allocator]
//! static ALLOCATOR: TracingAllocator = TracingAllocator::new(System);
//!
//! /// Stands for a kernel of an engine, which knows nothing of registered memory.
//! fn convolution() -> Vec<u8> {
//!     vec![7; 1 << 20]
//! }
//!
//! let trace = SiteAllocator::tracing(1 << 30)?;
//! for step in 1..=3 {
//!     let activations = {
//!         let _execution = trace.enter(7); // the number of the node
//!         convolution()
//!     };
//!     let crossed = trace.crossed(&activations); // the runtime is about to send them
//!     assert_eq!(crossed.site.map(|site| (site.node, site.ordinal)), Some((7, 0)));
//!     assert_eq!(crossed.registered, step > 1);
//! }
//! println!("{}", trace.report());
//! # Ok::<(), tonic_rdma_verbs::VerbsError>(())
//! ```
//!
//! The runtime sends the memory as [`Bytes`](bytes::Bytes) with an owner (`Bytes::from_owner`), such as a
//! tensor that the engine shares. `Tensor::registered` of the crate tonic-rdma-tensor recognises their
//! address, and returns a [`Lease`](super::Lease) that holds the `Bytes`. So the engine can neither change
//! nor free the tensor while a device reads it.
//!
//! # What is placed
//!
//! - Only allocations within an execution ([`SiteAllocator::enter`](super::sites::SiteAllocator::enter)), on
//!   its thread. They may have any size: a small tensor whose shape is not known before is read by the peer
//!   like a large one, so it would be copied without a site. Therefore enter a node only while its engine
//!   computes, so that other code takes no ordinals.
//! - Of these, the sites of this node that were sent, and allocations with the size and alignment of one that
//!   was sent. A node may make other allocations in its first execution than later, because it fills a cache,
//!   and the ordinals then change.
//! - An allocation that grows (`realloc`) keeps its site, and so does memory that another node passes on or
//!   changes in place.
//! - If the pool is full, the allocation is on the heap. This is not an error. The report counts it.
//!
//! # Memory and safety
//!
//! - Memory that was placed is ordinary memory for the program. Any thread may free it, also after the trace
//!   was dropped.
//! - Its slabs are registered for reading by the own device only, or for reading of exactly the sent bytes by
//!   one peer. No peer can write to it. A device that ignores this exposes what the slabs hold: tensors that
//!   were sent, and other allocations of the same nodes of equal size and alignment.
//! - The memory is shared memory. A child after `fork` that does not call `exec` must not change it.
//! - The allocator's own code allocates from the inner allocator. It takes no lock that is held while memory
//!   is sent.
//! - The owner of sent `Bytes` is dropped where the device's completion is taken. Its drop must not wait for
//!   this device.
//!
//! # Cost
//!
//! `cargo bench --bench memory_pool -- trace` measures an allocation and its release: outside of executions,
//! in an execution on the heap, and in the pool. The book's page on allocation sites has figures.

use std::alloc::{GlobalAlloc, Layout, System};
use std::mem::ManuallyDrop;
use std::sync::Arc;

use super::sites::live::{self, Execution, SiteOf, Traced};
use super::sites::table::PlacedMemory;
use super::sites::{NodeScope, Site};

/// A global allocator that numbers the allocations of graph nodes, and places those that are sent in
/// registered memory. All other allocations go to the allocator `A`. The [module](super) has an example.
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

// SAFETY:
// - Memory that is not placed comes from `inner`, which keeps the contract of `GlobalAlloc`, and returns to
//   `inner`.
// - Memory that is placed lies in an extent of a pool. The table holds the extent until the memory is freed,
//   the pool gives the extent to no other user meanwhile, and the extent has room for the layout from an
//   address of its alignment on (`PlacedMemory`).
// - No device and no peer writes to this memory, because slabs of `Purpose::Buffer` are registered without
//   that right. Memory that was offered (`HostedTensor`) is written as a `MemRegion`, while the owner of the
//   allocation can't use it.
// - `live::remove` says which of the two a pointer is: an allocation is in the table from its `alloc` to its
//   `dealloc`.
// - No method unwinds: `shielded` ends the process instead.
unsafe impl<A: GlobalAlloc> GlobalAlloc for TracingAllocator<A> {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        match live::current() {
            // SAFETY: the caller keeps the contract of `alloc`.
            None => unsafe { self.inner.alloc(layout) },
            // SAFETY: as above.
            Some(execution) => unsafe { self.alloc_in(execution, layout, false) },
        }
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        match live::current() {
            // SAFETY: the caller keeps the contract of `alloc_zeroed`.
            None => unsafe { self.inner.alloc_zeroed(layout) },
            // SAFETY: as above.
            Some(execution) => unsafe { self.alloc_in(execution, layout, true) },
        }
    }

    #[inline]
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        if live::may_hold(pointer.addr()) && forget(pointer) {
            return;
        }
        // SAFETY:
        // - The pointer came from `inner`, because it is no extent of a pool.
        // - The layout is that of the allocation, as the caller promises.
        unsafe { self.inner.dealloc(pointer, layout) }
    }

    #[inline]
    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if live::current().is_some() || live::may_hold(pointer.addr()) {
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
    /// Allocates memory for the next site of `execution`, and adds it to the table: in the pool, if the
    /// execution may place memory of this site there.
    ///
    /// # Safety
    /// The layout is not of size zero.
    #[cold]
    unsafe fn alloc_in(&self, execution: Execution, layout: Layout, zeroed: bool) -> *mut u8 {
        let (sites, site) = live::next_site(execution);
        shielded(|| {
            if let Some(extent) = (!zeroed).then(|| live::take_offered(layout)).flatten() {
                // `HostedTensor`, which offers it, has checked that the layout fits.
                let start = extent.as_ptr();
                live::insert(start, Traced { sites, site, layout, extent: Some(extent) });
                return start;
            }
            let (start, extent) = match place((sites, site), Some(execution), layout) {
                Some(PlacedMemory { extent, start }) => {
                    if zeroed {
                        // SAFETY: the memory has room for the layout, and no other user.
                        unsafe { start.write_bytes(0, layout.size()) };
                    }
                    (start, Some(Arc::new(extent)))
                }
                // SAFETY: the layout is not of size zero, as the caller promises.
                None if zeroed => (unsafe { self.inner.alloc_zeroed(layout) }, None),
                // SAFETY: as above.
                None => (unsafe { self.inner.alloc(layout) }, None),
            };
            if !start.is_null() {
                live::insert(start, Traced { sites, site, layout, extent });
            }
            start
        })
    }

    /// Reallocates memory that may be in the table, on a thread that may execute a node. An allocation of the
    /// table keeps its site.
    ///
    /// # Safety
    /// That of [`GlobalAlloc::realloc`].
    #[cold]
    unsafe fn realloc_traced(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        let execution = live::current();
        // While this thread holds a lock of the table, it reallocates only memory of the table, which comes
        // from `inner`.
        let may_be_known = !live::is_in_live() && live::may_hold(pointer.addr());
        let known = if may_be_known { shielded(|| live::remove(pointer)) } else { None };
        let (sites, site) = match (&known, execution) {
            (Some(known), _) => (known.sites, known.site),
            (None, Some(execution)) => live::next_site(execution),
            // SAFETY: the caller keeps the contract of `realloc`, and the pointer came from `inner`.
            (None, None) => return unsafe { self.inner.realloc(pointer, layout, size) },
        };
        // SAFETY: the size does not overflow when rounded up to the alignment, as the caller promises.
        let wanted = unsafe { Layout::from_size_align_unchecked(size, layout.align()) };
        let former = known.and_then(|known| known.extent);
        let insert =
            |start, layout, extent| shielded(|| live::insert(start, Traced { sites, site, layout, extent }));
        if let Some(extent) = &former {
            let room = extent.capacity() - (pointer.addr() - extent.as_ptr().addr());
            if size <= room && size >= room / 4 {
                insert(pointer, wanted, former);
                return pointer;
            }
        }
        let place = shielded(|| place((sites, site), execution, wanted));
        if place.is_none() && former.is_none() {
            // SAFETY:
            // - The pointer came from `inner`, because it has no extent, with this layout.
            // - The new size keeps the contract, as the caller promises.
            let start = unsafe { self.inner.realloc(pointer, layout, size) };
            // Without new memory, the old memory stays in use.
            let (held, layout) = if start.is_null() { (pointer, layout) } else { (start, wanted) };
            insert(held, layout, None);
            return start;
        }
        let (start, extent) = match place {
            Some(PlacedMemory { extent, start }) => {
                let _pause = NodeScope::pause();
                (start, Some(Arc::new(extent)))
            }
            // SAFETY: the new size is not zero, as the caller promises.
            None => (unsafe { self.inner.alloc(wanted) }, None),
        };
        if start.is_null() {
            // The old memory stays in use.
            insert(pointer, layout, former);
            return start;
        }
        insert(start, wanted, extent);
        // SAFETY:
        // - Both memories have at least this size.
        // - They do not overlap: the old one is not freed yet.
        unsafe { std::ptr::copy_nonoverlapping(pointer, start, layout.size().min(size)) };
        if former.is_none() {
            // SAFETY:
            // - The pointer came from `inner`, because it has no extent, with this layout.
            // - It is not used any more: its content is in the new memory.
            unsafe { self.inner.dealloc(pointer, layout) };
        }
        shielded(|| drop(former));
        start
    }
}

/// Returns memory of the pool for an allocation of a site, if `execution` may place it, and the pool has
/// room.
fn place((sites, site): SiteOf, execution: Option<Execution>, layout: Layout) -> Option<PlacedMemory> {
    let places = execution.is_some_and(|execution| execution.places && std::ptr::eq(execution.sites, sites));
    if places { sites.place(&Site::Node(site), layout) } else { None }
}

/// Removes the allocation at `pointer` from the table. Returns true if it lay in a pool, and has gone back to
/// the pool.
#[cold]
fn forget(pointer: *mut u8) -> bool {
    // While this thread holds a lock of the table, it frees only memory of the table, which comes from
    // `inner`.
    !live::is_in_live() && shielded(|| live::remove(pointer).is_some_and(|traced| traced.extent.is_some()))
}

/// Runs code of this module in a pause. Ends the process if it panics, because an allocator must not unwind.
fn shielded<T>(work: impl FnOnce() -> T) -> T {
    struct AbortOnUnwind;
    impl Drop for AbortOnUnwind {
        #[expect(
            clippy::disallowed_methods,
            reason = "to unwind out of a global allocator is undefined behaviour"
        )]
        fn drop(&mut self) {
            std::process::abort();
        }
    }
    let _pause = NodeScope::pause();
    let abort = AbortOnUnwind;
    let result = work();
    let _ = ManuallyDrop::new(abort);
    result
}
