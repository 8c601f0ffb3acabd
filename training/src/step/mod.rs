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

mod passes;
mod ring;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tonic_rdma_graph::GraphError;
use tonic_rdma_graph::dataflow::{Fact, Kernel, Node, NodeId, Outlet, Role, Topology};
use tonic_rdma_graph::placement::{Part, Partition, Placements, analyse};
use tonic_rdma_tensor::Dtype;

use crate::Error;
use crate::array::Array;
use crate::data::part;
use crate::network::{Model, TABLE, Variable};
use crate::variables::{Gradient, Variables};

/// How the workers exchange gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Synchrony {
    /// A further process keeps the variables. It adds the gradients up in the order of the workers.
    ParameterServer,
    /// Each worker keeps all variables. Sums of gradients go round the ring of workers, cut into as many ranges as there are workers.
    Allreduce,
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

/// The graph of a step, with the kernels of one part. Its results are the losses of the workers, in their order: the parts of the mean
/// loss of the batch.
pub(crate) struct StepGraph {
    pub(crate) graph: Arc<Topology>,
    pub(crate) placements: Arc<Placements>,
    pub(crate) kernels: HashMap<NodeId, Box<dyn Kernel<Array>>>,
    /// The inputs of all workers.
    pub(crate) feeds: HashMap<NodeId, (usize, Feed)>,
}

/// What each worker hands in for a variable: the gradient, or for the table of characters the numbers of rows and their gradients.
type Handed = Vec<Vec<Outlet>>;

/// A graph under construction, and the kernels of one part.
struct Builder {
    graph: Topology,
    /// The part of each node.
    parts: Vec<Part>,
    kernels: HashMap<NodeId, Box<dyn Kernel<Array>>>,
    feeds: HashMap<NodeId, (usize, Feed)>,
    variables: Arc<Variables>,
    own: usize,
}

impl Shape {
    /// Returns the number of processes.
    pub(crate) fn parts(&self) -> usize {
        self.workers + usize::from(self.synchrony == Synchrony::ParameterServer)
    }

    /// Returns the part that tests the model: it has all variables.
    pub(crate) fn chief(&self) -> usize {
        if self.synchrony == Synchrony::ParameterServer { self.workers } else { 0 }
    }

    /// Returns whether a part keeps a variable.
    fn keeps(&self, part: usize, variable: &str) -> bool {
        part == self.chief() || self.synchrony == Synchrony::Allreduce && variable != TABLE
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
    pub(crate) fn variables(&self, own: usize, seed: u64) -> Vec<Variable> {
        let all = self.model.variables(seed).into_iter();
        all.filter(|variable| self.keeps(own, &variable.name)).collect()
    }

    /// Builds the graph, with the kernels of the part `own`, which keeps `variables`.
    pub(crate) fn build(&self, own: usize, variables: &Arc<Variables>) -> Result<StepGraph, GraphError> {
        let (graph, variables) = (Topology::new(), Arc::clone(variables));
        let (parts, kernels, feeds) = (Vec::new(), HashMap::new(), HashMap::new());
        let mut builder = Builder { graph, parts, kernels, feeds, variables, own };
        let shapes = self.model.shapes();
        // The outputs that give a variable out, by the part that keeps it.
        let mut given: HashMap<(usize, &str), Outlet> = HashMap::new();
        for part in 0..self.parts() {
            for (name, dims) in shapes.iter().filter(|(name, _)| self.keeps(part, name)) {
                given.insert((part, name), builder.assign(part, &self.suffix(part), name, dims)?);
            }
        }
        let mut gradients: Vec<(String, Handed)> = Vec::new();
        for worker in 0..self.workers {
            let of = |name: &str| {
                let outlet = given.get(&(worker, name)).or_else(|| given.get(&(self.chief(), name)));
                outlet.copied().ok_or_else(|| wrong(name, "the graph has no such variable"))
            };
            for (name, gradient) in self.add_worker(&mut builder, worker, &of)? {
                match gradients.iter_mut().find(|(known, _)| *known == name) {
                    Some((_, workers)) => workers.push(gradient),
                    None => gradients.push((name, vec![gradient])),
                }
            }
        }
        for (turn, (name, handed)) in gradients.into_iter().enumerate() {
            let inputs: Vec<Outlet> = handed.into_iter().flatten().collect();
            if self.synchrony == Synchrony::Allreduce && name != TABLE {
                let dims =
                    shapes.iter().find(|(known, _)| *known == name).map(|(_, dims)| dims.iter().product());
                self.add_ring(&mut builder, &name, dims.unwrap_or(0), turn, &inputs)?;
            } else {
                let take = if name == TABLE { of_rows } else { of_workers };
                builder.push(self.chief(), &self.suffix(self.chief()), &name, inputs, take)?;
            }
        }
        let Builder { graph, parts, kernels, feeds, .. } = builder;
        let partition = Partition::new(&graph, self.parts(), parts)?;
        let placements = Arc::new(analyse(&graph, &partition)?);
        Ok(StepGraph { graph: Arc::new(graph), placements, kernels, feeds })
    }

    /// Returns what the names of a part's assign and push nodes end with.
    fn suffix(&self, part: usize) -> String {
        if part >= self.workers { String::new() } else { format!("@{part}") }
    }
}

/// Takes the gradients of all workers.
fn of_workers(arrays: &[Array]) -> Result<Gradient, Error> {
    Ok(Gradient::Sum(blocks(arrays)?))
}

/// Takes the numbers of rows and the gradients of these rows, of each worker.
fn of_rows(arrays: &[Array]) -> Result<Gradient, Error> {
    let pairs = arrays.chunks_exact(2).map(|pair| match pair {
        [rows, gradients] => Ok((rows.as_words()?.clone(), gradients.as_floats()?.clone())),
        _ => Err("rows come with their gradients".into()),
    });
    Ok(Gradient::Rows(pairs.collect::<Result<_, Error>>()?))
}

fn blocks(arrays: &[Array]) -> Result<Vec<crate::array::Block<f32>>, Error> {
    arrays.iter().map(|array| Ok(array.as_floats()?.clone())).collect()
}

impl Builder {
    /// Adds a node. `kernel` is kept if the node is in this part. If `stays`, no output crosses.
    fn node(
        &mut self,
        part: usize,
        name: String,
        inputs: Vec<Outlet>,
        outputs: Vec<Fact>,
        stays: bool,
        kernel: impl FnMut(u64, Vec<Array>) -> Result<Vec<Array>, Error> + Send + 'static,
    ) -> Result<NodeId, GraphError> {
        let id = self.add(part, Role::Compute, name, inputs, outputs, stays)?;
        if part == self.own {
            self.kernels.insert(id, Box::new(kernel));
        }
        Ok(id)
    }

    fn add(
        &mut self,
        part: usize,
        role: Role,
        name: String,
        inputs: Vec<Outlet>,
        outputs: Vec<Fact>,
        stays: bool,
    ) -> Result<NodeId, GraphError> {
        let kind = name.split(['.', '@']).next().unwrap_or_default().to_owned();
        // The partition is given, so nothing asks for the work.
        let id = self.graph.add(Node { name, kind, role, inputs, outputs, work: 0, stays })?;
        self.parts.push(Part(part));
        Ok(id)
    }

    /// Adds an input that the program feeds at a worker.
    fn feed(&mut self, worker: usize, feed: Feed, fact: Fact) -> Result<Outlet, GraphError> {
        let name = if feed == Feed::Samples { "samples" } else { "targets" };
        let id = self.add(worker, Role::Input, format!("{name}@{worker}"), Vec::new(), vec![fact], false)?;
        self.feeds.insert(id, (worker, feed));
        Ok(first(id))
    }

    /// Adds the node that gives a variable out.
    fn assign(
        &mut self,
        part: usize,
        suffix: &str,
        variable: &str,
        dims: &[usize],
    ) -> Result<Outlet, GraphError> {
        let (variables, name) = (Arc::clone(&self.variables), variable.to_owned());
        let assign = move |step, _| Ok(vec![variables.assign(&name, step)?]);
        let name = format!("assign.{variable}{suffix}");
        self.node(part, name, Vec::new(), vec![known(Dtype::F32, dims)], false, assign).map(first)
    }

    /// Adds the node that takes the gradient of a variable. `take` makes it from the inputs.
    fn push(
        &mut self,
        part: usize,
        suffix: &str,
        variable: &str,
        inputs: Vec<Outlet>,
        take: fn(&[Array]) -> Result<Gradient, Error>,
    ) -> Result<(), GraphError> {
        let (variables, name) = (Arc::clone(&self.variables), variable.to_owned());
        let push = move |step, inputs: Vec<Array>| {
            variables.push(&name, step, take(&inputs)?)?;
            Ok(Vec::new())
        };
        self.node(part, format!("push.{variable}{suffix}"), inputs, Vec::new(), false, push).map(drop)
    }
}

/// Returns the inputs of a kernel.
fn inputs<const N: usize>(inputs: Vec<Array>) -> Result<[Array; N], Error> {
    let found = inputs.len();
    inputs.try_into().map_err(|_| format!("the kernel takes {N} inputs, found {found}").into())
}

/// Returns the first output of a node.
fn first(node: NodeId) -> Outlet {
    output(node, 0)
}

/// Returns an output of a node.
fn output(node: NodeId, output: usize) -> Outlet {
    Outlet { node, output }
}

/// Returns the fact of a known shape.
fn known(dtype: Dtype, dims: &[usize]) -> Fact {
    let dims: Vec<u64> = dims.iter().map(|length| *length as u64).collect();
    Fact::known(dtype, &dims)
}

fn wrong(node: &str, reason: &str) -> GraphError {
    GraphError::Node { node: node.to_owned(), reason: reason.to_owned() }
}
