//! The tracing allocator as the global allocator of a program. These tests are a separate binary for this
//! reason.
#![allow(clippy::unwrap_used, reason = "tests")]

mod executions;
#[cfg(feature = "tract")]
mod hosted;
mod memory;
mod model;
mod threads;

use bytes::Bytes;
use tonic_rdma_verbs::memory::sites::{NodeSite, SiteAllocator};
use tonic_rdma_verbs::memory::trace::TracingAllocator;

#[cfg(not(feature = "allocator"))]
#[global_allocator]
static ALLOCATOR: TracingAllocator = TracingAllocator::new(std::alloc::System);

/// The allocator of the commands.
#[cfg(feature = "allocator")]
#[global_allocator]
static ALLOCATOR: TracingAllocator<tonic_rdma_verbs::unstable::allocator::Chosen> =
    TracingAllocator::new(tonic_rdma_verbs::unstable::allocator::Chosen);

/// Makes a trace with a pool that is large enough for a test.
fn trace() -> SiteAllocator {
    SiteAllocator::tracing(256 << 20).unwrap()
}

/// Executes `node`.
fn execute<T>(trace: &SiteAllocator, node: u32, kernel: impl FnOnce() -> T) -> T {
    let _execution = trace.enter(node);
    kernel()
}

fn site(node: u32, ordinal: u32) -> Option<NodeSite> {
    Some(NodeSite { node, ordinal })
}

/// Returns whether `bytes` lie in a pool. The trace of the test learns nothing.
fn is_placed(bytes: &[u8]) -> bool {
    trace().crossed(bytes).registered
}

/// Shares a vector, as an engine shares its tensors.
fn shared(vector: Vec<u8>) -> Bytes {
    struct Owner(Vec<u8>);
    impl AsRef<[u8]> for Owner {
        fn as_ref(&self) -> &[u8] {
            &self.0
        }
    }
    Bytes::from_owner(Owner(vector))
}
