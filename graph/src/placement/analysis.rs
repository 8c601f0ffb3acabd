//! The analysis of a split graph.

use std::collections::{BTreeMap, HashSet};

use super::{Crossing, CrossingId, Part, Partition, Placement};
use crate::dataflow::{Dim, Fact, NodeId, Outlet, Role, Topology};
use crate::error::GraphError;

/// The nodes of each part, and the crossing tensors.
#[derive(Clone, Debug)]
pub struct Placements {
    partition: Partition,
    crossings: Vec<Crossing>,
    nodes: Vec<Vec<NodeId>>,
}

/// Finds the crossing tensors of a split graph, and places each of them (§3.4, "preallocate data buffers").
///
/// Crossing tensors are numbered by producer, output and destination. So all processes with this graph and this partition number them
/// alike.
///
/// ```
/// use tonic_rdma_graph::partition::at_cuts;
/// use tonic_rdma_graph::placement::analyse;
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
/// let placements = analyse(&graph, &at_cuts(&graph, &["relu"])?)?;
/// let crossing = &placements.crossings()[0];
/// assert_eq!(crossing.name, "relu to part 1");
/// assert!(!crossing.placement.is_static());
/// # Ok::<(), tonic_rdma_graph::GraphError>(())
/// ```
///
/// # Errors
/// The partition is that of another graph.
pub fn analyse(graph: &Topology, partition: &Partition) -> Result<Placements, GraphError> {
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
    Ok(Placements { partition, crossings, nodes })
}

impl Placements {
    /// Returns which node belongs to which part.
    pub fn partition(&self) -> &Partition {
        &self.partition
    }

    /// Returns all crossing tensors. Their numbers are their places in this list.
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

    /// Returns the nodes of a part, in topological order: the nodes that the partition puts there, and the constants that these
    /// nodes use.
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
