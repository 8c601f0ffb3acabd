//! Which node belongs to which part: balanced by bytes and work, or as the user says.
//!
//! ```text
//!  balanced    parts of similar work, and as few bytes between them as possible
//!  at_cuts     each part ends with nodes that the user names
//!  named       a list of `node=part`
//! ```
//!
//! A [`Partition`] may also be made from a list of parts, for graphs whose tensors go in any direction.
//!
//! This module never runs a node, and has no randomness: all processes get the same partition from the same
//! graph.

#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashSet};

use crate::dataflow::{NodeId, Outlet, Role, Topology};
use crate::error::{GraphError, Problem};
use crate::placement::{Part, Partition};

impl Partition {
    /// Makes a partition into one part more than there are cuts. Part 0 is the first cut's node and all that
    /// it needs. Each further part is the node of its cut and what it needs, without the earlier parts. The
    /// last part is the rest. Tensors go from lower to higher parts only.
    ///
    /// ```
    /// use tonic_rdma_graph::placement::Partition;
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
    /// let partition = Partition::at_cuts(&graph, &["relu"])?;
    /// assert_eq!(partition.parts(), [0, 0, 0, 1].map(Part));
    /// # Ok::<(), tonic_rdma_graph::GraphError>(())
    /// ```
    ///
    /// # Errors
    /// The graph has no such node, a cut adds no node to the earlier ones, nothing is left for the last part,
    /// or a cut separates a node from its consumer although the output can't cross.
    pub fn at_cuts(graph: &Topology, cuts: &[&str]) -> Result<Self, GraphError> {
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
                let reason =
                    format!("the cut after node {name} adds nothing to the parts of the earlier cuts");
                return Err(Problem::Partition(reason).into());
            }
        }
        let last = Part(cuts.len());
        let rest = graph.nodes().any(|(id, node)| node.role == Role::Compute && parts[id.0].is_none());
        if !rest && !cuts.is_empty() {
            let reason = format!("nothing is left after the cut at node {}", cuts[cuts.len() - 1]);
            return Err(Problem::Partition(reason).into());
        }
        // An input or a constant that only later parts use belongs to the first of them.
        for (id, node) in graph.nodes().rev() {
            if node.role != Role::Compute && parts[id.0].is_none() {
                parts[id.0] = first_use(graph, &parts, id, last);
            }
        }
        Self::new(graph, cuts.len() + 1, parts.into_iter().map(|part| part.unwrap_or(last)).collect())
    }

    /// Makes a partition into `count` parts from a list of `node=part`, separated by commas or lines. A node
    /// that the list does not name belongs to the highest part of its producers. An input or a constant
    /// belongs to the lowest part of its consumers. So a list of the first nodes of each part is enough for
    /// most models. Lines that begin with `#` are comments. Edges may have any direction.
    ///
    /// ```
    /// use tonic_rdma_graph::placement::Partition;
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
    /// let partition = Partition::named(&graph, 3, "relu=1, head=2")?;
    /// assert_eq!(partition.parts(), [0, 0, 1, 2].map(Part));
    /// # Ok::<(), tonic_rdma_graph::GraphError>(())
    /// ```
    ///
    /// # Errors
    /// The list is written wrongly, names a node twice or a node that the graph does not have, names a part
    /// of `count` or above, or separates a node from its consumer although the output can't cross.
    pub fn named(graph: &Topology, count: usize, list: &str) -> Result<Self, GraphError> {
        let mut parts: Vec<Option<Part>> = vec![None; graph.len()];
        let lines = list.lines().filter(|line| !line.trim_start().starts_with('#'));
        let entries = lines.flat_map(|line| line.split(',')).map(str::trim).filter(|entry| !entry.is_empty());
        for entry in entries {
            let wrong = |reason: &str| GraphError::from(Problem::Partition(format!("{entry:?}: {reason}")));
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
        Self::new(graph, count, parts.into_iter().map(|part| part.unwrap_or(last)).collect())
    }

    /// Makes a partition for a pipeline: tensors go from lower to higher parts only, and each part computes
    /// something. The part with the most work has as little work as possible, and at most 10 % more, if fewer
    /// bytes cross by that. A dimension whose length is not known counts as 1.
    ///
    /// ```
    /// use tonic_rdma_graph::dataflow::{Fact, Node, NodeId, Outlet, Role, Topology};
    /// use tonic_rdma_graph::placement::{Part, Partition};
    /// use tonic_rdma_tensor::Dtype;
    ///
    /// let mut graph = Topology::new();
    /// for (name, length) in [("input", 100), ("wide", 1000), ("narrow", 10), ("wide again", 1000)] {
    ///     let inputs = graph.len().checked_sub(1).map(|node| Outlet { node: NodeId(node), output: 0 });
    ///     graph.add(Node {
    ///         name: name.to_owned(),
    ///         kind: "Example".to_owned(),
    ///         role: if inputs.is_none() { Role::Input } else { Role::Compute },
    ///         inputs: inputs.into_iter().collect(),
    ///         outputs: vec![Fact::known(Dtype::F32, &[length])],
    ///         work: 100,
    ///         stays: false,
    ///     })?;
    /// }
    /// let partition = Partition::balanced(&graph, 2)?;
    /// assert_eq!(partition.parts(), [Part(0), Part(0), Part(0), Part(1)]);
    /// # Ok::<(), tonic_rdma_graph::GraphError>(())
    /// ```
    ///
    /// # Errors
    /// The graph can't be split into as many parts.
    pub fn balanced(graph: &Topology, parts: usize) -> Result<Self, GraphError> {
        Self::balanced_within(graph, parts, SLACK_PERCENT)
    }

    /// Makes a partition as [`balanced`](Self::balanced) does, with a slack of `percent`.
    ///
    /// ```
    /// use tonic_rdma_graph::placement::Partition;
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
    /// // input ─▶ conv ─▶ relu ─▶ head, with the same work in all nodes
    /// let partition = Partition::balanced_within(&graph, 3, 0)?;
    /// assert_eq!(partition.parts(), [0, 0, 1, 2].map(Part));
    /// # Ok::<(), tonic_rdma_graph::GraphError>(())
    /// ```
    ///
    /// # Errors
    /// The graph can't be split into as many parts.
    pub fn balanced_within(graph: &Topology, parts: usize, percent: u32) -> Result<Self, GraphError> {
        search(graph, parts, percent, BEGINNINGS)
    }
}

/// Returns the lowest part of the consumers of a node. Consumers without a part count as consumers in `rest`.
fn first_use(graph: &Topology, parts: &[Option<Part>], id: NodeId, rest: Part) -> Option<Part> {
    let consumers = graph.nodes().filter(|(_, node)| node.inputs.iter().any(|input| input.node == id));
    consumers.map(|(consumer, _)| parts[consumer.0].unwrap_or(rest)).min()
}

fn node_called(graph: &Topology, name: &str) -> Result<NodeId, GraphError> {
    graph.node_called(name).ok_or_else(|| {
        GraphError::from(Problem::UnknownNode { node: name.to_owned(), near: near(graph, name) })
    })
}

/// Returns the name that is most like `name`, if one has it as a part or begins alike.
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

/// How much more work than necessary the part with the most work may have, in percent, so that fewer bytes
/// cross.
const SLACK_PERCENT: u32 = 10;

/// The most beginnings that are searched completely.
const BEGINNINGS: usize = 1000;

/// The most beginnings of an order.
const OF_AN_ORDER: usize = 250;

/// Searches for a partition with similar work in all parts, and few bytes between them.
///
/// A part of a pipeline is the difference of two *beginnings*: sets of nodes that contain with each node all
/// that it needs (order ideals). The search covers all beginnings if they are at most `all`. Otherwise it
/// covers those that begin one of four topological orders. Among the covered beginnings, dynamic programming
/// finds the best chain, so the result is exact for small graphs, and for models that are nearly chains.
fn search(graph: &Topology, parts: usize, percent: u32, all: usize) -> Result<Partition, GraphError> {
    let groups = Groups::of(graph);
    let most = groups.len().max(1);
    if parts == 0 || parts > most {
        return Err(Problem::Parts { parts, most }.into());
    }
    if parts == 1 {
        return Partition::new(graph, 1, vec![Part(0); graph.len()]);
    }
    let beginnings =
        all_beginnings(&groups, all).unwrap_or_else(|| of_orders(&groups, OF_AN_ORDER.max(2 * parts)));
    let chain = best_chain(&groups, &beginnings, parts, percent)
        .ok_or_else(|| GraphError::from(Problem::Parts { parts, most }))?;

    let mut part_of: Vec<Option<Part>> = vec![None; graph.len()];
    for (group, nodes) in groups.members.iter().enumerate() {
        let part = chain.iter().position(|beginning| beginnings[*beginning].has(group));
        for node in nodes {
            part_of[node.0] = part.map(Part);
        }
    }
    // Inputs and constants belong to the first part that uses them.
    for (id, node) in graph.nodes() {
        let Some(part) = part_of[id.0].filter(|_| node.role == Role::Compute) else { continue };
        for input in &node.inputs {
            if graph.node(input.node).is_some_and(|node| node.role != Role::Compute) {
                let first = part_of[input.node.0].map_or(part, |other| other.min(part));
                part_of[input.node.0] = Some(first);
            }
        }
    }
    Partition::new(graph, parts, part_of.into_iter().map(|part| part.unwrap_or(Part(0))).collect())
}

/// A set of groups that contains with each group all that it needs.
#[derive(Clone, Debug)]
struct Beginning {
    groups: Vec<u64>,
    len: usize,
    work: u64,
    /// The tensors that are there, and that groups outside of the set need.
    live: Vec<usize>,
}

impl Beginning {
    fn new(groups: &Groups, set: Vec<u64>) -> Self {
        let mut beginning = Self { groups: set, len: 0, work: 0, live: Vec::new() };
        for group in 0..groups.len() {
            if beginning.has(group) {
                debug_assert!(groups.before[group].iter().all(|before| beginning.has(*before)));
                beginning.len += 1;
                beginning.work = beginning.work.saturating_add(groups.work[group]);
            }
        }
        let live = |tensor: &usize| {
            let tensor = &groups.tensors[*tensor];
            tensor.sources.iter().any(|group| beginning.has(*group))
                && !tensor.consumers.iter().all(|group| beginning.has(*group))
        };
        beginning.live = (0..groups.tensors.len()).filter(live).collect();
        beginning
    }

    fn has(&self, group: usize) -> bool {
        self.groups[group / 64] & (1 << (group % 64)) != 0
    }

    fn is_in(&self, other: &Self) -> bool {
        self.len < other.len && self.groups.iter().zip(&other.groups).all(|(own, other)| own & !other == 0)
    }

    fn live_bytes(&self, groups: &Groups) -> u64 {
        self.live.iter().map(|tensor| groups.tensors[*tensor].bytes).fold(0, u64::saturating_add)
    }

    /// Returns the bytes that arrive at the part from this beginning to `end`.
    fn bytes_to(&self, end: &Self, groups: &Groups) -> u64 {
        let arrives = |tensor: &&usize| {
            groups.tensors[**tensor].consumers.iter().any(|group| end.has(*group) && !self.has(*group))
        };
        let arriving = self.live.iter().filter(arrives);
        arriving.map(|tensor| groups.tensors[*tensor].bytes).fold(0, u64::saturating_add)
    }
}

fn words(groups: &Groups) -> usize {
    groups.len().div_ceil(64)
}

fn with(set: &[u64], group: usize) -> Vec<u64> {
    let mut set = set.to_vec();
    set[group / 64] |= 1 << (group % 64);
    set
}

/// Returns all beginnings, the smaller first, or `None` if there are more than `most`.
fn all_beginnings(groups: &Groups, most: usize) -> Option<Vec<Beginning>> {
    let mut found = vec![vec![0; words(groups)]];
    let mut seen: HashSet<Vec<u64>> = found.iter().cloned().collect();
    let mut next = 0;
    while next < found.len() {
        let has = |group: usize| found[next][group / 64] & (1 << (group % 64)) != 0;
        let ready = |group: &usize| !has(*group) && groups.before[*group].iter().all(|before| has(*before));
        let larger: Vec<Vec<u64>> =
            (0..groups.len()).filter(ready).map(|group| with(&found[next], group)).collect();
        for set in larger {
            if seen.insert(set.clone()) {
                found.push(set);
            }
        }
        if found.len() > most {
            return None;
        }
        next += 1;
    }
    Some(found.into_iter().map(|set| Beginning::new(groups, set)).collect())
}

/// Returns the beginnings of four topological orders, the smaller first. If an order has more than `most`,
/// some are left out: those with the fewest bytes across remain.
fn of_orders(groups: &Groups, most: usize) -> Vec<Beginning> {
    let live_after = |group: usize, before: &[usize]| {
        let mut set = vec![0; words(groups)];
        for group in before.iter().chain([&group]) {
            set = with(&set, *group);
        }
        Beginning::new(groups, set).live_bytes(groups)
    };
    let mut orders = vec![
        // The order of the graph; then always the group that became ready last, which follows a branch to its
        // end; then its mirror image.
        (0..groups.len()).collect(),
        groups.order(|_, _| 0),
        groups.order(|group, _| std::cmp::Reverse(group)),
    ];
    // This order takes long to find.
    if groups.len() <= BEGINNINGS {
        orders.push(groups.order(live_after));
    }
    let mut sets: HashSet<Vec<u64>> = HashSet::new();
    let mut beginnings = Vec::new();
    for order in orders {
        let mut set = vec![0; words(groups)];
        let mut of_order = vec![Beginning::new(groups, set.clone())];
        for group in order {
            set = with(&set, group);
            of_order.push(Beginning::new(groups, set.clone()));
        }
        let last = of_order.len() - 1;
        let chunk = (of_order.len() - 2).div_ceil(most).max(1);
        let inner = of_order[1..last].chunks(chunk);
        let chosen = inner.filter_map(|chunk| chunk.iter().min_by_key(|one| one.live_bytes(groups)));
        for beginning in [&of_order[0]].into_iter().chain(chosen).chain([&of_order[last]]) {
            if sets.insert(beginning.groups.clone()) {
                beginnings.push(beginning.clone());
            }
        }
    }
    beginnings.sort_by_key(|beginning| beginning.len);
    beginnings
}

/// Returns the ends of the parts of the best partition into `parts`: indices in `beginnings`.
fn best_chain(groups: &Groups, beginnings: &[Beginning], parts: usize, percent: u32) -> Option<Vec<usize>> {
    let work = |from: usize, to: usize| beginnings[to].work - beginnings[from].work;
    // For each beginning, those that are contained in it.
    let contained: Vec<Vec<usize>> = beginnings
        .iter()
        .enumerate()
        .map(|(to, end)| (0..to).filter(|from| beginnings[*from].is_in(end)).collect())
        .collect();
    let (_, least) = cheapest(&contained, parts, u64::MAX, &work, &|_, _| 0)?;
    let slack = u128::from(least) * u128::from(percent) / 100;
    let limit = least.saturating_add(slack.try_into().unwrap_or(u64::MAX));
    let bytes = |from: usize, to: usize| beginnings[from].bytes_to(&beginnings[to], groups);
    cheapest(&contained, parts, limit, &work, &bytes).map(|(ends, _)| ends)
}

/// Returns the chain of beginnings, from the empty one to the whole graph, of `parts` parts with at most `limit`
/// work in each that has the lowest sum of costs, and among those the one whose largest part has the least work:
/// the ends of the parts, and the work of the largest one.
fn cheapest(
    contained: &[Vec<usize>],
    parts: usize,
    limit: u64,
    work: &dyn Fn(usize, usize) -> u64,
    cost: &dyn Fn(usize, usize) -> u64,
) -> Option<(Vec<usize>, u64)> {
    // For each beginning as the end of the parts so far: their cost, their largest work, and the beginning of
    // the last one.
    let mut best: Vec<Option<(u64, u64, usize)>> = vec![None; contained.len()];
    best[0] = Some((0, 0, 0));
    let mut history = Vec::with_capacity(parts);
    for _ in 0..parts {
        let next: Vec<Option<(u64, u64, usize)>> = contained
            .iter()
            .enumerate()
            .map(|(to, contained)| {
                let reached = contained.iter().filter_map(|from| {
                    let (sum, most, _) = best[*from]?;
                    let work = work(*from, to);
                    (work <= limit).then(|| (sum.saturating_add(cost(*from, to)), most.max(work), *from))
                });
                reached.min()
            })
            .collect();
        best = next;
        history.push(best.clone());
    }
    let mut end = contained.len() - 1;
    let most_work = best[end]?.1;
    let mut ends = Vec::with_capacity(parts);
    for step in history.iter().rev() {
        ends.push(end);
        end = step[end]?.2;
    }
    ends.reverse();
    Some((ends, most_work))
}

/// A graph of groups. Each group is a node, or several nodes that must be in one part because the output of a
/// node can't cross.
#[derive(Debug)]
struct Groups {
    /// The nodes of each group. Groups are in a topological order.
    members: Vec<Vec<NodeId>>,
    /// The work of each group, at least 1 for each of its nodes that computes. Inputs of the graph are fed,
    /// and have no work.
    work: Vec<u64>,
    /// The groups that must come before each group.
    before: Vec<Vec<usize>>,
    /// The groups that must come after each group.
    after: Vec<Vec<usize>>,
    /// The tensors that may cross.
    tensors: Vec<GroupTensor>,
}

/// A tensor that consumers of several groups need, or of another group than that of its producer.
#[derive(Debug)]
struct GroupTensor {
    bytes: u64,
    /// The groups that have the tensor without a transfer: that of the producer. For an input of the graph
    /// these are the consumers, because an input is fed to the first part that needs it.
    sources: Vec<usize>,
    consumers: Vec<usize>,
}

impl Groups {
    fn of(graph: &Topology) -> Self {
        let edges = Edges::of(graph);
        let members = edges.components();
        let mut group_of = vec![None; graph.len()];
        for (group, nodes) in members.iter().enumerate() {
            for node in nodes {
                group_of[node.0] = Some(group);
            }
        }
        let work = |id: &NodeId| {
            let computes = graph.node(*id).filter(|node| node.role == Role::Compute);
            computes.map(|node| node.work.max(1))
        };
        let work =
            members.iter().map(|nodes| nodes.iter().filter_map(work).fold(0, u64::saturating_add)).collect();

        let mut consumers: BTreeMap<Outlet, Vec<usize>> = BTreeMap::new();
        for (id, node) in graph.nodes() {
            let Some(group) = group_of[id.0] else { continue };
            for input in &node.inputs {
                consumers.entry(*input).or_default().push(group);
            }
        }
        let (mut before, mut after) = (vec![Vec::new(); members.len()], vec![Vec::new(); members.len()]);
        let mut tensors = Vec::new();
        for (outlet, mut consumers) in consumers {
            consumers.sort_unstable();
            consumers.dedup();
            let Some(node) = graph.node(outlet.node).filter(|node| node.role != Role::Constant) else {
                continue;
            };
            let sources = match group_of[outlet.node.0] {
                Some(producer) => {
                    consumers.retain(|consumer| *consumer != producer);
                    for consumer in &consumers {
                        after[producer].push(*consumer);
                        before[*consumer].push(producer);
                    }
                    vec![producer]
                }
                None => consumers.clone(),
            };
            // A dimension that is not known counts as 1.
            let bytes = node.outputs.get(outlet.output).map_or(0, |fact| fact.bytes(1));
            if !consumers.is_empty() && sources != consumers || consumers.len() > 1 {
                tensors.push(GroupTensor { bytes, sources, consumers });
            }
        }
        for groups in before.iter_mut().chain(&mut after) {
            groups.sort_unstable();
            groups.dedup();
        }
        Self { members, work, before, after, tensors }
    }

    fn len(&self) -> usize {
        self.members.len()
    }

    /// Returns the groups in a topological order. Among the groups that may come next, the one with the
    /// lowest `rank` does. `rank` gets the group, the number of groups so far, and for how many groups the
    /// group could have come already.
    fn order<K: Ord>(&self, mut rank: impl FnMut(usize, &[usize]) -> K) -> Vec<usize> {
        let mut waiting: Vec<usize> = self.before.iter().map(Vec::len).collect();
        let mut ready: Vec<usize> = (0..self.len()).filter(|group| waiting[*group] == 0).collect();
        let mut order = Vec::with_capacity(self.len());
        while let Some(index) =
            (0..ready.len()).min_by_key(|index| (rank(ready[*index], &order), Reverse(*index)))
        {
            let group = ready.remove(index);
            order.push(group);
            for next in &self.after[group] {
                waiting[*next] -= 1;
                if waiting[*next] == 0 {
                    ready.push(*next);
                }
            }
        }
        order
    }
}

/// The edges between nodes. An edge whose tensor can't cross leads in both directions, so its nodes are
/// strongly connected.
struct Edges {
    forward: Vec<Vec<usize>>,
    backward: Vec<Vec<usize>>,
    /// Whether a node takes part. Constants are in each part that needs them, and inputs are fed to the first
    /// part that needs them.
    taking_part: Vec<bool>,
}

impl Edges {
    fn of(graph: &Topology) -> Self {
        let mut taking_part: Vec<bool> = graph.nodes().map(|(_, node)| node.role == Role::Compute).collect();
        let mut forward = vec![Vec::new(); graph.len()];
        for (id, node) in graph.nodes() {
            for input in &node.inputs {
                let Some(producer) = graph.node(input.node).filter(|node| node.role != Role::Constant) else {
                    continue;
                };
                if producer.stays {
                    taking_part[input.node.0] = true;
                    forward[id.0].push(input.node.0);
                }
                if taking_part[input.node.0] {
                    forward[input.node.0].push(id.0);
                }
            }
        }
        let mut backward = vec![Vec::new(); graph.len()];
        for (from, targets) in forward.iter().enumerate() {
            for to in targets {
                backward[*to].push(from);
            }
        }
        Self { forward, backward, taking_part }
    }

    /// Returns the strongly connected components, in a topological order (Kosaraju's algorithm).
    fn components(&self) -> Vec<Vec<NodeId>> {
        let mut finished = Vec::new();
        let mut seen: Vec<bool> = self.taking_part.iter().map(|takes_part| !takes_part).collect();
        // From the last node to the first, so that the first nodes finish last, and come first below.
        for start in (0..seen.len()).rev() {
            visit(&self.forward, start, &mut seen, &mut finished);
        }
        let mut seen: Vec<bool> = self.taking_part.iter().map(|takes_part| !takes_part).collect();
        let mut components = Vec::new();
        for start in finished.into_iter().rev() {
            let mut component = Vec::new();
            visit(&self.backward, start, &mut seen, &mut component);
            component.sort_unstable();
            if !component.is_empty() {
                components.push(component.into_iter().map(NodeId).collect());
            }
        }
        components
    }
}

/// Visits all that can be reached from `start` and was not seen, without recursion, and adds each node when
/// all after it are done.
fn visit(edges: &[Vec<usize>], start: usize, seen: &mut [bool], finished: &mut Vec<usize>) {
    if std::mem::replace(&mut seen[start], true) {
        return;
    }
    let mut open = vec![(start, 0)];
    while let Some((node, next)) = open.last_mut() {
        match edges[*node].get(*next) {
            Some(target) => {
                *next += 1;
                if !std::mem::replace(&mut seen[*target], true) {
                    open.push((*target, 0));
                }
            }
            None => {
                finished.push(*node);
                open.pop();
            }
        }
    }
}
