//! The nodes of a graph and their edges.

use std::collections::HashMap;

use super::Fact;
use crate::error::GraphError;

/// The number of a node: its place in the order in which nodes were added, which is a topological order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub usize);

/// An output of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Outlet {
    /// The node.
    pub node: NodeId,
    /// The number of the output.
    pub output: usize,
}

/// What a node is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Computes its outputs from its inputs.
    Compute,
    /// Has no inputs: the program feeds its output in each step.
    Input,
    /// Has no inputs: its output is the same in each step. It is part of each part that uses it, so it never crosses.
    Constant,
}

/// A node.
#[derive(Clone, Debug)]
pub struct Node {
    /// A name that no other node of the graph has.
    pub name: String,
    /// The operation, for people to read.
    pub kind: String,
    /// What the node is for.
    pub role: Role,
    /// The inputs, in order.
    pub inputs: Vec<Outlet>,
    /// What is known of each output.
    pub outputs: Vec<Fact>,
    /// An estimate of the work of a step, in multiply-adds.
    pub work: u64,
    /// Whether all consumers of the outputs must be in the part of this node, because the outputs can't cross. Such an output may be
    /// in a form that is private to the engine.
    pub stays: bool,
}

/// The nodes of a graph, in topological order, and the results of a step.
#[derive(Clone, Debug, Default)]
pub struct Topology {
    nodes: Vec<Node>,
    names: HashMap<String, NodeId>,
    results: Vec<Outlet>,
}

impl Topology {
    /// Makes a graph without nodes.
    ///
    /// ```
    /// use tonic_rdma_graph::dataflow::{Fact, Node, Outlet, Role, Topology};
    /// use tonic_rdma_tensor::Dtype;
    ///
    /// let mut graph = Topology::new();
    /// let node = |name: &str, role, inputs| Node {
    ///     name: name.to_owned(),
    ///     kind: "Example".to_owned(),
    ///     role,
    ///     inputs,
    ///     outputs: vec![Fact::known(Dtype::F32, &[1, 3])],
    ///     work: 3,
    ///     stays: false,
    /// };
    /// let input = graph.add(node("input", Role::Input, vec![]))?;
    /// let relu = graph.add(node("relu", Role::Compute, vec![Outlet { node: input, output: 0 }]))?;
    /// graph.result(Outlet { node: relu, output: 0 })?;
    /// assert_eq!(graph.node_called("relu"), Some(relu));
    /// # Ok::<(), tonic_rdma_graph::GraphError>(())
    /// ```
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a node whose inputs were added before.
    ///
    /// # Errors
    /// Another node has this name, or an input is no output of a node of the graph.
    pub fn add(&mut self, node: Node) -> Result<NodeId, GraphError> {
        let id = NodeId(self.nodes.len());
        let wrong = |reason: &str| GraphError::Node { node: node.name.clone(), reason: reason.to_owned() };
        if self.names.contains_key(&node.name) {
            return Err(wrong("another node has this name"));
        }
        if node.inputs.iter().any(|input| self.fact(*input).is_none()) {
            return Err(wrong("an input is no output of an earlier node"));
        }
        if node.role != Role::Compute && !node.inputs.is_empty() {
            return Err(wrong("an input or a constant has no inputs"));
        }
        self.names.insert(node.name.clone(), id);
        self.nodes.push(node);
        Ok(id)
    }

    /// Declares an output to be a result of each step.
    ///
    /// # Errors
    /// The graph has no such output.
    pub fn result(&mut self, outlet: Outlet) -> Result<(), GraphError> {
        if self.fact(outlet).is_none() {
            let node = format!("{}", outlet.node.0);
            return Err(GraphError::Node { node, reason: format!("has no output {}", outlet.output) });
        }
        self.results.push(outlet);
        Ok(())
    }

    /// Returns the nodes, in topological order.
    pub fn nodes(&self) -> impl ExactSizeIterator<Item = (NodeId, &Node)> + DoubleEndedIterator {
        self.nodes.iter().enumerate().map(|(index, node)| (NodeId(index), node))
    }

    /// Returns a node.
    pub fn node(&self, id: NodeId) -> Option<&Node> {
        self.nodes.get(id.0)
    }

    /// Returns the node with this name.
    pub fn node_called(&self, name: &str) -> Option<NodeId> {
        self.names.get(name).copied()
    }

    /// Returns the number of nodes.
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Returns whether the graph has no nodes.
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// Returns what is known of an output, or `None` if the graph has no such output.
    pub fn fact(&self, outlet: Outlet) -> Option<&Fact> {
        self.nodes.get(outlet.node.0)?.outputs.get(outlet.output)
    }

    /// Returns the results of each step.
    pub fn results(&self) -> &[Outlet] {
        &self.results
    }

    /// Returns the name of an output: that of its node, and the number of the output if the node has several.
    pub fn outlet_name(&self, outlet: Outlet) -> String {
        match self.nodes.get(outlet.node.0) {
            Some(node) if node.outputs.len() == 1 => node.name.clone(),
            Some(node) => format!("{}.{}", node.name, outlet.output),
            None => format!("node {}.{}", outlet.node.0, outlet.output),
        }
    }
}
