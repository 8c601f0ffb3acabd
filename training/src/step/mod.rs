//! The graph of a training step, split over the processes of a job.
//!
//! ```text
//!  parameter server s (part W + s of W + S)           worker w (parts 0 to W − 1)
//!    assign.v ───────────────────────────────────────▶ forward.1@w … forward.n@w ─▶ loss@w
//!    push.v ◀──────────────────────────────────────── backward.n@w … backward.1@w ◀──┘
//! ```
//!
//! The variables are dealt to the servers in turn: the first one to server 0, the next one to server 1, and so
//! on round robin (the paper, section 5). A server adds the gradients up in the order of the workers, so the
//! bits don't depend on the number of servers.
//!
//! The forward and the backward pass go layer by layer, so a gradient crosses while those of the layers below
//! are computed. The variables are in [`Variables`]: the assign nodes of a step apply the gradients of the
//! step before.
//!
//! Every process builds the whole graph, and the kernels of its own part.

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tonic_rdma_graph::dataflow::{Dim, Fact, Kernel, Node, NodeId, Outlet, Role, Topology};
use tonic_rdma_graph::placement::{Part, Partition, Placements};
use tonic_rdma_tensor::Dtype;

use crate::array::{Array, Error};
use crate::data::{SIDE, part};
use crate::layer::{Gradients, cross_entropy};
use crate::network::{EMBEDDING, Model, TABLE, Variable, rows};
use crate::variables::{Gradient, Variables};

/// A job, as far as its graph depends on it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct JobShape {
    pub(crate) model: Model,
    pub(crate) workers: usize,
    /// Parameter servers, at most as many as the model has variables.
    pub(crate) servers: usize,
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

/// The graph of a step, with the kernels of one part. Its results are the losses of the workers, in their
/// order: the parts of the mean loss of the batch.
pub(crate) struct StepGraph {
    pub(crate) graph: Arc<Topology>,
    pub(crate) placements: Arc<Placements>,
    pub(crate) kernels: HashMap<NodeId, Box<dyn Kernel<Array>>>,
    /// The inputs of all workers.
    pub(crate) feeds: HashMap<NodeId, (usize, Feed)>,
}

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

impl JobShape {
    /// Returns the number of processes.
    pub(crate) fn parts(&self) -> usize {
        self.workers + self.servers
    }

    /// Returns the part that keeps a variable: the parameter servers have the variables in turn.
    pub(crate) fn keeper(&self, variable: usize) -> usize {
        self.workers + variable % self.servers.max(1)
    }

    /// Returns the range of a worker's samples in a batch.
    pub(crate) fn share(&self, worker: usize) -> std::ops::Range<usize> {
        part(self.batch, self.workers, worker)
    }

    /// Returns the name of a part, for people to read.
    pub(crate) fn name(&self, part: usize) -> String {
        match part.checked_sub(self.workers) {
            None => format!("worker {part}"),
            Some(_) if self.servers == 1 => "the parameter server".to_owned(),
            Some(server) => format!("parameter server {server}"),
        }
    }

    /// Returns the variables that a part keeps, with their first values.
    pub(crate) fn variables(&self, own: usize, seed: u64) -> Vec<Variable> {
        let all = self.model.variables(seed).into_iter().enumerate();
        all.filter(|(index, _)| self.keeper(*index) == own).map(|(_, variable)| variable).collect()
    }

    /// Builds the graph, with the kernels of the part `own`, which keeps `variables`.
    pub(crate) fn build(&self, own: usize, variables: &Arc<Variables>) -> Result<StepGraph, Error> {
        let (graph, variables) = (Topology::new(), Arc::clone(variables));
        let (parts, kernels, feeds) = (Vec::new(), HashMap::new(), HashMap::new());
        let mut builder = Builder { graph, parts, kernels, feeds, variables, own };
        // The part that keeps each variable, and the output that gives the variable out.
        let mut kept: HashMap<String, (usize, Outlet)> = HashMap::new();
        for (index, (name, dims)) in self.model.shapes().into_iter().enumerate() {
            let part = self.keeper(index);
            let outlet = builder.assign(part, &name, &dims)?;
            kept.insert(name, (part, outlet));
        }
        let of =
            |name: &str| kept.get(name).copied().ok_or_else(|| wrong(name, "the graph has no such variable"));
        let mut gradients: Vec<(String, Vec<Outlet>)> = Vec::new();
        for worker in 0..self.workers {
            for (name, gradient) in self.add_worker(&mut builder, worker, &of)? {
                match gradients.iter_mut().find(|(known, _)| *known == name) {
                    Some((_, workers)) => workers.extend(gradient),
                    None => gradients.push((name, gradient)),
                }
            }
        }
        for (name, outlets) in gradients {
            let take = if name == TABLE { of_rows } else { of_workers };
            builder.push(of(&name)?.0, &name, outlets, take)?;
        }
        let Builder { graph, parts, kernels, feeds, .. } = builder;
        let partition = Partition::new(&graph, self.parts(), parts)?;
        let placements = Arc::new(Placements::new(&graph, &partition)?);
        Ok(StepGraph { graph: Arc::new(graph), placements, kernels, feeds })
    }
}

/// Takes the gradients of all workers.
fn of_workers(arrays: &[Array]) -> Result<Gradient, Error> {
    let blocks = arrays.iter().map(|array| Ok(array.as_floats()?.clone()));
    Ok(Gradient::Sum(blocks.collect::<Result<_, Error>>()?))
}

/// Takes the numbers of rows and the gradients of these rows, of each worker.
fn of_rows(arrays: &[Array]) -> Result<Gradient, Error> {
    let pairs = arrays.chunks_exact(2).map(|pair| match pair {
        [rows, gradients] => Ok((rows.as_words()?.clone(), gradients.as_floats()?.clone())),
        _ => Err("rows come with their gradients".into()),
    });
    Ok(Gradient::Rows(pairs.collect::<Result<_, Error>>()?))
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
    ) -> Result<NodeId, Error> {
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
    ) -> Result<NodeId, Error> {
        let kind = name.split(['.', '@']).next().unwrap_or_default().to_owned();
        // The partition is given, so nothing asks for the work.
        let id = self.graph.add(Node { name, kind, role, inputs, outputs, work: 0, stays })?;
        self.parts.push(Part(part));
        Ok(id)
    }

    /// Adds an input that the program feeds at a worker.
    fn feed(&mut self, worker: usize, feed: Feed, fact: Fact) -> Result<Outlet, Error> {
        let name = if feed == Feed::Samples { "samples" } else { "targets" };
        let id = self.add(worker, Role::Input, format!("{name}@{worker}"), Vec::new(), vec![fact], false)?;
        self.feeds.insert(id, (worker, feed));
        Ok(first(id))
    }

    /// Adds the node that gives a variable out.
    fn assign(&mut self, part: usize, variable: &str, dims: &[usize]) -> Result<Outlet, Error> {
        let (variables, name) = (Arc::clone(&self.variables), variable.to_owned());
        let assign = move |step, _| Ok(vec![variables.assign(&name, step)?]);
        let name = format!("assign.{variable}");
        self.node(part, name, Vec::new(), vec![known(Dtype::F32, dims)], false, assign).map(first)
    }

    /// Adds the node that takes the gradient of a variable. `take` makes it from the inputs.
    fn push(
        &mut self,
        part: usize,
        variable: &str,
        inputs: Vec<Outlet>,
        take: fn(&[Array]) -> Result<Gradient, Error>,
    ) -> Result<(), Error> {
        let (variables, name) = (Arc::clone(&self.variables), variable.to_owned());
        let push = move |step, inputs: Vec<Array>| {
            variables.push(&name, step, take(&inputs)?)?;
            Ok(Vec::new())
        };
        self.node(part, format!("push.{variable}"), inputs, Vec::new(), false, push).map(drop)
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

fn wrong(node: &str, reason: &str) -> Error {
    format!("node {node}: {reason}").into()
}

/// The largest absolute value of an element of a worker's gradient of texts (Graves 2013, arXiv:1308.0850,
/// section 2.1, clips LSTM derivatives to ±1 or ±10).
pub(crate) const CLIP: f32 = 1.0;

impl JobShape {
    /// Adds the passes of a worker, layer by layer. `kept` returns the part that keeps a variable, and the output
    /// that gives it out. Returns what the worker hands in for each variable, in the order in which it is
    /// computed: the gradient, or for the table of characters the numbers of rows and their gradients.
    ///
    /// Texts have varying lengths. So the numbers of the characters, their rows in the table and the
    /// gradients of the rows cross with shapes that are not known before the step:
    ///
    /// ```text
    ///  part of the table    rows: looks the rows of the characters up      (samples, length) → (samples, length, embedding)
    ///  worker               LSTM, linear layer, cross entropy
    /// ```
    fn add_worker(
        &self,
        builder: &mut Builder,
        worker: usize,
        kept: &impl Fn(&str) -> Result<(usize, Outlet), Error>,
    ) -> Result<Vec<(String, Vec<Outlet>)>, Error> {
        let (model, samples, texts) = (self.model, self.share(worker).len(), self.model.reads_texts());
        let varying = |dtype, rest: &[usize]| {
            let length = Dim::Symbolic(format!("L{worker}").into());
            let rest = rest.iter().map(|length| Dim::Known(*length as u64));
            Fact { dtype, dims: [Dim::Known(samples as u64), length].into_iter().chain(rest).collect() }
        };
        // What is not known before the step, and never crosses.
        let inner = || known(Dtype::U8, &[0]);
        let (of_samples, of_targets) = match texts {
            true => (varying(Dtype::U32, &[]), varying(Dtype::U32, &[])),
            false => (known(Dtype::F32, &[samples, 1, SIDE, SIDE]), known(Dtype::U32, &[samples])),
        };
        let fed = builder.feed(worker, Feed::Samples, of_samples)?;
        let targets = builder.feed(worker, Feed::Targets, of_targets)?;
        let of_rows = varying(Dtype::F32, &[EMBEDDING]);
        let mut value = fed;
        if texts {
            let name = format!("rows@{worker}");
            let look_up = |_, arrays| {
                let [table, characters] = inputs(arrays)?;
                Ok(vec![rows(table.as_floats()?, characters.as_words()?)?])
            };
            let ((keeper, table), facts) = (kept(TABLE)?, vec![of_rows.clone()]);
            value = first(builder.node(keeper, name, vec![table, fed], facts, false, look_up)?);
        }
        let layers = model.layers();
        let mut tapes = Vec::new();
        for (index, layer) in layers.iter().enumerate() {
            // The gradient of the pictures is not needed.
            let gradients = if index == 0 && !texts { Gradients::Variables } else { Gradients::All };
            let variables = layer.variables.iter().map(|(name, _)| kept(name).map(|kept| kept.1));
            let of_node = [Ok(value)].into_iter().chain(variables).collect::<Result<_, _>>()?;
            let of_layer = layer.clone();
            let forward = move |_, arrays: Vec<Array>| {
                let mut tensors = arrays.into_iter().map(Array::into_tensor);
                let input = tensors.next().ok_or("a layer has no input")??;
                let (output, tape) =
                    of_layer.forward(&input, tensors.collect::<Result<_, _>>()?, gradients)?;
                Ok(vec![Array::Tensor(output), Array::Tape(Arc::new(tape))])
            };
            let name = format!("forward.{}@{worker}", layer.name);
            let node = builder.node(worker, name, of_node, vec![inner(), inner()], true, forward)?;
            value = first(node);
            tapes.push(output(node, 1));
        }
        // Each worker has its share of the batch's mean, so that the gradients of all workers add up to that
        // of the mean.
        let share = samples as f32 / self.batch as f32;
        let loss = move |_, arrays| {
            let [logits, targets] = inputs(arrays)?;
            let targets = targets.into_tensor()?.flatten_all()?;
            let weights = model.weights(&targets, share)?;
            let (loss, gradient) = cross_entropy(&logits.into_tensor()?, &targets, &weights)?;
            Ok(vec![Array::floats(&[1], vec![loss])?, Array::Tensor(gradient)])
        };
        let facts = vec![known(Dtype::F32, &[1]), inner()];
        let loss = builder.node(worker, format!("loss@{worker}"), vec![value, targets], facts, true, loss)?;
        builder.graph.result(first(loss))?;
        let mut gradient = output(loss, 1);
        let mut gradients = Vec::new();
        for (index, (layer, tape)) in layers.iter().zip(tapes).enumerate().rev() {
            let number = layer.variables.len();
            let mut facts: Vec<Fact> =
                layer.variables.iter().map(|(_, dims)| known(Dtype::F32, dims)).collect();
            if index > 0 || texts {
                facts.push(if index == 0 { of_rows.clone() } else { inner() });
            }
            let backward = move |_, arrays| {
                let [tape, gradient] = inputs(arrays)?;
                let Array::Tape(tape) = tape else { return Err("the forward pass kept nothing".into()) };
                let gradients = tape.backward(&gradient.into_tensor()?)?.into_iter().enumerate();
                let crosses = |position| !texts && position < number;
                let array = |(position, gradient)| match crosses(position) {
                    true => Array::take(gradient),
                    false => Ok(Array::Tensor(gradient)),
                };
                gradients.map(array).collect()
            };
            let name = format!("backward.{}@{worker}", layer.name);
            // The gradients of texts are made in a varying number of allocations, so they don't cross: those
            // of the clips do.
            let node = builder.node(worker, name, vec![tape, gradient], facts, texts, backward)?;
            for (position, (name, _)) in layer.variables.iter().enumerate() {
                gradients.push((
                    name.clone(),
                    vec![self.add_clip(builder, worker, name, output(node, position))?],
                ));
            }
            gradient = output(node, number);
        }
        if texts {
            gradients.push((TABLE.to_owned(), vec![fed, self.add_clip(builder, worker, TABLE, gradient)?]));
        }
        Ok(gradients)
    }

    /// Adds the clip of a gradient of texts.
    fn add_clip(
        &self,
        builder: &mut Builder,
        worker: usize,
        name: &str,
        gradient: Outlet,
    ) -> Result<Outlet, Error> {
        if !self.model.reads_texts() {
            return Ok(gradient);
        }
        let facts = builder.graph.fact(gradient).cloned().into_iter().collect();
        let clip = |_, arrays| {
            let [gradient] = inputs(arrays)?;
            Ok(vec![Array::clipped(&gradient.into_tensor()?, CLIP)?])
        };
        builder.node(worker, format!("clip.{name}@{worker}"), vec![gradient], facts, false, clip).map(first)
    }
}
