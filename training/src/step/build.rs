//! Builds the graph of a step.

use std::collections::HashMap;
use std::sync::Arc;

use tonic_rdma_graph::GraphError;
use tonic_rdma_graph::dataflow::{Kernel, NodeId, Outlet, Topology};
use tonic_rdma_graph::placement::{Part, Partition, Placements, analyse};

use super::builder::Builder;
use super::gradient::WorkerGradient;
use super::shape::{Feed, Model, Shape, Synchrony};
use super::{pictures, recurrent, ring, server};
use crate::array::Array;
use crate::variables::{Variable, Variables};

/// The graph of a step, with the kernels of one part. Its results are the losses of the workers, in their order: the parts of the mean
/// loss of the batch.
pub(crate) struct StepGraph {
    pub(crate) graph: Arc<Topology>,
    pub(crate) placements: Arc<Placements>,
    pub(crate) kernels: HashMap<NodeId, Box<dyn Kernel<Array>>>,
    /// The inputs of all workers.
    pub(crate) feeds: HashMap<NodeId, (usize, Feed)>,
}

impl Shape {
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
        let Builder { graph, parts, kernels, feeds, .. } = builder;
        let parts: Vec<Part> = parts.into_iter().map(Part).collect();
        let partition = Partition::new(&graph, self.parts(), parts)?;
        let placements = Arc::new(analyse(&graph, &partition)?);
        Ok(StepGraph { graph: Arc::new(graph), placements, kernels, feeds })
    }

    /// Adds the passes of a worker. `values` are the outputs that give its variables out. Returns the gradients, in the order in which
    /// they are computed.
    pub(super) fn add_worker(
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
    pub(super) fn shapes(&self) -> Vec<(String, Vec<usize>)> {
        match self.model {
            Model::Pictures(architecture) => pictures::shapes(architecture),
            Model::Recurrent(model) => recurrent::shapes(&model),
        }
    }
}
