//! Which allocation of which node makes each crossing tensor (§3.4, "decide tensor allocation site").
//!
//! The engine calls the global allocator, which is a [`TracingAllocator`]. The executor says which node runs ([`NodeSites::enter`]) and
//! which tensors cross ([`NodeSites::crossed`]). In the first step the allocator learns the allocation site of each crossing tensor: the
//! node, and the ordinal of the allocation within the execution of the node. From the second step on, it places the allocations of
//! these sites in registered memory, so that the tensors are sent in place. The site may belong to another node than the producer,
//! because nodes change their inputs in place or pass them on.
//!
//! An input of the graph is a node too: a tensor that the program makes while it is asked for the input belongs to the input. So is the
//! receive of a crossing tensor, because a part may pass on what it received. The receive lasts while the engine makes the value
//! ([`NodeSites::filled`]), on the thread of the executor.
//!
//! This module never allocates memory for tensors, and never sends.
//!
//! [`TracingAllocator`]: tonic_rdma::memory::trace::TracingAllocator

#[cfg(test)]
mod tests;

use std::sync::Mutex;

use serde::{Deserialize, Serialize};
use tonic_rdma::memory::sites::{NodeScope, SiteAllocator, SiteReport};
use tonic_rdma_tensor::{Tensor, TensorSpec};
use tonic_rdma_verbs::unstable::lock;

use crate::dataflow::{KernelError, NodeId, Topology, Value};
use crate::placement::{Crossing, CrossingId};

/// The allocation sites of the crossing tensors of a process.
#[derive(Debug)]
pub struct NodeSites {
    /// `None` if the global allocator of the program does not trace.
    trace: Option<SiteAllocator>,
    nodes: usize,
    crossings: Mutex<Vec<SeenCrossing>>,
}

/// What runs while memory is allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Allocating {
    /// A node, by its number. For an input of the graph: the program that makes the tensor.
    Node(usize),
    /// The receive of a crossing tensor, by its number.
    Receive(usize),
}

/// An allocation site.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Site {
    /// What allocates.
    pub allocating: Allocating,
    /// How many allocations the same execution had made before.
    pub ordinal: u32,
}

/// What is known of the memory of a crossing tensor that this process sends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SeenCrossing {
    /// The site of the latest tensor, or `None` if no node allocated it on the thread of the executor: it was allocated outside of all
    /// nodes, such as a constant, or by a thread that a kernel started, or it has no bytes, or the allocator is not installed.
    pub site: Option<Site>,
    /// The number of tensors.
    pub tensors: u64,
    /// The number of tensors that were in registered memory.
    pub registered: u64,
    /// The number of bytes of the latest tensor.
    pub bytes: u64,
}

/// Ends the execution of a node when it is dropped, on the same thread.
#[derive(Debug)]
#[must_use = "the execution of the node ends when this is dropped"]
pub struct Entered {
    _scope: Option<NodeScope>,
}

impl NodeSites {
    /// Makes the table of a process. `limit_bytes` is the number of bytes that may be in registered memory at a time. A program whose
    /// global allocator is no [`TracingAllocator`](tonic_rdma::memory::trace::TracingAllocator) gets a table that counts crossing
    /// tensors, and knows no sites: each tensor is copied before it is sent. Look at [`is_traced`](Self::is_traced).
    ///
    /// ```
    /// use std::alloc::System;
    ///
    /// use tonic_rdma::memory::trace::TracingAllocator;
    /// use tonic_rdma_graph::dataflow::{Fact, Node, Role, Topology};
    /// use tonic_rdma_graph::placement::CrossingId;
    /// use tonic_rdma_graph::sites::{Allocating, NodeSites};
    /// use tonic_rdma_tensor::{Dtype, Tensor};
    ///
    /// #[global_allocator]
    /// static ALLOCATOR: TracingAllocator = TracingAllocator::new(System);
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let mut graph = Topology::new();
    /// let fact = Fact::known(Dtype::U8, &[100_000]);
    /// let input = graph.add(Node {
    ///     name: "input".to_owned(),
    ///     kind: "Input".to_owned(),
    ///     role: Role::Input,
    ///     inputs: vec![],
    ///     outputs: vec![fact.clone()],
    ///     work: 0,
    ///     stays: false,
    /// })?;
    /// let spec = fact.spec().ok_or("the shape is known")?;
    ///
    /// let sites = NodeSites::new(&graph, 1 << 20);
    /// let crossing = CrossingId(0);
    /// for step in 0..3 {
    ///     let node = sites.enter(input);
    ///     let content = vec![step; 100_000];
    ///     drop(node);
    ///     let tensor = Tensor::from_bytes(spec.clone(), content.into())?;
    ///     sites.crossed(crossing, &tensor);
    /// }
    /// let seen = sites.seen(crossing);
    /// assert_eq!(seen.site.map(|site| site.allocating), Some(Allocating::Node(0)));
    /// assert_eq!((seen.tensors, seen.registered), (3, 2)); // all but the first
    /// # Ok(())
    /// # }
    /// ```
    pub fn new(graph: &Topology, limit_bytes: u64) -> Self {
        Self { trace: SiteAllocator::tracing(limit_bytes).ok(), ..Self::untraced(graph) }
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

    /// Begins an execution of a node on this thread. Allocations of this thread belong to the node until the guard is dropped. For an
    /// input of the graph, enter it while the program makes the tensor.
    pub fn enter(&self, node: NodeId) -> Entered {
        self.begin(Allocating::Node(node.0))
    }

    /// Makes the value of a tensor that has arrived. `fill` writes its content, as for [`Value::filled`]. What the engine allocates
    /// meanwhile on this thread belongs to the receive. Call this on the thread of the executor, and only when the tensor is there, so
    /// that the allocations are the same in each step.
    ///
    /// # Errors
    /// The tensor does not have the type and the shape of the crossing tensor, the engine has no tensor of this type, or `fill` failed.
    pub fn filled<V: Value>(
        &self,
        crossing: &Crossing,
        spec: &TensorSpec,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<(), KernelError>,
    ) -> Result<V, KernelError> {
        crossing.placement.check(spec)?;
        let _receive = self.begin(Allocating::Receive(crossing.id.0));
        V::filled(spec, fill)
    }

    /// Notes that a tensor is about to be sent. Call this with the tensor that is given to the sender.
    pub fn crossed(&self, crossing: CrossingId, tensor: &Tensor) {
        let bytes = tensor.bytes().unwrap_or_default();
        let crossed = self.trace.as_ref().map(|trace| trace.crossed(bytes)).unwrap_or_default();
        let registered = crossed.registered || self.trace.is_none() && tensor.registered().is_some();
        let site = crossed
            .site
            .map(|site| Site { allocating: self.allocating(site.node as usize), ordinal: site.ordinal });
        let mut crossings = lock(&self.crossings);
        if crossings.len() <= crossing.0 {
            crossings.resize(crossing.0 + 1, SeenCrossing::default());
        }
        let seen = &mut crossings[crossing.0];
        seen.site = site;
        seen.tensors += 1;
        seen.registered += u64::from(registered);
        seen.bytes = bytes.len() as u64;
    }

    /// Returns what is known of the memory of a crossing tensor.
    pub fn seen(&self, crossing: CrossingId) -> SeenCrossing {
        lock(&self.crossings).get(crossing.0).copied().unwrap_or_default()
    }

    /// Returns what the allocator has learnt and placed, or `None` if it does not take part. The nodes of the report are numbered as those
    /// of the graph. Receives have the numbers after them.
    pub fn report(&self) -> Option<SiteReport> {
        self.trace.as_ref().map(SiteAllocator::report)
    }

    fn begin(&self, allocating: Allocating) -> Entered {
        let number = match allocating {
            Allocating::Node(node) => node,
            Allocating::Receive(crossing) => self.nodes + crossing,
        };
        let trace = self.trace.as_ref();
        // A number that does not fit is no node, so its allocations are not traced.
        Entered { _scope: u32::try_from(number).ok().and_then(|number| Some(trace?.enter(number))) }
    }

    fn allocating(&self, number: usize) -> Allocating {
        match number.checked_sub(self.nodes) {
            None => Allocating::Node(number),
            Some(crossing) => Allocating::Receive(crossing),
        }
    }
}
