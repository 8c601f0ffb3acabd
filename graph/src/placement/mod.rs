//! The parts of a split graph, the tensors that cross from part to part, and how each of them is placed
//! (§3.4).
//!
//! A tensor whose shape is known gets a buffer at the receiver before the first step (static placement,
//! §3.2). Any other tensor is read by the receiver once its shape is known (dynamic allocation, §3.3). So
//! is a tensor of known shape whose buffers would not fit into a limit ([`Placements::within`]).
//!
//! ```text
//!  Topology ─┐
//!            ├─▶ Placements: for each part its nodes, and the crossing tensors
//!  Partition ┘
//! ```
//!
//! This module never moves a tensor, and never decides which node belongs to which part: `partition` does.

mod footprint;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashSet};
use std::fmt;

use crate::dataflow::{Dim, Fact, KernelError, NodeId, Outlet, Role, Topology};
use crate::error::{GraphError, Problem};
use tonic_rdma_tensor::TensorSpec;

pub use self::footprint::{Buffers, Footprint, MemoryUse};

/// The number of a part of a split graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Part(pub usize);

/// The number of a crossing tensor. All parts number them alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CrossingId(pub usize);

/// A tensor that crosses from one part to another. A tensor with consumers in several other parts crosses
/// once to each of these parts.
#[derive(Clone, Debug)]
pub struct Crossing {
    /// The number of this crossing tensor.
    pub id: CrossingId,
    /// A name that no other crossing tensor has.
    pub name: String,
    /// The output that crosses.
    pub outlet: Outlet,
    /// The part of the producer.
    pub from: Part,
    /// The part of the consumers.
    pub to: Part,
    /// The consumers in the part `to`.
    pub consumers: Vec<NodeId>,
    /// How the tensor is placed.
    pub placement: Placement,
}

impl Crossing {
    /// Makes the error of a tensor that could not be sent, received or made a value. `peer` is the other
    /// part.
    pub(crate) fn failed(&self, peer: Part, step: u64, source: impl Into<KernelError>) -> GraphError {
        Problem::Transfer { crossing: self.name.clone(), step, peer: peer.0, source: source.into() }.into()
    }
}

/// How a crossing tensor is placed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Placement {
    /// The shape is known: a slot at the receiver, whose address the sender learns before the first step; one
    /// WRITE (§3.2).
    Static(TensorSpec),
    /// The shape is not known: metadata, and a READ by the receiver (§3.3).
    Dynamic {
        /// What is known: the type, the number of dimensions, and some of the lengths.
        fact: Fact,
        /// Why the shape is not known, for people to read.
        why: String,
    },
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Placement {
    /// Returns whether the shape is known before the first step.
    pub fn is_static(&self) -> bool {
        matches!(self, Self::Static(_))
    }

    /// Checks that a tensor has the type and the shape of this placement, as far as they are known before the
    /// first step.
    ///
    /// ```
    /// use tonic_rdma_graph::dataflow::{Dim, Fact};
    /// use tonic_rdma_graph::placement::Placement;
    /// use tonic_rdma_tensor::Dtype;
    ///
    /// let fact = Fact { dtype: Dtype::F32, dims: vec![Dim::Symbolic("N".into()), Dim::Known(3)] };
    /// let placement = Placement::Dynamic { fact, why: "N is a dimension of the input".to_owned() };
    /// let spec = |dims| Fact::known(Dtype::F32, dims).spec();
    /// assert!(placement.check(&spec(&[8, 3]).ok_or("known")?).is_ok());
    /// let error = placement.check(&spec(&[8, 4]).ok_or("known")?).unwrap_err();
    /// assert_eq!(error.to_string(), "the graph says float32[N, 3], and float32[8, 4] came");
    /// # Ok::<(), &str>(())
    /// ```
    ///
    /// # Errors
    /// The type, the number of dimensions or a known length differs. The error has what was found and what
    /// the graph says.
    pub fn check(&self, spec: &TensorSpec) -> Result<(), KernelError> {
        let (fits, says) = match self {
            Self::Static(expected) => (expected == spec, expected.to_string()),
            Self::Dynamic { fact, .. } => (fact.fits(spec), fact.to_string()),
        };
        if fits { Ok(()) } else { Err(format!("the graph says {says}, and {spec} came").into()) }
    }
}

/// The nodes of each part, and the crossing tensors.
#[derive(Clone, Debug)]
pub struct Placements {
    partition: Partition,
    crossings: Vec<Crossing>,
    nodes: Vec<Vec<NodeId>>,
}

impl Placements {
    /// Finds the crossing tensors of a split graph, and places each of them (§3.4, "preallocate data
    /// buffers").
    ///
    /// Crossing tensors are numbered by producer, output and destination. So all processes with this graph
    /// and this partition number them alike.
    ///
    /// ```
    /// use tonic_rdma_graph::placement::{Partition, Placements};
    ///
    /// # use tonic_rdma_graph::dataflow::{Fact, Node, NodeId, Outlet, Role, Topology};
    /// # use tonic_rdma_tensor::Dtype;
    /// # let mut graph = Topology::new();
    /// # for name in ["input", "conv", "relu", "head"] {
    /// #     let inputs = graph.len().checked_sub(1).map(|node| Outlet { node: NodeId(node), output: 0 });
    /// #     graph.add(Node {
    /// #         name: name.to_owned(),
    /// #         kind: "Example".to_owned(),
    /// #         role: if inputs.is_none() { Role::Input } else { Role::Compute },
    /// #         inputs: inputs.into_iter().collect(),
    /// #         outputs: vec![Fact { dtype: Dtype::F32, dims: vec![tonic_rdma_graph::dataflow::Dim::Symbolic("N".into())] }],
    /// #         work: 100,
    /// #         stays: false,
    /// #     })?;
    /// # }
    /// // input ─▶ conv ─▶ relu ─▶ head, of a shape that is not known
    /// let placements = Placements::new(&graph, &Partition::at_cuts(&graph, &["relu"])?)?;
    /// let crossing = &placements.crossings()[0];
    /// assert_eq!(crossing.name, "relu to part 1");
    /// assert!(!crossing.placement.is_static());
    /// # Ok::<(), tonic_rdma_graph::GraphError>(())
    /// ```
    ///
    /// # Errors
    /// The partition is that of another graph.
    pub fn new(graph: &Topology, partition: &Partition) -> Result<Self, GraphError> {
        // Checks the partition against this graph.
        let partition = Partition::new(graph, partition.count(), partition.parts().to_vec())?;
        let nodes = nodes_of_parts(graph, &partition);
        let mut consumers: BTreeMap<(Outlet, Part), Vec<NodeId>> = BTreeMap::new();
        for (id, node) in graph.nodes() {
            let to = partition.parts()[id.0];
            for input in &node.inputs {
                let constant = graph.node(input.node).is_none_or(|node| node.role == Role::Constant);
                if constant || partition.parts()[input.node.0] == to {
                    continue;
                }
                let consumers = consumers.entry((*input, to)).or_default();
                if consumers.last() != Some(&id) {
                    consumers.push(id);
                }
            }
        }
        let symbols = Symbols::of(graph);
        let mut names = HashSet::new();
        let mut crossings = Vec::with_capacity(consumers.len());
        for ((outlet, to), consumers) in consumers {
            let id = CrossingId(crossings.len());
            let Some(fact) = graph.fact(outlet) else { continue };
            let mut name = format!("{} to part {to}", graph.outlet_name(outlet));
            if !names.insert(name.clone()) {
                // The output 1 of a node `a`, and a node `a.1`.
                name = format!("{name} ({})", id.0);
                names.insert(name.clone());
            }
            // The size of strings is not known, even if their number is.
            let sized = fact.dtype.size().is_some();
            let placement = match fact.spec().filter(|_| sized) {
                Some(spec) => Placement::Static(spec),
                None => Placement::Dynamic { fact: fact.clone(), why: symbols.why(graph, fact) },
            };
            let from = partition.parts()[outlet.node.0];
            crossings.push(Crossing { id, name, outlet, from, to, consumers, placement });
        }
        Ok(Self { partition, crossings, nodes })
    }

    /// Returns which node belongs to which part.
    pub fn partition(&self) -> &Partition {
        &self.partition
    }

    /// Returns all crossing tensors. Their numbers are their indices in this list.
    pub fn crossings(&self) -> &[Crossing] {
        &self.crossings
    }

    /// Returns a crossing tensor.
    pub fn crossing(&self, id: CrossingId) -> Option<&Crossing> {
        self.crossings.get(id.0)
    }

    /// Returns the tensors that a part sends.
    pub fn leaving(&self, part: Part) -> impl Iterator<Item = &Crossing> {
        self.crossings.iter().filter(move |crossing| crossing.from == part)
    }

    /// Returns the tensors that a part receives.
    pub fn arriving(&self, part: Part) -> impl Iterator<Item = &Crossing> {
        self.crossings.iter().filter(move |crossing| crossing.to == part)
    }

    /// Returns the nodes of a part, in topological order: the nodes that the partition puts there, and the
    /// constants that these nodes use.
    pub fn nodes_of(&self, part: Part) -> &[NodeId] {
        self.nodes.get(part.0).map_or(&[], Vec::as_slice)
    }
}

fn nodes_of_parts(graph: &Topology, partition: &Partition) -> Vec<Vec<NodeId>> {
    let mut nodes: Vec<Vec<NodeId>> = vec![Vec::new(); partition.count()];
    for (id, node) in graph.nodes() {
        let part = partition.parts()[id.0];
        nodes[part.0].push(id);
        let constants = node.inputs.iter().map(|input| input.node).filter(|input| {
            graph.node(*input).is_some_and(|node| node.role == Role::Constant)
                && partition.parts()[input.0] != part
        });
        nodes[part.0].extend(constants);
    }
    for nodes in &mut nodes {
        nodes.sort_unstable();
        nodes.dedup();
    }
    nodes
}

/// The first node at which each symbol of the graph's shapes is seen.
struct Symbols<'a>(BTreeMap<&'a str, NodeId>);

impl<'a> Symbols<'a> {
    fn of(graph: &'a Topology) -> Self {
        let mut first = BTreeMap::new();
        for (id, node) in graph.nodes() {
            for dim in node.outputs.iter().flat_map(|fact| &fact.dims) {
                for symbol in symbols(dim) {
                    first.entry(symbol).or_insert(id);
                }
            }
        }
        Self(first)
    }

    /// Returns why the shape of a tensor is not known.
    fn why(&self, graph: &Topology, fact: &Fact) -> String {
        let reasons = fact.dims.iter().enumerate().filter(|(_, dim)| dim.known().is_none());
        let reasons: Vec<String> = reasons
            .map(|(index, dim)| {
                let origins: Vec<String> = symbols(dim)
                    .filter_map(|symbol| {
                        let node = graph.node(*self.0.get(symbol)?)?;
                        Some(match node.role {
                            Role::Input => format!("{symbol} is a dimension of the input {}", node.name),
                            _ => format!("{symbol} comes from node {} ({})", node.name, node.kind),
                        })
                    })
                    .collect();
                match origins.is_empty() {
                    true => format!("dimension {index} is {dim}"),
                    false => format!("dimension {index} is {dim}: {}", origins.join(", ")),
                }
            })
            .collect();
        match reasons.is_empty() {
            true => format!("elements of type {} have no fixed size", fact.dtype),
            false => reasons.join("; "),
        }
    }
}

/// Returns the names in the expression of a dimension.
fn symbols(dim: &Dim) -> impl Iterator<Item = &str> {
    let expression = match dim {
        Dim::Known(_) => "",
        Dim::Symbolic(expression) => expression,
    };
    let names = expression.split(|c: char| !(c.is_alphanumeric() || c == '_'));
    names.filter(|name| name.starts_with(|c: char| c.is_alphabetic() || c == '_'))
}

/// The part of each node of a graph.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Partition {
    count: usize,
    parts: Vec<Part>,
}

impl Partition {
    /// Makes a partition into `count` parts. `parts` has the part of each node, in the order of the nodes.
    /// Edges may have any direction. A part may have no nodes.
    ///
    /// ```
    /// use tonic_rdma_graph::dataflow::{Fact, Node, Outlet, Role, Topology};
    /// use tonic_rdma_graph::placement::{Part, Partition, Placements};
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
    /// graph.add(node("sum", Role::Compute, vec![Outlet { node: relu, output: 0 }]))?;
    ///
    /// let partition = Partition::new(&graph, 2, vec![Part(0), Part(0), Part(1)])?;
    /// let placements = Placements::new(&graph, &partition)?;
    /// assert_eq!(placements.crossings().len(), 1);
    /// assert_eq!(placements.crossings()[0].name, "relu to part 1");
    /// # Ok::<(), tonic_rdma_graph::GraphError>(())
    /// ```
    ///
    /// # Errors
    /// The list has another length than the graph, names a part that does not exist, or separates a node from
    /// its consumer although the output can't cross ([`Node::stays`](crate::dataflow::Node::stays)).
    pub fn new(graph: &Topology, count: usize, parts: Vec<Part>) -> Result<Self, GraphError> {
        if parts.len() != graph.len() {
            let reason = format!("it has {} nodes, and the graph has {}", parts.len(), graph.len());
            return Err(Problem::Partition(reason).into());
        }
        for ((_, node), part) in graph.nodes().zip(&parts) {
            if part.0 >= count {
                let reason = format!("node {} is in part {part}, and there are {count} parts", node.name);
                return Err(Problem::Partition(reason).into());
            }
        }
        let partition = Self { count, parts };
        let separated = partition.edges(graph).find(|edge| edge.stays && edge.from != edge.to);
        match separated {
            None => Ok(partition),
            Some(Edge { producer, consumer, from, to, .. }) => {
                Err(Problem::Stays { producer, from: from.0, consumer, to: to.0 }.into())
            }
        }
    }

    /// Returns the number of parts.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Returns the part of a node, or `None` if the graph has no such node. A constant is also in each other
    /// part that uses it.
    pub fn part_of(&self, node: NodeId) -> Option<Part> {
        self.parts.get(node.0).copied()
    }

    /// Returns the part of each node, in the order of the nodes.
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// Checks that each tensor goes from a lower to a higher part.
    ///
    /// # Errors
    /// The error names a tensor that does not.
    pub fn check_pipeline(&self, graph: &Topology) -> Result<(), GraphError> {
        match self.edges(graph).find(|edge| edge.from > edge.to) {
            None => Ok(()),
            Some(Edge { producer, consumer, from, to, .. }) => {
                Err(Problem::Backward { producer, from: from.0, consumer, to: to.0 }.into())
            }
        }
    }

    /// Returns the edges that are no edges of a constant.
    fn edges<'a>(&'a self, graph: &'a Topology) -> impl Iterator<Item = Edge> + 'a {
        graph.nodes().flat_map(move |(id, consumer)| {
            consumer.inputs.iter().filter_map(move |input| {
                let producer = graph.node(input.node)?;
                (producer.role != Role::Constant).then_some(())?;
                Some(Edge {
                    producer: producer.name.clone(),
                    consumer: consumer.name.clone(),
                    from: self.part_of(input.node)?,
                    to: self.part_of(id)?,
                    stays: producer.stays,
                })
            })
        })
    }
}

/// An edge of the graph, by the names of its nodes.
struct Edge {
    producer: String,
    consumer: String,
    from: Part,
    to: Part,
    stays: bool,
}
