//! What a trace has learnt, as users see it.

use std::fmt;

/// A place of a graph that allocates: the allocation of a node that comes after `ordinal` other allocations of the same
/// execution.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeSite {
    /// The node, by the number that the program gave to [`AllocationTrace::enter`](super::AllocationTrace::enter).
    pub node: u32,
    /// Number of allocations that the execution of the node has made before, from 0.
    pub ordinal: u32,
}

impl fmt::Display for NodeSite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "allocation {} of node {}", self.ordinal, self.node)
    }
}

/// What [`AllocationTrace::crossed`](super::AllocationTrace::crossed) knows of the bytes that are sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Crossed {
    /// The site that allocated the bytes, or `None` if no node of this trace allocated them.
    pub site: Option<NodeSite>,
    /// Whether the bytes lie in the memory of a pool, from which devices send without a copy.
    pub registered: bool,
}

/// A site whose memory was sent.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SentSite {
    /// The site.
    pub site: NodeSite,
    /// Bytes of the allocation that was sent last.
    pub bytes: u64,
    /// Number of times that its memory was sent.
    pub sent: u64,
    /// Number of times that its memory lay in the pool when it was sent.
    pub registered: u64,
}

/// What a trace has learnt and placed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TraceReport {
    /// The sites whose memory was sent, by node and ordinal.
    pub sites: Vec<SentSite>,
    /// Number of allocations that were placed in the pool.
    pub placed: u64,
    /// Number of allocations that should be in the pool, but the pool had no memory for them. They are on the heap.
    pub refused: u64,
    /// Reason of the last refusal, with advice.
    pub refusal: Option<String>,
    /// Number of sends from sites beyond the limit on sites, 65 536. These sites stay on the heap.
    pub untracked: u64,
    /// Bytes of the pool in use.
    pub in_use: u64,
    /// Bytes of all slabs of the pool, which devices register.
    pub slabs: u64,
    /// Bytes that may be in use at a time.
    pub limit: u64,
}

/// Writes a line for the pool, and a line for each site.
impl fmt::Display for TraceReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { placed, refused, in_use, limit, .. } = self;
        writeln!(f, "{placed} allocations placed, {refused} refused; {in_use} of {limit} bytes in use")?;
        if let Some(refusal) = &self.refusal {
            writeln!(f, "last refusal: {refusal}")?;
        }
        for SentSite { site, bytes, sent, registered } in &self.sites {
            writeln!(f, "{site}: {bytes} bytes, sent {sent} times, {registered} times from the pool")?;
        }
        if self.untracked > 0 {
            writeln!(f, "{} sends from further sites, on the heap", self.untracked)?;
        }
        Ok(())
    }
}

/// The reason why a program can't trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// The global allocator of the program does not trace.
    #[error(
        "the global allocator of this program does not trace allocations: declare in its main file \
         `#[global_allocator] static ALLOCATOR: TracingAllocator = TracingAllocator::new(System);`"
    )]
    NotInstalled,
}
