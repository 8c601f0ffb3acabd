//! A partition with similar work in all parts, and few bytes between them.
//!
//! A part of a pipeline is the difference of two *beginnings*: sets of nodes that contain with each node all that it needs. The search
//! looks at all beginnings if they are few. Otherwise it looks at those that begin one of four topological orders. Among the looked-at
//! beginnings, dynamic programming finds the best chain, so the result is exact for small graphs, and for models that are nearly chains.

use std::collections::HashSet;

use super::groups::Groups;
use crate::dataflow::{Role, Topology};
use crate::error::GraphError;
use crate::placement::{Part, Partition};

/// How much more work than necessary the part with the most work may have, in percent, so that fewer bytes cross.
pub const SLACK_PERCENT: u32 = 10;

/// The most beginnings that are looked at as a whole.
const BEGINNINGS: usize = 1000;

/// The most beginnings of an order.
const OF_AN_ORDER: usize = 250;

/// Makes a partition for a pipeline: tensors go from lower to higher parts only, and each part computes something. The part with the
/// most work has as little work as possible, and at most [`SLACK_PERCENT`] more, if fewer bytes cross by that. A dimension whose length
/// is not known counts as 1.
///
/// ```
/// use tonic_rdma_graph::dataflow::{Fact, Node, NodeId, Outlet, Role, Topology};
/// use tonic_rdma_graph::partition::balanced;
/// use tonic_rdma_graph::placement::Part;
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
/// let partition = balanced(&graph, 2)?;
/// assert_eq!(partition.parts(), [Part(0), Part(0), Part(0), Part(1)]);
/// # Ok::<(), tonic_rdma_graph::GraphError>(())
/// ```
///
/// # Errors
/// The graph can't be split into as many parts.
pub fn balanced(graph: &Topology, parts: usize) -> Result<Partition, GraphError> {
    balanced_within(graph, parts, SLACK_PERCENT)
}

/// Makes a partition as [`balanced`] does, with a slack of `percent`.
///
/// ```
/// use tonic_rdma_graph::partition::balanced_within;
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
/// let partition = balanced_within(&graph, 3, 0)?;
/// assert_eq!(partition.parts(), [0, 0, 1, 2].map(Part));
/// # Ok::<(), tonic_rdma_graph::GraphError>(())
/// ```
///
/// # Errors
/// The graph can't be split into as many parts.
pub fn balanced_within(graph: &Topology, parts: usize, percent: u32) -> Result<Partition, GraphError> {
    search(graph, parts, percent, BEGINNINGS)
}

/// Searches among all beginnings if they are at most `all`.
pub(super) fn search(
    graph: &Topology,
    parts: usize,
    percent: u32,
    all: usize,
) -> Result<Partition, GraphError> {
    let groups = Groups::of(graph);
    let most = groups.len().max(1);
    if parts == 0 || parts > most {
        return Err(GraphError::Parts { parts, most });
    }
    if parts == 1 {
        return Partition::new(graph, 1, vec![Part(0); graph.len()]);
    }
    let beginnings =
        all_beginnings(&groups, all).unwrap_or_else(|| of_orders(&groups, OF_AN_ORDER.max(2 * parts)));
    let chain = best_chain(&groups, &beginnings, parts, percent).ok_or(GraphError::Parts { parts, most })?;

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

/// Returns the beginnings of four topological orders, the smaller first. If an order has more than `most`, some are left out: those with
/// the fewest bytes across remain.
fn of_orders(groups: &Groups, most: usize) -> Vec<Beginning> {
    let live_after = |group: usize, before: &[usize]| {
        let mut set = vec![0; words(groups)];
        for group in before.iter().chain([&group]) {
            set = with(&set, *group);
        }
        Beginning::new(groups, set).live_bytes(groups)
    };
    let mut orders = vec![
        // That of the graph; then the latest group that became ready, which follows a branch to its end; then its mirror image.
        (0..groups.len()).collect(),
        groups.order(|_, _| 0),
        groups.order(|group, _| std::cmp::Reverse(group)),
    ];
    // This order is dear to find.
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
        let window = (of_order.len() - 2).div_ceil(most).max(1);
        let inner = of_order[1..last].chunks(window);
        let chosen = inner.filter_map(|window| window.iter().min_by_key(|one| one.live_bytes(groups)));
        for beginning in [&of_order[0]].into_iter().chain(chosen).chain([&of_order[last]]) {
            if sets.insert(beginning.groups.clone()) {
                beginnings.push(beginning.clone());
            }
        }
    }
    beginnings.sort_by_key(|beginning| beginning.len);
    beginnings
}

/// Returns the ends of the parts of the best partition into `parts`: places in `beginnings`.
fn best_chain(groups: &Groups, beginnings: &[Beginning], parts: usize, percent: u32) -> Option<Vec<usize>> {
    let work = |from: usize, to: usize| beginnings[to].work - beginnings[from].work;
    // For each beginning, those that are contained in it.
    let contained: Vec<Vec<usize>> = beginnings
        .iter()
        .enumerate()
        .map(|(to, end)| (0..to).filter(|from| beginnings[*from].is_in(end)).collect())
        .collect();
    let least = cheapest(&contained, parts, u64::MAX, &work, &|_, _| 0)?;
    let slack = u128::from(least.most_work) * u128::from(percent) / 100;
    let limit = least.most_work.saturating_add(slack.try_into().unwrap_or(u64::MAX));
    let bytes = |from: usize, to: usize| beginnings[from].bytes_to(&beginnings[to], groups);
    cheapest(&contained, parts, limit, &work, &bytes).map(|chain| chain.ends)
}

/// A chain of beginnings from the empty one to the whole graph.
struct Chain {
    ends: Vec<usize>,
    most_work: u64,
}

/// Returns the chain of `parts` parts with at most `limit` work in each that has the lowest sum of costs, and among those the one
/// whose largest part has the least work.
fn cheapest(
    contained: &[Vec<usize>],
    parts: usize,
    limit: u64,
    work: &dyn Fn(usize, usize) -> u64,
    cost: &dyn Fn(usize, usize) -> u64,
) -> Option<Chain> {
    // For each beginning as the end of the parts so far: their cost, their largest work, and the beginning of the last one.
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
    Some(Chain { ends, most_work })
}
