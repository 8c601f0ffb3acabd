//! Data-flow graphs: nodes, the tensors between them, and what is known of their shapes before the first
//! step.
//!
//! ```text
//!  Topology   names, edges, facts, work       plain data: the same in all processes
//!  Kernel     computes the outputs of a node  only in the process that runs the node
//!  Value      a tensor of the engine          shared without a copy, or filled with bytes that arrived
//! ```
//!
//! This module never runs a node, and never moves a tensor.

use std::collections::HashMap;
use std::error::Error;
use std::fmt::{self, Debug};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::error::GraphError;
use tonic_rdma_tensor::{Dtype, MemRegion, Shape, Tensor, TensorSpec};
use tonic_rdma_verbs::unstable::RegionPool;

/// The length of a dimension.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Dim {
    /// The same length in each step.
    Known(u64),
    /// A length that differs from step to step, such as `N` or `2*N+1`.
    Symbolic(Arc<str>),
}

/// Type and shape of a tensor, as far as the graph determines them.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Fact {
    /// The type of the elements.
    pub dtype: Dtype,
    /// The dimensions, the slowest first.
    pub dims: Vec<Dim>,
}

impl Fact {
    /// Makes the fact of a tensor whose shape is known.
    ///
    /// ```
    /// use tonic_rdma_graph::dataflow::Fact;
    /// use tonic_rdma_tensor::Dtype;
    ///
    /// let fact = Fact::known(Dtype::F32, &[1, 3]);
    /// assert_eq!(fact.to_string(), "float32[1, 3]");
    /// assert_eq!(fact.bytes(1), 12);
    /// ```
    pub fn known(dtype: Dtype, dims: &[u64]) -> Self {
        Self { dtype, dims: dims.iter().map(|length| Dim::Known(*length)).collect() }
    }

    /// Returns the spec of the tensor if its shape is known.
    pub fn spec(&self) -> Option<TensorSpec> {
        let dims: Option<Vec<u64>> = self.dims.iter().map(Dim::known).collect();
        TensorSpec::new(self.dtype, Shape::new(&dims?).ok()?).ok()
    }

    /// Returns whether a tensor has the type, the number of dimensions and the known lengths of this fact.
    pub fn fits(&self, spec: &TensorSpec) -> bool {
        let dims = spec.shape().dims();
        let known = |(dim, length): (&Dim, &u64)| dim.known().is_none_or(|known| known == *length);
        self.dtype == spec.dtype() && self.dims.len() == dims.len() && self.dims.iter().zip(dims).all(known)
    }

    /// Returns the number of bytes, where `symbolic` stands for each dimension that is not known.
    pub fn bytes(&self, symbolic: u64) -> u64 {
        let elements = self.dims.iter().map(|dim| dim.known().unwrap_or(symbolic));
        elements.fold(self.dtype.size().unwrap_or(1) as u64, u64::saturating_mul)
    }
}

impl Dim {
    /// Returns the length if it is known.
    pub fn known(&self) -> Option<u64> {
        match self {
            Self::Known(length) => Some(*length),
            Self::Symbolic(_) => None,
        }
    }
}

impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Known(length) => fmt::Display::fmt(length, f),
            Self::Symbolic(expression) => fmt::Display::fmt(expression, f),
        }
    }
}

impl fmt::Display for Fact {
    /// Writes type and shape, such as `float32[N, 3]`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[", self.dtype)?;
        for (index, dim) in self.dims.iter().enumerate() {
            if index > 0 {
                f.write_str(", ")?;
            }
            fmt::Display::fmt(dim, f)?;
        }
        f.write_str("]")
    }
}

/// An error of an engine.
pub type KernelError = Box<dyn Error + Send + Sync>;

/// A tensor of an engine. Clones share its content.
pub trait Value: Clone + Send + Debug + 'static {
    /// Returns the tensor in the form in which it crosses. The result shares the content, and keeps it
    /// unchanged while it lives. An engine whose tensor is not row-major may copy it.
    ///
    /// # Errors
    /// The type of the elements can't cross.
    fn share(&self) -> Result<Tensor, KernelError>;

    /// Makes a tensor of `spec` in the memory of the engine. `fill` writes its content, row-major, and writes
    /// every byte.
    ///
    /// # Errors
    /// The engine has no tensor of this type, or `fill` failed.
    fn filled(
        spec: &TensorSpec,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<(), KernelError>,
    ) -> Result<Self, KernelError>;

    /// Makes a tensor of `spec` in memory of `pool`, into which a device puts the content. Returns `None`,
    /// the default, if the engine has no way to do that. Then the content is copied to
    /// [`filled`](Self::filled).
    ///
    /// # Errors
    /// The engine has no tensor of this type, or there is no memory.
    fn hosted(spec: &TensorSpec, pool: &RegionPool) -> Result<Option<Hosted<Self>>, KernelError> {
        let _ = (spec, pool);
        Ok(None)
    }
}

/// A tensor of an engine whose content is still to come.
pub struct Hosted<V> {
    /// The memory of the tensor, as long as its content.
    pub memory: MemRegion,
    /// Makes the tensor of the memory, which has its content.
    pub finish: Box<dyn FnOnce(MemRegion) -> Result<V, KernelError> + Send>,
}

impl<V> Debug for Hosted<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hosted").field("memory", &self.memory).finish_non_exhaustive()
    }
}

/// The computation of a node.
pub trait Kernel<V>: Send {
    /// Computes the outputs of the node in a step. An input that is not used elsewhere may be changed in
    /// place. Several steps may be in flight. Each node sees them in ascending order.
    ///
    /// # Errors
    /// The inputs have a wrong type or shape, or the engine failed.
    fn run(&mut self, step: u64, inputs: Vec<V>) -> Result<Vec<V>, KernelError>;
}

impl<V, F> Kernel<V> for F
where
    F: FnMut(u64, Vec<V>) -> Result<Vec<V>, KernelError> + Send,
{
    fn run(&mut self, step: u64, inputs: Vec<V>) -> Result<Vec<V>, KernelError> {
        self(step, inputs)
    }
}

/// Calls an engine or the program. A panic becomes an error, whose message begins with `who`.
pub(crate) fn guarded<R>(who: &str, call: impl FnOnce() -> Result<R, KernelError>) -> Result<R, KernelError> {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<&str>().copied();
        let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
        Err(format!("{who} panicked: {}", text.unwrap_or("without a message")).into())
    })
}

/// The number of a node: its position in the order in which nodes were added, which is a topological order.
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
    /// Has no inputs: its output is the same in each step. It is part of each part that uses it, so it never
    /// crosses.
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
    /// Whether all consumers of the outputs must be in the part of this node, because the outputs can't
    /// cross. Such an output is strings, or in a form that is private to the engine.
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
        let wrong = |reason: &str| GraphError::of_node(&node.name, reason);
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
            return Err(GraphError::of_node(node, format!("has no output {}", outlet.output)));
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
