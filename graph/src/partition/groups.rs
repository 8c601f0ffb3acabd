//! Nodes that must be in one part, as groups, and the tensors between groups.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use crate::dataflow::{NodeId, Outlet, Role, Topology};

/// A graph of groups. Each group is a node, or several nodes that must be in one part because the output of a node can't cross.
#[derive(Debug)]
pub(super) struct Groups {
    /// The nodes of each group. Groups are in a topological order.
    pub(super) members: Vec<Vec<NodeId>>,
    /// The work of each group, at least 1 for each of its nodes that computes. Inputs of the graph are fed, and have no work.
    pub(super) work: Vec<u64>,
    /// The groups that must come before each group.
    pub(super) before: Vec<Vec<usize>>,
    /// The groups that must come after each group.
    pub(super) after: Vec<Vec<usize>>,
    /// The tensors that may cross.
    pub(super) tensors: Vec<Tensor>,
}

/// A tensor that consumers of several groups need, or of another group than that of its producer.
#[derive(Debug)]
pub(super) struct Tensor {
    pub(super) bytes: u64,
    /// The groups that have the tensor without a transfer: that of the producer. For an input of the graph these are the consumers,
    /// because an input is fed to the first part that needs it.
    pub(super) sources: Vec<usize>,
    pub(super) consumers: Vec<usize>,
}

impl Groups {
    pub(super) fn of(graph: &Topology) -> Self {
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
                tensors.push(Tensor { bytes, sources, consumers });
            }
        }
        for groups in before.iter_mut().chain(&mut after) {
            groups.sort_unstable();
            groups.dedup();
        }
        Self { members, work, before, after, tensors }
    }

    pub(super) fn len(&self) -> usize {
        self.members.len()
    }

    /// Returns the groups in a topological order. Among the groups that may come next, the one with the lowest `rank` does. `rank`
    /// gets the group, the number of groups so far, and for how many groups the group could have come already.
    pub(super) fn order<K: Ord>(&self, mut rank: impl FnMut(usize, &[usize]) -> K) -> Vec<usize> {
        let mut waiting: Vec<usize> = self.before.iter().map(Vec::len).collect();
        let mut ready: Vec<usize> = (0..self.len()).filter(|group| waiting[*group] == 0).collect();
        let mut order = Vec::with_capacity(self.len());
        while let Some(place) =
            (0..ready.len()).min_by_key(|place| (rank(ready[*place], &order), Reverse(*place)))
        {
            let group = ready.remove(place);
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

/// The edges between nodes. An edge whose tensor can't cross leads in both directions, so its nodes are strongly connected.
struct Edges {
    forward: Vec<Vec<usize>>,
    backward: Vec<Vec<usize>>,
    /// Whether a node takes part. Constants are in each part that needs them, and inputs are fed to the first part that needs them.
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

/// Visits all that can be reached from `start` and was not seen, without recursion, and adds each node when all after it are done.
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
