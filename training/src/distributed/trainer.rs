//! One part of a job in one mode of transfer.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use tonic_rdma_graph::GraphError;
use tonic_rdma_graph::dataflow::{KernelError, NodeId, Outlet, Topology};
use tonic_rdma_graph::placement::{Crossing, CrossingId, Part, Placements};
use tonic_rdma_graph::schedule::{Executor, Program, Settings, Transfers, Work};
use tonic_rdma_graph::sites::{Allocating, NodeSites};

use super::messages::{Ran, Sent, SentTensor};
use crate::array::Array;
use crate::data::{Data, reorder};
use crate::step::{Feed, Shape, StepGraph};

/// The most registered memory for crossing tensors of a part, in bytes.
const REGISTERED: u64 = 1 << 30;

/// One part of a job.
pub(crate) struct Trainer {
    executor: Executor<Array>,
    feeder: Feeder,
    sites: Arc<NodeSites>,
    graph: Arc<Topology>,
    placements: Arc<Placements>,
    own: Part,
}

/// The program of a part: it feeds the samples of the steps in the order that follows from the seed, and keeps the losses.
#[derive(Debug)]
pub(crate) struct Feeder {
    data: Arc<Data>,
    shape: Shape,
    seed: u64,
    /// The samples in the order of an epoch. The memory is allocated before the first step: a step that begins an epoch makes the same
    /// allocations as any other step, so that the samples always come from the same allocation site.
    order: Vec<u32>,
    epoch: Option<usize>,
    /// The targets of the last samples that were fed, with their step.
    targets: Option<(u64, Array)>,
    feeds: HashMap<NodeId, (usize, Feed)>,
    losses: Vec<(u64, f32)>,
}

impl Program<Array> for Feeder {
    fn feed(&mut self, step: u64, input: NodeId) -> Result<Array, KernelError> {
        let (worker, feed) = self.feeds.get(&input).copied().ok_or("the graph has another input")?;
        if let Some((_, targets)) = self.targets.take_if(|(of, _)| feed == Feed::Targets && *of == step) {
            return Ok(targets);
        }
        let (samples, targets) = self.batch(step, worker)?;
        if feed == Feed::Targets {
            return Ok(targets);
        }
        self.targets = Some((step, targets));
        Ok(samples)
    }

    fn result(&mut self, step: u64, _outlet: Outlet, value: Array) -> Result<(), KernelError> {
        let loss = value.as_floats()?.values().first().copied().ok_or("the loss has no value")?;
        self.losses.push((step, loss));
        Ok(())
    }
}

impl Trainer {
    /// Makes the part `own` of a graph.
    pub(crate) fn new(
        graph: StepGraph,
        own: usize,
        transfers: Box<dyn Transfers<Array>>,
        feeder: Feeder,
        deadline: Duration,
    ) -> Result<Self, GraphError> {
        let StepGraph { graph, placements, kernels, .. } = graph;
        let sites = Arc::new(NodeSites::new(&graph, REGISTERED));
        // A step reads the variables that the step before has changed, so one step is in flight.
        let mut settings = Settings::default();
        settings.window = 1;
        settings.deadline = deadline;
        let own = Part(own);
        let (kept_graph, kept_placements, kept_sites) =
            (Arc::clone(&graph), Arc::clone(&placements), Arc::clone(&sites));
        let executor = Executor::new(graph, placements, own, kernels, transfers, sites, settings)?;
        Ok(Self { executor, feeder, sites: kept_sites, graph: kept_graph, placements: kept_placements, own })
    }

    /// Runs steps. All parts run the same ones.
    pub(crate) fn run(&mut self, steps: Range<u64>) -> Result<Ran, GraphError> {
        let before = self.sent();
        self.feeder.losses.clear();
        let report = self.executor.run(steps, Work::Compute, &mut self.feeder)?;
        self.feeder.losses.sort_by_key(|(step, _)| *step);
        let mut times = report.steps;
        times.sort_by_key(|time| time.step);
        Ok(Ran {
            losses: self.feeder.losses.iter().map(|(_, loss)| *loss).collect(),
            steps: times.iter().map(|time| time.ended.saturating_sub(time.began).as_secs_f64()).collect(),
            elapsed: report.elapsed.as_secs_f64(),
            sent: self.sent().combined(before, u64::saturating_sub),
        })
    }

    fn sent(&self) -> Sent {
        let all = self.sent_tensors().into_iter();
        all.fold(Sent::default(), |sum, tensor| sum.combined(tensor.sent, u64::saturating_add))
    }

    /// Returns how each crossing tensor was sent by this part, in all steps.
    pub(crate) fn sent_tensors(&self) -> Vec<SentTensor> {
        let sent = |crossing: &Crossing| {
            let counts = self.executor.transfers().counts(crossing.id);
            let sent = Sent {
                tensors: counts.sent,
                bytes: counts.bytes,
                copied: counts.copied,
                inline: counts.inline,
            };
            SentTensor {
                name: crossing.name.clone(),
                placement: if crossing.placement.is_static() { "static" } else { "dynamic" }.to_owned(),
                site: self
                    .sites
                    .seen(crossing.id)
                    .site
                    .map(|site| (self.name(site.allocating), site.ordinal)),
                sent,
            }
        };
        self.placements.leaving(self.own).map(sent).collect()
    }

    fn name(&self, allocating: Allocating) -> String {
        match allocating {
            Allocating::Node(node) => {
                self.graph.node(NodeId(node)).map_or_else(|| node.to_string(), |node| node.name.clone())
            }
            Allocating::Receive(crossing) => {
                let crossing = self.placements.crossing(CrossingId(crossing));
                format!("receive of {}", crossing.map_or("?", |crossing| crossing.name.as_str()))
            }
        }
    }
}

impl Feeder {
    /// Makes the feeder of a graph.
    pub(crate) fn new(data: Arc<Data>, shape: Shape, seed: u64, graph: &StepGraph) -> Self {
        let order = vec![0; data.train.len()];
        let (feeds, losses) = (graph.feeds.clone(), Vec::new());
        Self { data, shape, seed, order, epoch: None, targets: None, feeds, losses }
    }

    /// Returns the samples of a worker in a step. Samples that fill no batch are left out; each epoch leaves out others.
    fn batch(&mut self, step: u64, worker: usize) -> Result<(Array, Array), KernelError> {
        let batch = self.shape.batch;
        let steps = self.data.train.len() / batch.max(1);
        if steps == 0 {
            return Err(format!("{} samples don't fill a batch of {batch}", self.data.train.len()).into());
        }
        let (epoch, step) = (step as usize / steps, step as usize % steps);
        if self.epoch != Some(epoch) {
            reorder(&mut self.order, self.seed, epoch);
            self.epoch = Some(epoch);
        }
        let share = self.shape.share(worker);
        let range = step * batch + share.start..step * batch + share.end;
        let which = self.order.get(range).unwrap_or(&[]).iter().map(|sample| *sample as usize);
        self.data.train.batch(which)
    }
}
