//! One part of a job in one mode of transfer.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use tonic_rdma_graph::GraphError;
use tonic_rdma_graph::dataflow::{KernelError, NodeId, Outlet};
use tonic_rdma_graph::placement::Part;
use tonic_rdma_graph::schedule::{Executor, Program, Settings, Transfers, Work};
use tonic_rdma_graph::sites::NodeSites;
use xxhash_rust::xxh3::Xxh3;

use super::messages::{Ran, Sent, SentTensor};
use super::samples::Feeder;
use crate::array::Array;
use crate::step::{Feed, StepGraph};
use crate::variables::Variables;

/// One part of a job.
pub(crate) struct Trainer {
    executor: Executor<Array>,
    program: Fed,
    crossings: Vec<(tonic_rdma_graph::placement::CrossingId, String, bool)>,
}

/// The program of a part: it feeds the samples, and keeps the losses.
struct Fed {
    feeder: Feeder,
    feeds: HashMap<NodeId, (usize, Feed)>,
    losses: Vec<(u64, f32)>,
}

impl Program<Array> for Fed {
    fn feed(&mut self, step: u64, input: NodeId) -> Result<Array, KernelError> {
        let (worker, feed) = self.feeds.get(&input).copied().ok_or("the graph has another input")?;
        self.feeder.feed(step, worker, feed)
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
        registered: u64,
        deadline: Duration,
    ) -> Result<Self, GraphError> {
        let StepGraph { graph, placements, kernels, feeds, .. } = graph;
        let sites = Arc::new(NodeSites::new(&graph, registered));
        let crossings = placements
            .leaving(Part(own))
            .map(|crossing| (crossing.id, crossing.name.clone(), crossing.placement.is_static()))
            .collect();
        // A step reads the variables that the step before has changed, so one step is in flight.
        let mut settings = Settings::default();
        settings.window = 1;
        settings.deadline = deadline;
        let executor = Executor::new(graph, placements, Part(own), kernels, transfers, sites, settings)?;
        Ok(Self { executor, program: Fed { feeder, feeds, losses: Vec::new() }, crossings })
    }

    /// Runs steps. All parts run the same ones.
    pub(crate) fn run(&mut self, steps: Range<u64>) -> Result<Ran, GraphError> {
        let before = self.sent();
        self.program.losses.clear();
        let report = self.executor.run(steps, Work::Compute, &mut self.program)?;
        self.program.losses.sort_by_key(|(step, _)| *step);
        let mut times = report.steps;
        times.sort_by_key(|time| time.step);
        Ok(Ran {
            losses: self.program.losses.iter().map(|(_, loss)| *loss).collect(),
            steps: times.iter().map(|time| time.ended.saturating_sub(time.began).as_secs_f64()).collect(),
            elapsed: report.elapsed.as_secs_f64(),
            sent: self.sent() - before,
        })
    }

    fn sent(&self) -> Sent {
        let mut sum = Sent::default();
        self.sent_tensors().into_iter().for_each(|tensor| sum += tensor.sent);
        sum
    }

    /// Returns how each crossing tensor was sent by this part, in all steps.
    pub(crate) fn sent_tensors(&self) -> Vec<SentTensor> {
        let sent = |(id, name, is_static): &(_, String, bool)| {
            let counts = self.executor.transfers().counts(*id);
            SentTensor {
                name: name.clone(),
                placement: if *is_static { "static" } else { "dynamic" }.to_owned(),
                sent: Sent {
                    tensors: counts.sent,
                    bytes: counts.bytes,
                    copied: counts.copied,
                    inline: counts.inline,
                },
            }
        };
        self.crossings.iter().map(sent).collect()
    }
}

/// Returns a hash of the bits of all variables.
pub(crate) fn hash(variables: &Variables) -> Result<String, KernelError> {
    let mut hash = Xxh3::new();
    for (name, values) in variables.values()? {
        hash.update(name.as_bytes());
        values.values().iter().for_each(|value| hash.update(&value.to_bits().to_le_bytes()));
    }
    Ok(format!("{:016x}", hash.digest()))
}
