//! The handle of a trace, and the guard of an execution.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use bytes::Bytes;

use super::report::{Crossed, TraceError, TraceReport};
use super::state::TraceState;
use super::table;
use super::thread::{self, Current, Execution, Pause};
use crate::memory::pieces::Lease;
use crate::memory::pool::find_sendable;

/// Learns which allocations of the nodes of a graph are sent, and has the [`TracingAllocator`](super::TracingAllocator)
/// place them in registered memory from their next execution on. The [module](super) has an example.
///
/// Clones are one trace. Thread-safe. When the last clone is dropped, nothing is placed any more. Memory that was placed stays
/// valid until it is freed.
#[derive(Clone)]
pub struct AllocationTrace {
    handle: Arc<TraceHandle>,
}

struct TraceHandle {
    state: &'static TraceState,
}

impl AllocationTrace {
    /// Creates a trace without sites. `limit_bytes` is the number of bytes that may be in its pool at a time. With a limit of
    /// 0 the trace learns, but places nothing.
    ///
    /// A trace of some hundred bytes stays in memory for the life of the process, so programs make few of them.
    ///
    /// ```
    /// use tonic_rdma_verbs::memory::trace::{AllocationTrace, TraceError};
    ///
    /// // This program has no `#[global_allocator]` that traces.
    /// assert_eq!(AllocationTrace::new(1 << 30).err(), Some(TraceError::NotInstalled));
    /// ```
    ///
    /// # Errors
    /// The global allocator of the program is not a [`TracingAllocator`](super::TracingAllocator).
    pub fn new(limit_bytes: u64) -> Result<Self, TraceError> {
        if !is_installed() {
            return Err(TraceError::NotInstalled);
        }
        let _pause = Pause::begin();
        let state = Box::leak(Box::new(TraceState::new(limit_bytes)));
        Ok(Self { handle: Arc::new(TraceHandle { state }) })
    }

    /// Begins an execution of `node` on this thread. Until the guard is dropped, the allocations of this thread belong to the
    /// node, and are numbered from 0. An execution within an execution interrupts it: drop the guards in the reverse order
    /// of their creation.
    ///
    /// Allocations of other threads, such as those of a thread pool that the node uses, do not belong to the node.
    #[must_use = "the execution ends when the guard is dropped"]
    pub fn enter(&self, node: u32) -> NodeScope {
        let trace = self.handle.state;
        let places = {
            let _pause = Pause::begin();
            trace.places(node)
        };
        let former = thread::replace(Current::Node(Execution { trace, node, ordinal: 0, places }));
        NodeScope { former, _of_this_thread: PhantomData }
    }

    /// Notes that `bytes` are sent, and returns the site that allocated them. From the next execution on, the allocations of
    /// this site are placed in the pool. `bytes` may be a part of the allocation.
    pub fn crossed(&self, bytes: &[u8]) -> Crossed {
        let _pause = Pause::begin();
        let state = self.handle.state;
        let found = table::find(bytes, |traced| {
            Some((traced.trace, traced.site, traced.layout, traced.piece.is_some()))
        });
        match found {
            Some((trace, site, layout, registered)) if trace == state.number() => {
                state.sent(site, layout, registered);
                Crossed { site: Some(site), registered }
            }
            Some((_, _, _, registered)) => Crossed { site: None, registered },
            None => Crossed { site: None, registered: find_sendable(bytes).is_some() },
        }
    }

    /// Returns what the trace has learnt and placed.
    pub fn report(&self) -> TraceReport {
        let _pause = Pause::begin();
        self.handle.state.report()
    }
}

impl Drop for TraceHandle {
    fn drop(&mut self) {
        let _pause = Pause::begin();
        self.state.close();
    }
}

impl fmt::Debug for AllocationTrace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AllocationTrace({})", self.handle.state.number())
    }
}

/// An execution of a node on this thread, from [`AllocationTrace::enter`]. The execution ends when the guard is dropped, also by
/// a panic.
#[must_use = "the execution ends when the guard is dropped"]
pub struct NodeScope {
    former: Current,
    /// The guard belongs to its thread.
    _of_this_thread: PhantomData<*const ()>,
}

impl Drop for NodeScope {
    fn drop(&mut self) {
        thread::replace(self.former);
    }
}

impl fmt::Debug for NodeScope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("NodeScope")
    }
}

/// Finds the traced allocation in a pool that holds all of `bytes`, and returns a lease that keeps `bytes`. While no
/// allocation is in a pool, a look-up takes one load.
pub fn find_traced(bytes: &Bytes) -> Option<Lease> {
    if table::placed() == 0 {
        return None;
    }
    let _pause = Pause::begin();
    let slab = table::find(bytes, |traced| Some(Arc::clone(traced.piece.as_ref()?.slab())))?;
    Lease::of_traced(slab, bytes.clone())
}

/// Returns whether the global allocator of the program traces: allocates memory, and looks whether the allocator has noticed.
fn is_installed() -> bool {
    struct Restore(Current);
    impl Drop for Restore {
        fn drop(&mut self) {
            thread::replace(self.0);
        }
    }
    let _restore = Restore(thread::replace(Current::Probe));
    drop(std::hint::black_box(Box::new(std::hint::black_box(0_u64))));
    !matches!(thread::current(), Current::Probe)
}
