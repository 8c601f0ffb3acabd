//! Partitions that the user describes.

use crate::dataflow::{NodeId, Role, Topology};
use crate::error::GraphError;
use crate::placement::{Part, Partition};

/// Makes a partition into one part more than there are cuts. Part 0 is the first cut's node and all that it needs. Each further part is the
/// node of its cut and what it needs, without the earlier parts. The last part is the rest. Tensors go from lower to higher parts only.
///
/// ```
/// use tonic_rdma_graph::partition::at_cuts;
///
/// # use tonic_rdma_graph::dataflow::{Fact, Node, NodeId, Outlet, Role, Topology};
/// # use tonic_rdma_graph::placement::Part;
/// # use tonic_rdma_tensor::Dtype;
/// # let mut graph = Topology::new();
/// # for name in ["input", "conv", "relu", "head"] {
/// #     let inputs = graph.len().checked_sub(1).map(|node| Outlet { node: NodeId(node), output: 0 });
/// #     graph.add(Node {
/// #         name: name.to_owned(),
/// #         kind: "Example".to_owned(),
/// #         role: if inputs.is_none() { Role::Input } else { Role::Compute },
/// #         inputs: inputs.into_iter().collect(),
/// #         outputs: vec![Fact::known(Dtype::F32, &[8])],
/// #         work: 100,
/// #         stays: false,
/// #     })?;
/// # }
/// // input ─▶ conv ─▶ relu ─▶ head
/// let partition = at_cuts(&graph, &["relu"])?;
/// assert_eq!(partition.parts(), [0, 0, 0, 1].map(Part));
/// # Ok::<(), tonic_rdma_graph::GraphError>(())
/// ```
///
/// # Errors
/// The graph has no such node, a cut adds no node to the earlier ones, nothing is left for the last part, or a cut separates a node from
/// its consumer although the output can't cross.
pub fn at_cuts(graph: &Topology, cuts: &[&str]) -> Result<Partition, GraphError> {
    let mut parts: Vec<Option<Part>> = vec![None; graph.len()];
    for (index, name) in cuts.iter().enumerate() {
        let mut open = vec![node_called(graph, name)?];
        let mut computes = false;
        while let Some(id) = open.pop() {
            if parts[id.0].is_some() {
                continue;
            }
            parts[id.0] = Some(Part(index));
            let Some(node) = graph.node(id) else { continue };
            computes |= node.role == Role::Compute;
            open.extend(node.inputs.iter().map(|input| input.node));
        }
        if !computes {
            let reason = format!("the cut after node {name} adds nothing to the parts of the earlier cuts");
            return Err(GraphError::Partition(reason));
        }
    }
    let last = Part(cuts.len());
    let rest = graph.nodes().any(|(id, node)| node.role == Role::Compute && parts[id.0].is_none());
    if !rest && !cuts.is_empty() {
        let reason = format!("nothing is left after the cut at node {}", cuts[cuts.len() - 1]);
        return Err(GraphError::Partition(reason));
    }
    // An input or a constant that only later parts use belongs to the first of them.
    for (id, node) in graph.nodes().rev() {
        if node.role != Role::Compute && parts[id.0].is_none() {
            parts[id.0] = first_use(graph, &parts, id, last);
        }
    }
    Partition::new(graph, cuts.len() + 1, parts.into_iter().map(|part| part.unwrap_or(last)).collect())
}

/// Makes a partition into `count` parts from a list of `node=part`, separated by commas or lines. A node that the list does not name
/// belongs to the highest part of its producers. An input or a constant belongs to the lowest part of its consumers. So a list of the first
/// nodes of each part is enough for most models. Lines that begin with `#` are comments. Edges may have any direction.
///
/// ```
/// use tonic_rdma_graph::partition::named;
///
/// # use tonic_rdma_graph::dataflow::{Fact, Node, NodeId, Outlet, Role, Topology};
/// # use tonic_rdma_graph::placement::Part;
/// # use tonic_rdma_tensor::Dtype;
/// # let mut graph = Topology::new();
/// # for name in ["input", "conv", "relu", "head"] {
/// #     let inputs = graph.len().checked_sub(1).map(|node| Outlet { node: NodeId(node), output: 0 });
/// #     graph.add(Node {
/// #         name: name.to_owned(),
/// #         kind: "Example".to_owned(),
/// #         role: if inputs.is_none() { Role::Input } else { Role::Compute },
/// #         inputs: inputs.into_iter().collect(),
/// #         outputs: vec![Fact::known(Dtype::F32, &[8])],
/// #         work: 100,
/// #         stays: false,
/// #     })?;
/// # }
/// // input ─▶ conv ─▶ relu ─▶ head
/// let partition = named(&graph, 3, "relu=1, head=2")?;
/// assert_eq!(partition.parts(), [0, 0, 1, 2].map(Part));
/// # Ok::<(), tonic_rdma_graph::GraphError>(())
/// ```
///
/// # Errors
/// The list is written wrongly, names a node twice or a node that the graph does not have, names a part of `count` or above, or separates
/// a node from its consumer although the output can't cross.
pub fn named(graph: &Topology, count: usize, list: &str) -> Result<Partition, GraphError> {
    let mut parts: Vec<Option<Part>> = vec![None; graph.len()];
    let lines = list.lines().filter(|line| !line.trim_start().starts_with('#'));
    let entries = lines.flat_map(|line| line.split(',')).map(str::trim).filter(|entry| !entry.is_empty());
    for entry in entries {
        let wrong = |reason: &str| GraphError::Partition(format!("{entry:?}: {reason}"));
        let (name, part) = entry.rsplit_once('=').ok_or_else(|| wrong("write node=part"))?;
        let part: usize = part.trim().parse().map_err(|_| wrong("the part is no number"))?;
        if part >= count {
            return Err(wrong(&format!("the parts are 0 to {}", count.saturating_sub(1))));
        }
        let id = node_called(graph, name.trim())?;
        if parts[id.0].replace(Part(part)).is_some() {
            return Err(wrong("an earlier entry names this node"));
        }
    }
    let last = Part(count.saturating_sub(1));
    for (id, node) in graph.nodes() {
        if node.role == Role::Compute && parts[id.0].is_none() {
            let constant = |id: NodeId| graph.node(id).is_none_or(|node| node.role == Role::Constant);
            let producers = node.inputs.iter().map(|input| input.node).filter(|input| !constant(*input));
            parts[id.0] = Some(producers.filter_map(|input| parts[input.0]).max().unwrap_or(Part(0)));
        }
    }
    for (id, _) in graph.nodes() {
        if parts[id.0].is_none() {
            parts[id.0] = first_use(graph, &parts, id, last);
        }
    }
    Partition::new(graph, count, parts.into_iter().map(|part| part.unwrap_or(last)).collect())
}

/// Returns the lowest part of the consumers of a node. Consumers without a part count as consumers in `rest`.
fn first_use(graph: &Topology, parts: &[Option<Part>], id: NodeId, rest: Part) -> Option<Part> {
    let consumers = graph.nodes().filter(|(_, node)| node.inputs.iter().any(|input| input.node == id));
    consumers.map(|(consumer, _)| parts[consumer.0].unwrap_or(rest)).min()
}

fn node_called(graph: &Topology, name: &str) -> Result<NodeId, GraphError> {
    graph
        .node_called(name)
        .ok_or_else(|| GraphError::UnknownNode { node: name.to_owned(), near: near(graph, name) })
}

/// Returns the name that looks most like `name`, if one has it as a part or begins alike.
fn near(graph: &Topology, name: &str) -> Option<String> {
    let wanted = name.to_lowercase();
    let same_letters =
        |other: &str| other.to_lowercase().chars().zip(wanted.chars()).take_while(|(a, b)| a == b).count();
    let contains = |other: &str| !wanted.is_empty() && other.to_lowercase().contains(&wanted);
    let best = graph
        .nodes()
        .filter(|(_, node)| node.role != Role::Constant)
        .max_by_key(|(id, node)| (contains(&node.name), same_letters(&node.name), std::cmp::Reverse(id.0)))?;
    let name = &best.1.name;
    (contains(name) || same_letters(name) >= 2).then(|| name.clone())
}
