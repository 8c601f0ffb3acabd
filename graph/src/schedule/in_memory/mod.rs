//! Transfers between executors of one process.
//!
//! A tensor waits in the lane of its crossing until the receiver takes it, and is copied then. With delays, a thread of its own (the
//! courier) puts each tensor into its lane when its time has come: this simulates a network.

mod network;

use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tonic_rdma_tensor::Tensor;

use crate::dataflow::Value;
use crate::error::GraphError;
use crate::placement::{Crossing, CrossingId, Part, Placements};
use crate::schedule::transfers::{CrossingCounts, Start, Transfers, Unfinished};
use crate::sites::NodeSites;
use network::Network;

/// Transfers between executors of one process: for tests, and for graphs that are not split.
pub struct InMemory {
    part: Part,
    network: Arc<Network>,
    placements: Arc<Placements>,
    counts: Vec<CrossingCounts>,
}

impl InMemory {
    /// Makes the transfers of all parts, in the order of the parts. `depth` is the number of tensors of each crossing that may be under
    /// way.
    ///
    /// ```
    /// use std::sync::Arc;
    ///
    /// use tonic_rdma_graph::dataflow::{Topology, Value};
    /// use tonic_rdma_graph::placement::{Part, Partition, analyse};
    /// use tonic_rdma_graph::schedule::{InMemory, Transfers};
    ///
    /// fn two_parts<V: Value>() -> Result<Vec<Box<dyn Transfers<V>>>, tonic_rdma_graph::GraphError> {
    ///     let graph = Topology::new();
    ///     let partition = Partition::new(&graph, 2, vec![])?;
    ///     InMemory::parts(&Arc::new(analyse(&graph, &partition)?), 1)
    /// }
    /// ```
    ///
    /// # Errors
    /// `depth` is 0.
    pub fn parts<V: Value>(
        placements: &Arc<Placements>,
        depth: usize,
    ) -> Result<Vec<Box<dyn Transfers<V>>>, GraphError> {
        Ok(boxed(Self::ends(placements, depth, None)?))
    }

    /// Makes the transfers of all parts, as [`parts`](Self::parts) does. Each tensor arrives when the delay of its crossing tensor and step
    /// is over, but not before earlier tensors of this crossing.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use std::time::Duration;
    ///
    /// use tonic_rdma_graph::GraphError;
    /// use tonic_rdma_graph::dataflow::Value;
    /// use tonic_rdma_graph::placement::Placements;
    /// use tonic_rdma_graph::schedule::{InMemory, Transfers};
    ///
    /// /// Crossing tensors with higher numbers take longer.
    /// fn slow<V: Value>(placements: &Arc<Placements>) -> Result<Vec<Box<dyn Transfers<V>>>, GraphError> {
    ///     InMemory::delayed(placements, 2, |crossing, _step| Duration::from_micros(100 * crossing.0 as u64))
    /// }
    /// ```
    ///
    /// # Errors
    /// `depth` is 0, or the system has no thread left.
    pub fn delayed<V: Value>(
        placements: &Arc<Placements>,
        depth: usize,
        delay: impl Fn(CrossingId, u64) -> Duration + Send + Sync + 'static,
    ) -> Result<Vec<Box<dyn Transfers<V>>>, GraphError> {
        Ok(boxed(Self::ends(placements, depth, Some(Box::new(delay)))?))
    }

    fn ends(
        placements: &Arc<Placements>,
        depth: usize,
        delay: Option<network::Delay>,
    ) -> Result<Vec<Self>, GraphError> {
        if depth == 0 {
            let reason = "it is 0; at least 1 tensor of each crossing must be under way".to_owned();
            return Err(GraphError::Setting { setting: "depth", reason });
        }
        let parts = placements.partition().count();
        let crossings = placements.crossings().len();
        let is_delayed = delay.is_some();
        let network = Arc::new(Network::new(parts, crossings, depth, delay));
        if is_delayed {
            network.start_courier()?;
        }
        let end = |part| Self {
            part: Part(part),
            network: Arc::clone(&network),
            placements: Arc::clone(placements),
            counts: vec![CrossingCounts::default(); crossings],
        };
        Ok((0..parts).map(end).collect())
    }

    fn crossing(&self, id: CrossingId) -> Result<&Crossing, GraphError> {
        self.placements.crossing(id).ok_or_else(|| GraphError::Setting {
            setting: "crossing",
            reason: format!("the graph has no crossing tensor {}", id.0),
        })
    }

    fn take<V: Value>(
        &mut self,
        crossing: CrossingId,
        step: u64,
        sites: &NodeSites,
        context: Option<&mut Context<'_>>,
    ) -> Result<Option<V>, GraphError> {
        let peer = self.crossing(crossing)?.from;
        let waker = context.map(|context| context.waker());
        let Some(tensor) = self.network.take(self.part, peer, crossing, step, waker)? else {
            return Ok(None);
        };
        let crossing = self.crossing(crossing)?;
        let value = sites.filled(crossing, tensor.spec(), &mut |bytes| Ok(tensor.copy_to(bytes)?));
        value.map(Some).map_err(|source| crossing.failed(peer, step, source))
    }
}

fn boxed<V: Value>(ends: Vec<InMemory>) -> Vec<Box<dyn Transfers<V>>> {
    ends.into_iter().map(|end| Box::new(end) as Box<dyn Transfers<V>>).collect()
}

impl<V: Value> Transfers<V> for InMemory {
    fn start(&mut self, crossing: CrossingId, step: u64, tensor: &Tensor) -> Result<Start, GraphError> {
        let peer = self.crossing(crossing)?.to;
        let start = self.network.put(self.part, peer, crossing, step, tensor)?;
        if start == Start::Begun {
            let counts = &mut self.counts[crossing.0];
            counts.sent += 1;
            counts.bytes += tensor.spec().bytes().unwrap_or_default();
        }
        Ok(start)
    }

    fn try_take(
        &mut self,
        crossing: CrossingId,
        step: u64,
        sites: &NodeSites,
    ) -> Result<Option<V>, GraphError> {
        self.take(crossing, step, sites, None)
    }

    fn poll_take(
        &mut self,
        crossing: CrossingId,
        step: u64,
        sites: &NodeSites,
        context: &mut Context<'_>,
    ) -> Poll<Result<V, GraphError>> {
        self.take(crossing, step, sites, Some(context)).transpose().map_or(Poll::Pending, Poll::Ready)
    }

    fn poll_ready(
        &mut self,
        crossing: CrossingId,
        context: &mut Context<'_>,
    ) -> Poll<Result<(), GraphError>> {
        let peer = self.crossing(crossing)?.to;
        self.network.poll_below(self.part, peer, crossing, context.waker(), None)
    }

    fn poll_flushed(&mut self, context: &mut Context<'_>) -> Poll<Result<(), GraphError>> {
        for crossing in self.placements.leaving(self.part) {
            match self.network.poll_below(self.part, crossing.to, crossing.id, context.waker(), Some(1)) {
                Poll::Ready(Ok(())) => {}
                other => return other,
            }
        }
        Poll::Ready(Ok(()))
    }

    fn unfinished(&self) -> Option<Unfinished> {
        let leaving = self.placements.leaving(self.part);
        Unfinished::of(leaving.map(|crossing| (crossing.id, self.network.not_taken(crossing.id) as u64)))
    }

    fn counts(&self, crossing: CrossingId) -> CrossingCounts {
        self.counts.get(crossing.0).copied().unwrap_or_default()
    }

    fn abort(&mut self, reason: &str) {
        self.network.fail(self.part, reason);
    }
}

impl Drop for InMemory {
    fn drop(&mut self) {
        self.network.leave(self.part);
    }
}

impl fmt::Debug for InMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InMemory").field("part", &self.part).finish_non_exhaustive()
    }
}
