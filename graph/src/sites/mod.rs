//! Which allocation of which node makes each crossing tensor (§3.4, "decide tensor allocation site").
//!
//! The engine calls the global allocator, which is a [`TracingAllocator`]. The executor says which node runs
//! and which tensors cross. In the first step the allocator learns the allocation site of each crossing
//! tensor: the node, and the ordinal of the allocation within the execution of the node. From the second step
//! on, it places the allocations of these sites in registered memory, so that the tensors are sent in place.
//! The site may belong to another node than the producer, because nodes change their inputs in place or pass
//! them on.
//!
//! An input of the graph is a node too: a tensor that the program makes while it is asked for the input
//! belongs to the input. So is the receive of a crossing tensor, because a part may pass on what it received.
//! The receive lasts while the engine makes the value, on the thread of the executor.
//!
//! This module never allocates memory for tensors, and never sends.
//!
//! [`TracingAllocator`]: tonic_rdma::memory::trace::TracingAllocator

#[cfg(test)]
mod tests;

use std::sync::Mutex;

use rustix::param::page_size;
use serde::{Deserialize, Serialize};
use tonic_rdma::memory::Budget;
use tonic_rdma::memory::sites::{NodeScope, SiteAllocator};
use tonic_rdma_tensor::{Tensor, TensorSpec};
use tonic_rdma_verbs::unstable::{RegionPool, lock};

use crate::dataflow::{Hosted, KernelError, NodeId, Topology, Value};
use crate::error::GraphError;
use crate::placement::{Crossing, CrossingId, MemoryUse, Part, Placements};

/// The allocation sites of the crossing tensors of a process.
#[derive(Debug)]
pub struct NodeSites {
    /// `None` if the global allocator of the program does not trace.
    trace: Option<SiteAllocator>,
    nodes: usize,
    crossings: Mutex<Vec<CrossingMemory>>,
}

/// What made an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SiteOwner {
    /// A node, by its number. For an input of the graph: the program that makes the tensor.
    Node(usize),
    /// The receive of a crossing tensor, by its number.
    Receive(usize),
}

/// An allocation site.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AllocationSite {
    /// What made the allocation.
    pub owner: SiteOwner,
    /// How many allocations the same execution had made before.
    pub ordinal: u32,
}

/// What is known of the memory of a crossing tensor that this process sends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CrossingMemory {
    /// The site of the latest tensor, or `None` if no node allocated it on the thread of the executor: it was
    /// allocated outside of all nodes, such as a constant, or by a thread that a kernel started, or it has no
    /// bytes, or the allocator is not installed.
    pub site: Option<AllocationSite>,
    /// The number of tensors.
    pub tensors: u64,
    /// The number of tensors that were in registered memory.
    pub registered: u64,
    /// The number of bytes of the latest tensor.
    pub bytes: u64,
}

impl NodeSites {
    /// Makes the table of a process. `limit_bytes` is the number of bytes that may be in registered memory at
    /// a time. A program whose global allocator is no
    /// [`TracingAllocator`](tonic_rdma::memory::trace::TracingAllocator) gets a table that counts crossing
    /// tensors, and knows no sites: each tensor is copied before it is sent. See
    /// [`is_traced`](Self::is_traced).
    ///
    /// ```
    /// use std::alloc::System;
    /// use std::sync::Arc;
    ///
    /// use tonic_rdma::memory::trace::TracingAllocator;
    /// use tonic_rdma_graph::dataflow::{Topology, Value};
    /// use tonic_rdma_graph::schedule::Executor;
    /// use tonic_rdma_graph::sites::NodeSites;
    ///
    /// #[global_allocator]
    /// static ALLOCATOR: TracingAllocator = TracingAllocator::new(System);
    ///
    /// /// Lets the nodes of a part make at most 1 GiB of tensors in registered memory.
    /// fn traced<V: Value>(executor: Executor<V>, graph: &Topology) -> Executor<V> {
    ///     executor.sites(Arc::new(NodeSites::new(graph, 1 << 30)))
    /// }
    ///
    /// assert!(NodeSites::new(&Topology::new(), 1 << 30).is_traced());
    /// ```
    pub fn new(graph: &Topology, limit_bytes: u64) -> Self {
        Self { trace: SiteAllocator::tracing(limit_bytes).ok(), ..Self::untraced(graph) }
    }

    /// Makes the table of a part, and preallocates the registered memory that the analysis says this part
    /// sends from ([`Footprint::sends`](crate::placement::Footprint::sends)): a buffer for each tensor of
    /// known shape and step in flight. Tensors of unknown shape get memory when they need it, and so does a
    /// tensor whose buffers are all still in use, because a receiver has not read what earlier steps sent. At
    /// most 2 GiB come on top of what is preallocated. What finds no registered memory is copied, and
    /// [`memory`](Self::memory) counts it.
    ///
    /// ```
    /// use std::sync::Arc;
    ///
    /// use tonic_rdma_graph::GraphError;
    /// use tonic_rdma_graph::dataflow::{Topology, Value};
    /// use tonic_rdma_graph::placement::{Part, Placements};
    /// use tonic_rdma_graph::schedule::Executor;
    /// use tonic_rdma_graph::sites::NodeSites;
    ///
    /// /// Sends tensors from where the nodes of part 1 make them. Two steps are in flight.
    /// fn traced<V: Value>(
    ///     executor: Executor<V>,
    ///     graph: &Topology,
    ///     placements: &Placements,
    /// ) -> Result<Executor<V>, GraphError> {
    ///     let sites = NodeSites::preallocated(graph, placements, Part(1), 2)?;
    ///     Ok(executor.sites(Arc::new(sites)).window(2))
    /// }
    /// ```
    ///
    /// # Errors
    /// The system has not enough memory.
    pub fn preallocated(
        graph: &Topology,
        placements: &Placements,
        part: Part,
        window: usize,
    ) -> Result<Self, GraphError> {
        let lengths = || placements.send_lengths(part);
        let bytes = lengths().fold(0, |all: u64, length| all.saturating_add(length as u64 + 4096));
        let bytes = bytes.saturating_mul(window as u64);
        let sites = Self::new(graph, bytes.saturating_add(Budget::DEFAULT_LIMIT));
        if let Some(trace) = &sites.trace {
            let failed = |error| {
                let reason =
                    format!("part {part} sends from {bytes} bytes, and they can't be allocated: {error}");
                GraphError::of_setting("memory", reason)
            };
            let buffers = lengths().flat_map(|length| std::iter::repeat_n(length, window));
            trace.pool().preallocate(buffers).map_err(failed)?;
        }
        Ok(sites)
    }

    /// Returns the registered memory that this process sends from. It is zero if the allocator does not
    /// trace.
    pub fn memory(&self) -> MemoryUse {
        let Some(trace) = &self.trace else { return MemoryUse::default() };
        let report = trace.report();
        let pool = report.pool;
        MemoryUse {
            preallocated: pool.preallocated,
            used: pool.preallocated_used,
            beyond: pool.registered.saturating_sub(pool.preallocated.next_multiple_of(page_size() as u64)),
            refused: report.refused,
        }
    }

    /// Makes a table that counts crossing tensors, and knows no sites.
    ///
    /// ```
    /// use tonic_rdma_graph::dataflow::Topology;
    /// use tonic_rdma_graph::placement::CrossingId;
    /// use tonic_rdma_graph::sites::NodeSites;
    ///
    /// let sites = NodeSites::untraced(&Topology::new());
    /// assert!(!sites.is_traced());
    /// assert_eq!(sites.seen(CrossingId(0)).site, None);
    /// ```
    pub fn untraced(graph: &Topology) -> Self {
        Self { trace: None, nodes: graph.len(), crossings: Mutex::default() }
    }

    /// Returns whether the allocator takes part.
    pub fn is_traced(&self) -> bool {
        self.trace.is_some()
    }

    /// Begins an execution of a node on this thread. Allocations of this thread belong to the node until the
    /// guard is dropped. For an input of the graph, enter it while the program makes the tensor.
    pub(crate) fn enter(&self, node: NodeId) -> Option<NodeScope> {
        self.begin(SiteOwner::Node(node.0))
    }

    /// Makes the value of a tensor that has arrived. `fill` writes its content, as for [`Value::filled`].
    /// What the engine allocates meanwhile on this thread belongs to the receive. Call this on the thread of
    /// the executor, and only when the tensor is there, so that the allocations are the same in each step.
    ///
    /// # Errors
    /// The tensor does not have the type and the shape of the crossing tensor, the engine has no tensor of
    /// this type, or `fill` failed.
    pub(crate) fn filled<V: Value>(
        &self,
        crossing: &Crossing,
        spec: &TensorSpec,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<(), KernelError>,
    ) -> Result<V, KernelError> {
        crossing.placement.check(spec)?;
        let _receive = self.begin(SiteOwner::Receive(crossing.id.0));
        V::filled(spec, fill)
    }

    /// Makes a tensor in memory of `pool`, into which a tensor that is announced will be read. Returns
    /// `None` if the engine can't do that, or the content would not fit: [`filled`](Self::filled) then
    /// makes the value, or says what is wrong. Call this on the thread of the executor.
    pub(crate) fn hosted<V: Value>(
        &self,
        crossing: &Crossing,
        spec: &TensorSpec,
        pool: &RegionPool,
    ) -> Option<Hosted<V>> {
        self.trace.as_ref()?;
        crossing.placement.check(spec).ok()?;
        let _receive = self.begin(SiteOwner::Receive(crossing.id.0));
        V::hosted(spec, pool).ok()?
    }

    /// Notes that a tensor is about to be sent. Call this with the tensor that is given to the sender.
    pub(crate) fn crossed(&self, crossing: CrossingId, tensor: &Tensor) {
        let bytes = tensor.bytes().unwrap_or_default();
        let crossed = self.trace.as_ref().map(|trace| trace.crossed(bytes)).unwrap_or_default();
        let registered = crossed.registered || self.trace.is_none() && tensor.registered().is_some();
        let site = crossed
            .site
            .map(|site| AllocationSite { owner: self.owner(site.node as usize), ordinal: site.ordinal });
        let mut crossings = lock(&self.crossings);
        if crossings.len() <= crossing.0 {
            crossings.resize(crossing.0 + 1, CrossingMemory::default());
        }
        let seen = &mut crossings[crossing.0];
        seen.site = site;
        seen.tensors += 1;
        seen.registered += u64::from(registered);
        seen.bytes = bytes.len() as u64;
    }

    /// Returns what is known of the memory of a crossing tensor.
    pub fn seen(&self, crossing: CrossingId) -> CrossingMemory {
        lock(&self.crossings).get(crossing.0).copied().unwrap_or_default()
    }

    fn begin(&self, owner: SiteOwner) -> Option<NodeScope> {
        let number = match owner {
            SiteOwner::Node(node) => node,
            SiteOwner::Receive(crossing) => self.nodes + crossing,
        };
        let trace = self.trace.as_ref();
        // A number that does not fit is no node, so its allocations are not traced.
        u32::try_from(number).ok().and_then(|number| Some(trace?.enter(number)))
    }

    fn owner(&self, number: usize) -> SiteOwner {
        match number.checked_sub(self.nodes) {
            None => SiteOwner::Node(number),
            Some(crossing) => SiteOwner::Receive(crossing),
        }
    }
}
