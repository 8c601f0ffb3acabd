//! Which allocation of which node makes each crossing tensor (§3.4, "decide tensor allocation site").
//!
//! The engine calls the global allocator. The executor says which node runs ([`NodeSites::enter`]) and which tensors cross
//! ([`NodeSites::crossed`]). In the first step the allocator learns the allocation site of each crossing tensor: the node, and the
//! ordinal of the allocation within the execution of the node. From the second step on, it places the allocations of these sites in
//! registered memory, so that the tensors are sent in place. The site may belong to another node than the producer, because nodes
//! change their inputs in place or pass them on.
//!
//! An input of the graph is a node too: the memory of a fed tensor that was allocated in its scope counts as allocated by it.
//!
//! This module never allocates memory for tensors, and never sends.

#[cfg(test)]
mod tests;

use std::marker::PhantomData;
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};
use tonic_rdma_tensor::Tensor;

use crate::dataflow::{NodeId, Topology};
use crate::placement::CrossingId;

/// The allocation sites of the crossing tensors of a process.
#[derive(Debug)]
pub struct NodeSites {
    crossings: Mutex<Vec<SeenCrossing>>,
    nodes: usize,
}

/// An allocation within a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Site {
    /// The number of the node.
    pub node: usize,
    /// How many allocations the execution of the node had made before.
    pub ordinal: u32,
}

/// What is known of the memory of a crossing tensor that this process sends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SeenCrossing {
    /// The site of the latest tensor, or `None` if no node allocated it: it is smaller than the allocator looks at, or was allocated
    /// outside of all nodes, or the allocator is not installed.
    pub site: Option<Site>,
    /// The number of tensors.
    pub tensors: u64,
    /// The number of tensors that were in registered memory.
    pub registered: u64,
    /// The number of bytes of the latest tensor.
    pub bytes: u64,
}

/// Ends the scope of a node when it is dropped.
#[derive(Debug)]
#[must_use = "the scope of the node ends when this is dropped"]
pub struct Entered<'a> {
    sites: PhantomData<(&'a NodeSites, *const ())>,
}

impl NodeSites {
    /// Makes the table for a program without the allocator. Crossing tensors are counted, and have no sites.
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
        Self { crossings: Mutex::default(), nodes: graph.len() }
    }

    /// Returns whether the allocator takes part.
    pub fn is_traced(&self) -> bool {
        false
    }

    /// Begins an execution of a node on this thread. Allocations of this thread belong to the node until the guard is dropped. For an
    /// input of the graph, the scope is that in which the program makes the tensor.
    pub fn enter(&self, node: NodeId) -> Entered<'_> {
        debug_assert!(node.0 < self.nodes);
        Entered { sites: PhantomData }
    }

    /// Notes that a tensor is about to be sent. Call this with the tensor that is given to the sender.
    pub fn crossed(&self, crossing: CrossingId, tensor: &Tensor) {
        let mut crossings = self.lock();
        if crossings.len() <= crossing.0 {
            crossings.resize(crossing.0 + 1, SeenCrossing::default());
        }
        let seen = &mut crossings[crossing.0];
        seen.tensors += 1;
        seen.registered += u64::from(tensor.registered().is_some());
        seen.bytes = tensor.bytes().map_or(0, |bytes| bytes.len() as u64);
    }

    /// Returns what is known of the memory of a crossing tensor.
    pub fn seen(&self, crossing: CrossingId) -> SeenCrossing {
        self.lock().get(crossing.0).copied().unwrap_or_default()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<SeenCrossing>> {
        self.crossings.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
