//! Builds the graph of a step node by node.

use std::collections::HashMap;
use std::sync::Arc;

use tonic_rdma_graph::GraphError;
use tonic_rdma_graph::dataflow::{Dim, Fact, Kernel, KernelError, Node, NodeId, Outlet, Role, Topology};
use tonic_rdma_tensor::Dtype;

use super::shape::Feed;
use crate::array::Array;
use crate::variables::Variables;

/// A graph under construction, and the kernels of one part.
pub(super) struct Builder {
    pub(super) graph: Topology,
    /// The part of each node.
    pub(super) parts: Vec<usize>,
    pub(super) kernels: HashMap<NodeId, Box<dyn Kernel<Array>>>,
    pub(super) feeds: HashMap<NodeId, (usize, Feed)>,
    variables: Arc<Variables>,
    own: usize,
}

/// A node without its kernel.
pub(super) struct Described {
    pub(super) part: usize,
    pub(super) name: String,
    pub(super) kind: &'static str,
    pub(super) inputs: Vec<Outlet>,
    pub(super) outputs: Vec<Fact>,
    /// In multiply-adds.
    pub(super) work: usize,
    /// Whether an output never crosses.
    pub(super) stays: bool,
}

impl Builder {
    pub(super) fn new(own: usize, variables: Arc<Variables>) -> Self {
        Self {
            graph: Topology::new(),
            parts: Vec::new(),
            kernels: HashMap::new(),
            feeds: HashMap::new(),
            variables,
            own,
        }
    }

    /// Adds a node. `kernel` is kept if the node is in this part.
    pub(super) fn node(
        &mut self,
        node: Described,
        kernel: impl FnMut(u64, Vec<Array>) -> Result<Vec<Array>, KernelError> + Send + 'static,
    ) -> Result<NodeId, GraphError> {
        let Described { part, name, kind, inputs, outputs, work, stays } = node;
        let id = self.graph.add(Node {
            name,
            kind: kind.to_owned(),
            role: Role::Compute,
            inputs,
            outputs,
            work: work as u64,
            stays,
        })?;
        self.parts.push(part);
        if part == self.own {
            self.kernels.insert(id, Box::new(kernel));
        }
        Ok(id)
    }

    /// Adds an input that the program feeds at a worker.
    pub(super) fn feed(&mut self, worker: usize, feed: Feed, fact: Fact) -> Result<Outlet, GraphError> {
        let name = match feed {
            Feed::Samples => format!("samples@{worker}"),
            Feed::Targets => format!("targets@{worker}"),
        };
        let id = self.graph.add(Node {
            name,
            kind: "Feed".to_owned(),
            role: Role::Input,
            inputs: Vec::new(),
            outputs: vec![fact],
            work: 0,
            stays: false,
        })?;
        self.parts.push(worker);
        self.feeds.insert(id, (worker, feed));
        Ok(first(id))
    }

    /// Adds the node that gives a variable out.
    pub(super) fn assign(
        &mut self,
        part: usize,
        suffix: &str,
        variable: &str,
        dims: &[usize],
    ) -> Result<Outlet, GraphError> {
        let variables = Arc::clone(&self.variables);
        let node = Described {
            part,
            name: format!("assign.{variable}{suffix}"),
            kind: "Assign",
            inputs: Vec::new(),
            outputs: vec![floats(dims)],
            work: dims.iter().product(),
            stays: false,
        };
        let variable = variable.to_owned();
        Ok(first(self.node(node, move |step, _| Ok(vec![variables.assign(&variable, step)?]))?))
    }

    /// Adds the node that takes the gradient of a variable. `make` makes it from the inputs.
    pub(super) fn push(
        &mut self,
        part: usize,
        suffix: &str,
        variable: &str,
        inputs: Vec<Outlet>,
        make: impl Fn(&[Array]) -> Result<crate::variables::Gradient, KernelError> + Send + 'static,
    ) -> Result<(), GraphError> {
        let variables = Arc::clone(&self.variables);
        let node = Described {
            part,
            name: format!("push.{variable}{suffix}"),
            kind: "Push",
            inputs,
            outputs: Vec::new(),
            work: 0,
            stays: false,
        };
        let variable = variable.to_owned();
        self.node(node, move |step, inputs| {
            variables.push(&variable, step, make(&inputs)?)?;
            Ok(Vec::new())
        })?;
        Ok(())
    }

    /// Declares the loss of the next worker.
    pub(super) fn loss(&mut self, loss: Outlet) -> Result<(), GraphError> {
        self.graph.result(loss)
    }
}

/// Returns the first output of a node.
pub(super) fn first(node: NodeId) -> Outlet {
    output(node, 0)
}

/// Returns an output of a node.
pub(super) fn output(node: NodeId, output: usize) -> Outlet {
    Outlet { node, output }
}

/// Returns the fact of float32 numbers of a known shape.
pub(super) fn floats(dims: &[usize]) -> Fact {
    known(Dtype::F32, dims)
}

/// Returns the fact of a known shape.
pub(super) fn known(dtype: Dtype, dims: &[usize]) -> Fact {
    let dims: Vec<u64> = dims.iter().map(|length| *length as u64).collect();
    Fact::known(dtype, &dims)
}

/// Returns the fact of a shape whose second dimension is called `symbol`.
pub(super) fn varying(dtype: Dtype, first: usize, symbol: &str, rest: &[usize]) -> Fact {
    let mut dims = vec![Dim::Known(first as u64), Dim::Symbolic(symbol.into())];
    dims.extend(rest.iter().map(|length| Dim::Known(*length as u64)));
    Fact { dtype, dims }
}

/// Returns the fact of what a forward pass keeps, which never crosses.
pub(super) fn tape() -> Fact {
    Fact::known(Dtype::U8, &[0])
}
