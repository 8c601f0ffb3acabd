//! The executor of one part.

use std::collections::HashMap;
use std::fmt;
use std::mem;
use std::ops::Range;
use std::sync::Arc;

use tonic_rdma_tensor::Tensor;
use tonic_rdma_verbs::internal::chain;

use super::compute;
use super::plan::Plan;
use super::program::Program;
use super::report::Report;
use super::run::Run;
use super::settings::{Settings, Stop, Work};
use super::transfers::Transfers;
use crate::dataflow::{Kernel, NodeId, Topology, Value};
use crate::error::GraphError;
use crate::placement::{Part, Placements};
use crate::sites::NodeSites;

/// Runs the nodes of one part. One thread uses it at a time.
pub struct Executor<V> {
    pub(super) graph: Arc<Topology>,
    pub(super) placements: Arc<Placements>,
    part: Part,
    pub(super) plan: Plan,
    /// The kernels of the planned nodes. An input has none.
    pub(super) kernels: Vec<Option<Box<dyn Kernel<V>>>>,
    /// The outputs of the planned constants.
    pub(super) constants: Vec<Vec<V>>,
    pub(super) transfers: Box<dyn Transfers<V>>,
    pub(super) sites: Arc<NodeSites>,
    pub(super) settings: Settings,
    pub(super) stop: Stop,
    /// What was sent in the last step of a run with [`Work::ComputeAndKeep`], by crossing tensor.
    pub(super) kept: Vec<Option<Tensor>>,
    /// The first step that has not run.
    next: u64,
    failed: bool,
}

impl<V: Value> Executor<V> {
    /// Makes the executor of a part. `kernels` has a kernel for each node of this part, and for each constant that this part uses, but
    /// none for inputs. Kernels of other nodes are dropped. Constants are computed here, once.
    ///
    /// ```
    /// use std::collections::HashMap;
    /// use std::sync::Arc;
    ///
    /// use tonic_rdma_graph::dataflow::{Kernel, KernelError, NodeId, Topology, Value};
    /// use tonic_rdma_graph::placement::{Part, Placements};
    /// use tonic_rdma_graph::schedule::{Executor, InMemory, Report, Settings, Work};
    /// use tonic_rdma_graph::sites::NodeSites;
    ///
    /// /// Runs ten steps of a graph that is not split.
    /// fn unsplit<V: Value>(
    ///     graph: Arc<Topology>,
    ///     placements: Arc<Placements>,
    ///     kernels: HashMap<NodeId, Box<dyn Kernel<V>>>,
    ///     mut feed: impl FnMut(u64, NodeId) -> Result<V, KernelError>,
    /// ) -> Result<Report, Box<dyn std::error::Error>> {
    ///     let transfers = InMemory::parts(&placements, 1)?.remove(0);
    ///     let sites = Arc::new(NodeSites::untraced(&graph));
    ///     let settings = Settings::default();
    ///     let mut executor = Executor::new(graph, placements, Part(0), kernels, transfers, sites, settings)?;
    ///     Ok(executor.run(0..10, Work::Compute, &mut feed)?)
    /// }
    /// ```
    ///
    /// # Errors
    /// A kernel is missing, a constant fails, or a crossing tensor is missing.
    pub fn new(
        graph: Arc<Topology>,
        placements: Arc<Placements>,
        part: Part,
        mut kernels: HashMap<NodeId, Box<dyn Kernel<V>>>,
        transfers: Box<dyn Transfers<V>>,
        sites: Arc<NodeSites>,
        settings: Settings,
    ) -> Result<Self, GraphError> {
        let plan = Plan::new(&graph, &placements, part)?;
        let mut of_nodes = Vec::with_capacity(plan.nodes.len());
        for node in &plan.nodes {
            let kernel = kernels.remove(&node.id);
            if kernel.is_none() && !node.is_input {
                return Err(missing(&graph, node.id, part));
            }
            of_nodes.push(kernel.filter(|_| !node.is_input));
        }
        let mut constants = Vec::with_capacity(plan.constants.len());
        for id in &plan.constants {
            let mut kernel = kernels.remove(id).ok_or_else(|| missing(&graph, *id, part))?;
            constants.push(compute::constant(&graph, *id, &mut *kernel)?);
        }
        let kept = vec![None; placements.crossings().len()];
        Ok(Self {
            graph,
            placements,
            part,
            plan,
            kernels: of_nodes,
            constants,
            transfers,
            sites,
            settings,
            stop: Stop::default(),
            kept,
            next: 0,
            failed: false,
        })
    }

    /// Runs steps. Steps of later calls are higher. Returns when all nodes of this part have run in all steps, and all sends are over.
    /// All parts call this with the same steps and the same work.
    ///
    /// # Errors
    /// A kernel or the program failed, a peer is gone, has failed or runs other steps, nothing went on for longer than the deadline, or the run
    /// was stopped. The peers are told. After such an error the executor runs no more.
    pub fn run(
        &mut self,
        steps: Range<u64>,
        work: Work,
        program: &mut dyn Program<V>,
    ) -> Result<Report, GraphError> {
        if self.failed {
            return Err(GraphError::Failed);
        }
        if steps.start < self.next {
            let reason = format!("{steps:?}: this executor has run all steps before {}", self.next);
            return Err(GraphError::Setting { setting: "steps", reason });
        }
        if self.settings.window == 0 {
            let reason = "it is 0; at least 1 step must be in flight".to_owned();
            return Err(GraphError::Setting { setting: "window", reason });
        }
        self.next = self.next.max(steps.end);
        self.transfers.begin(&steps);
        let report = Run::new(self, steps, work, program).drive();
        if let Err(error) = &report {
            self.failed = true;
            self.transfers.abort(&chain(error));
        }
        report
    }

    /// Returns a handle that stops the run from another thread.
    pub fn stop_handle(&self) -> Stop {
        self.stop.clone()
    }

    /// Returns the part that this executor runs.
    pub fn part(&self) -> Part {
        self.part
    }

    /// Returns the transfers, for their counts.
    pub fn transfers(&self) -> &dyn Transfers<V> {
        &*self.transfers
    }

    /// Changes the settings of the next run.
    pub fn settings_mut(&mut self) -> &mut Settings {
        &mut self.settings
    }

    /// Runs the next steps with other transfers, and returns those of the last ones. All parts do so at the same step.
    pub fn replace_transfers(&mut self, transfers: Box<dyn Transfers<V>>) -> Box<dyn Transfers<V>> {
        mem::replace(&mut self.transfers, transfers)
    }
}

impl<V> fmt::Debug for Executor<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Executor")
            .field("part", &self.part)
            .field("nodes", &self.plan.nodes.len())
            .field("receives", &self.plan.receives.len())
            .field("sends", &self.plan.sends)
            .field("settings", &self.settings)
            .field("failed", &self.failed)
            .finish_non_exhaustive()
    }
}

fn missing(graph: &Topology, node: NodeId, part: Part) -> GraphError {
    let name = graph.node(node).map_or_else(|| node.0.to_string(), |node| node.name.clone());
    GraphError::Node { node: name, reason: format!("it has no kernel in part {}", part.0) }
}
