//! Traces: registered memory for the tensors of a graph that are sent, without a change of the engine that allocates them.
//!
//! A program declares a [`TracingAllocator`] as its global allocator, says which node of the graph a thread executes
//! ([`AllocationTrace::enter`]), and says which bytes it sends ([`AllocationTrace::crossed`]). From the next execution on, the
//! allocations of the sites that were sent lie in a pool, from which devices send without a copy.

mod allocator;
pub(super) mod handle;
mod report;
mod state;
mod table;
mod thread;

pub use allocator::TracingAllocator;
pub use handle::{AllocationTrace, NodeScope};
pub use report::{Crossed, NodeSite, SentSite, TraceError, TraceReport};
