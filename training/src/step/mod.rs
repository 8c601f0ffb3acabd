//! The graph of a training step, split over the processes of a job.
//!
//! ```text
//!  parameter server (part W of W + 1)                 worker w (parts 0 to W − 1)
//!    assign.v ───────────────────────────────────────▶ forward.1@w … forward.n@w ─▶ loss@w
//!    push.v ◀──────────────────────────────────────── backward.n@w … backward.1@w ◀──┘
//!
//!  allreduce (W parts)
//!    each worker has its own assign.v@w and push.v@w, and the gradients go round the ring of workers in between
//! ```
//!
//! The forward and the backward pass go layer by layer, so a gradient crosses while those of the layers below are computed. The variables
//! are in [`Variables`]: the assign nodes of a step apply the gradients of the step before.
//!
//! Every process builds the whole graph, and the kernels of its own part.

mod builder;
mod embedding;
mod kernels;
mod pictures;
mod recurrent;
mod ring;
mod server;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tonic_rdma_graph::GraphError;
use tonic_rdma_graph::dataflow::{Kernel, KernelError, NodeId, Outlet, Topology};
use tonic_rdma_graph::placement::{Part, Partition, Placements, analyse};

use crate::array::Array;
use crate::data::shards::part;
use crate::model::Architecture;
use crate::variables::{Gradient, Variable, Variables};
use builder::Builder;

pub(crate) use recurrent::{Recurrent, test as test_recurrent};

/// How the workers exchange gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Synchrony {
    /// A further process keeps the variables. It adds the gradients up in the order of the workers.
    ParameterServer,
    /// Each worker keeps all variables. Sums of gradients go round the ring of workers, cut into as many ranges as there are workers.
    Allreduce,
}

/// The model that is trained.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Model {
    Pictures(Architecture),
    Recurrent(Recurrent),
}

/// A job, as far as its graph depends on it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Shape {
    pub(crate) model: Model,
    pub(crate) synchrony: Synchrony,
    pub(crate) workers: usize,
    /// Samples of one step, of all workers together.
    pub(crate) batch: usize,
}

/// What the program feeds into a worker's step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Feed {
    /// Pictures, or the numbers of characters.
    Samples,
    /// The class of each picture, or the number of each next character.
    Targets,
}

/// The graph of a step, with the kernels of one part.
pub(crate) struct StepGraph {
    pub(crate) graph: Arc<Topology>,
    pub(crate) placements: Arc<Placements>,
    pub(crate) kernels: HashMap<NodeId, Box<dyn Kernel<Array>>>,
    /// The inputs of all workers.
    pub(crate) feeds: HashMap<NodeId, (usize, Feed)>,
    /// The loss of each worker: its part of the mean loss of the batch.
    pub(crate) losses: Vec<Outlet>,
}

impl Shape {
    /// Returns the number of processes.
    pub(crate) fn parts(&self) -> usize {
        match self.synchrony {
            Synchrony::ParameterServer => self.workers + 1,
            Synchrony::Allreduce => self.workers,
        }
    }

    /// Returns the part that tests the model: it has all variables.
    pub(crate) fn chief(&self) -> usize {
        match self.synchrony {
            Synchrony::ParameterServer => self.workers,
            Synchrony::Allreduce => 0,
        }
    }

    /// Returns the place of a worker's samples in a batch.
    pub(crate) fn share(&self, worker: usize) -> std::ops::Range<usize> {
        part(self.batch, self.workers, worker)
    }

    /// Returns the name of a part, for people to read.
    pub(crate) fn name(&self, part: usize) -> String {
        if part >= self.workers { "the parameter server".to_owned() } else { format!("worker {part}") }
    }

    /// Returns the variables that a part keeps, with their first values.
    pub(crate) fn variables(&self, own: usize, seed: u64) -> candle_core::Result<Vec<Variable>> {
        let all = match self.model {
            Model::Pictures(architecture) => pictures::variables(architecture, seed)?,
            Model::Recurrent(model) => recurrent::variables(&model, seed),
        };
        let kept = |variable: &Variable| match self.synchrony {
            Synchrony::ParameterServer => own == self.workers,
            Synchrony::Allreduce => own == 0 || variable.name != recurrent::EMBEDDING,
        };
        Ok(all.into_iter().filter(kept).collect())
    }

    /// Builds the graph, with the kernels of the part `own`, which keeps `variables`.
    pub(crate) fn build(&self, own: usize, variables: &Arc<Variables>) -> Result<StepGraph, GraphError> {
        let mut builder = Builder::new(own, Arc::clone(variables));
        match self.synchrony {
            Synchrony::ParameterServer => server::add(&mut builder, self)?,
            Synchrony::Allreduce => ring::add(&mut builder, self)?,
        }
        let Builder { graph, parts, kernels, feeds, losses, .. } = builder;
        let parts: Vec<Part> = parts.into_iter().map(Part).collect();
        let partition = Partition::new(&graph, self.parts(), parts)?;
        let placements = Arc::new(analyse(&graph, &partition)?);
        Ok(StepGraph { graph: Arc::new(graph), placements, kernels, feeds, losses })
    }

    /// Adds the passes of a worker. `values` are the outputs that give its variables out. Returns the gradients, in the order in which
    /// they are computed.
    fn add_worker(
        &self,
        builder: &mut Builder,
        worker: usize,
        values: &HashMap<String, Outlet>,
    ) -> Result<Vec<(String, WorkerGradient)>, GraphError> {
        match self.model {
            Model::Pictures(architecture) => pictures::add(builder, self, architecture, worker, values),
            Model::Recurrent(model) => recurrent::add(builder, self, &model, worker, values),
        }
    }

    /// Returns the number of elements of all variables.
    pub(crate) fn parameters(&self) -> usize {
        self.shapes().iter().map(|(_, dims)| dims.iter().product::<usize>()).sum()
    }

    /// Returns names and shapes of all variables, as [`variables`](Self::variables) has them.
    fn shapes(&self) -> Vec<(String, Vec<usize>)> {
        match self.model {
            Model::Pictures(architecture) => pictures::shapes(architecture),
            Model::Recurrent(model) => recurrent::shapes(&model),
        }
    }
}

/// What a worker computes for a variable.
#[derive(Clone, Copy, Debug)]
enum WorkerGradient {
    /// The gradient of all elements.
    Dense(Outlet),
    /// The numbers of rows, and their gradients.
    Rows { rows: Outlet, gradients: Outlet },
}

impl WorkerGradient {
    /// Returns the outputs that the gradient consists of.
    fn outlets(&self) -> Vec<Outlet> {
        match *self {
            Self::Dense(gradient) => vec![gradient],
            Self::Rows { rows, gradients } => vec![rows, gradients],
        }
    }
}

/// Makes the gradient of a variable from the arrays of all workers, in their order.
fn gradient_of(workers: &[WorkerGradient], arrays: &[Array]) -> Result<Gradient, KernelError> {
    match workers.first() {
        Some(WorkerGradient::Rows { .. }) => {
            let pairs = arrays.chunks_exact(2).map(|pair| match pair {
                [rows, gradients] => Ok((rows.as_words()?.clone(), gradients.as_floats()?.clone())),
                _ => Err("rows come with their gradients".into()),
            });
            Ok(Gradient::Rows(pairs.collect::<Result<_, KernelError>>()?))
        }
        _ => Ok(Gradient::Sum(
            arrays.iter().map(|array| Ok(array.as_floats()?.clone())).collect::<Result<_, KernelError>>()?,
        )),
    }
}
