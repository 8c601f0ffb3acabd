//! Traces: registered memory for the tensors of a graph that are sent, without a change of the engine that allocates them.
//!
//! An engine that executes the nodes of a data-flow graph allocates its tensors from the global allocator. This module has a
//! global allocator that knows which node a thread executes, because the graph's runtime says so. A **site** is a node and an
//! ordinal: the number of allocations that the execution of the node has made before. The first execution shows which sites
//! allocate the tensors that are sent. From the next execution on, the allocator places the allocations of these sites in a
//! pool ([`Pool::for_sending`](super::Pool::for_sending)), so that a device can send the tensors without a copy. This is the
//! analysis of Xue et al., *Fast Distributed Deep Learning over RDMA* (EuroSys 2019), section 3.4.
//!
//! ```text
//!  runtime of the graph                 SiteAllocator                   TracingAllocator
//!  enter(node) ────────────────────────▶ node, ordinal 0 ─────────────▶ thread
//!     │ the engine computes, and allocates                                │ site was sent before: pool
//!     │                                                                   │ otherwise: heap
//!     ▼                                                                   ▼
//!  crossed(bytes), then send ──────────▶ site of these bytes ◀────────── table: address ─▶ site, piece of the pool
//! ```
//!
//! This is the second front of [`sites`](super::sites): the handle, the table of sites and the decision are those of the programs that
//! allocate their buffers from the handle. Such programs need no global allocator.
//!
//! # How to use it
//!
//! The main file of the program declares the allocator. It costs some nanoseconds for each allocation that belongs to no node.
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
//! # Ok::<(), tonic_rdma_verbs::memory::sites::TraceError>(())
//! ```
//!
//! The runtime sends the memory as [`Bytes`](bytes::Bytes) with an owner (`Bytes::from_owner`), such as a tensor that the engine
//! shares. `Tensor::registered` of the crate tonic-rdma-tensor recognises their address, and returns a [`Lease`](super::Lease)
//! that holds the `Bytes`. So the engine can neither change nor free the tensor while a device reads it.
//!
//! # What is placed
//!
//! - Only allocations within an execution ([`SiteAllocator::enter`](super::sites::SiteAllocator::enter)), on its thread. They may have any size: a small tensor whose
//!   shape is not known before is read by the peer like a large one, so it would be copied without a site. Therefore enter a node only
//!   while its engine computes, so that other code takes no ordinals.
//! - Of these, the sites of this node that were sent, and allocations with the size and alignment of one that was sent. A node
//!   may make other allocations in its first execution than later, because it fills a cache, and the ordinals then change.
//! - An allocation that grows (`realloc`) keeps its site, and so does memory that another node passes on or changes in place.
//! - If the pool is full, the allocation is on the heap. This is not an error. The report counts it.
//!
//! # Memory and safety
//!
//! - Memory that was placed is ordinary memory for the program. Any thread may free it, also after the trace was dropped.
//! - Its slabs are registered for reading by the own device only, or for reading of exactly the sent bytes by one peer. No peer
//!   can write to it. A device that ignores this exposes what the slabs hold: tensors that were sent, and other allocations of
//!   the same nodes of equal size and alignment.
//! - The memory is shared memory. A child after `fork` that does not call `exec` must not change it.
//! - The allocator's own code allocates from the inner allocator. It takes no lock that is held while memory is sent.
//! - The owner of sent `Bytes` is dropped where the device's completion is taken. Its drop must not wait for this device.
//!
//! # Cost
//!
//! `cargo bench --bench memory_pool -- trace` measures an allocation and its release: outside of executions, in an execution
//! on the heap, and in the pool. The book's page on allocation sites has figures.

mod allocator;

pub use allocator::TracingAllocator;
