//! What all parts must have in common.

use std::fmt::Write as _;

use xxhash_rust::xxh3::Xxh3;

use crate::dataflow::{Node, Topology};
use crate::placement::{Crossing, Placements};

/// Hashes of what all parts of a split graph must have in common, each with its name. Parts compare them when they connect.
///
/// ```
/// use tonic_rdma_graph::dataflow::Topology;
/// use tonic_rdma_graph::placement::Placements;
/// use tonic_rdma_graph::session::Fingerprint;
///
/// fn fingerprint(graph: &Topology, placements: &Placements, seed: u64) -> Fingerprint {
///     // Beside the graph and its partition, all parts need the same seed.
///     Fingerprint::of(graph, placements).with("the seed", &seed.to_le_bytes())
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fingerprint {
    entries: Vec<(String, u64)>,
}

impl Fingerprint {
    /// Computes the fingerprint of a split graph: of its nodes and edges, of the parts, and of the crossing tensors and their placement.
    /// The order of the nodes counts, because parts call nodes and crossing tensors by their numbers.
    ///
    /// ```
    /// # use tonic_rdma_graph::dataflow::Topology;
    /// # use tonic_rdma_graph::placement::{Partition, analyse};
    /// # use tonic_rdma_graph::session::Fingerprint;
    /// # let graph = Topology::new();
    /// let placements = analyse(&graph, &Partition::new(&graph, 2, vec![])?)?;
    /// let same = analyse(&graph, &Partition::new(&graph, 2, vec![])?)?;
    /// assert_eq!(Fingerprint::of(&graph, &placements), Fingerprint::of(&graph, &same));
    /// # Ok::<(), tonic_rdma_graph::GraphError>(())
    /// ```
    pub fn of(graph: &Topology, placements: &Placements) -> Self {
        let mut parts = Xxh3::new();
        let numbers = placements.partition().parts();
        numbers.iter().for_each(|part| parts.update(&(part.0 as u64).to_le_bytes()));
        let entries = vec![
            ("the graph".to_owned(), hash_of_graph(graph)),
            ("the partition".to_owned(), parts.digest()),
            ("the placement of crossing tensors".to_owned(), hash_of_crossings(placements.crossings())),
        ];
        Self { entries }
    }

    /// Adds something else that all parts must have in common. `name` goes into the error message if it differs.
    pub fn with(mut self, name: &str, content: &[u8]) -> Self {
        self.entries.push((name.to_owned(), xxhash_rust::xxh3::xxh3_64(content)));
        self
    }

    /// Returns the names and hashes, as parts compare them.
    pub(super) fn entries(&self) -> impl Iterator<Item = (String, String)> {
        self.entries.iter().map(|(name, hash)| (name.clone(), format!("{hash:016x}")))
    }
}

fn hash_of_graph(graph: &Topology) -> u64 {
    let mut hash = Xxh3::new();
    let mut text = String::new();
    for (_, node) in graph.nodes() {
        text.clear();
        let Node { name, kind, role, inputs, outputs, work: _, stays } = node;
        // Writing into a `String` never fails.
        let _ = write!(text, "{name:?} {kind:?} {role:?} {inputs:?} {stays}");
        outputs.iter().for_each(|fact| _ = write!(text, " {fact}"));
        text.push('\n');
        hash.update(text.as_bytes());
    }
    hash.update(format!("{:?}", graph.results()).as_bytes());
    hash.digest()
}

fn hash_of_crossings(crossings: &[Crossing]) -> u64 {
    let mut hash = Xxh3::new();
    for Crossing { id, name, outlet, from, to, consumers, placement } in crossings {
        let text = format!("{id:?} {name:?} {outlet:?} {from:?} {to:?} {consumers:?} {placement:?}\n");
        hash.update(text.as_bytes());
    }
    hash.digest()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use tonic_rdma_tensor::Dtype;

    use super::*;
    use crate::dataflow::{Fact, NodeId, Outlet, Role};
    use crate::placement::{Part, Partition, analyse};

    /// A chain of three nodes, whose last output has this many elements.
    fn chain(last: u64) -> Topology {
        let mut graph = Topology::new();
        for (name, length) in [("input", 4), ("one", 4), ("two", last)] {
            let inputs = graph.len().checked_sub(1).map(|node| Outlet { node: NodeId(node), output: 0 });
            let role = if inputs.is_none() { Role::Input } else { Role::Compute };
            let (name, kind, outputs) =
                (name.to_owned(), "Test".to_owned(), vec![Fact::known(Dtype::F32, &[length])]);
            let inputs = inputs.into_iter().collect();
            graph.add(Node { name, kind, role, inputs, outputs, work: 1, stays: false }).unwrap();
        }
        graph.result(Outlet { node: NodeId(2), output: 0 }).unwrap();
        graph
    }

    fn split(graph: &Topology, parts: [usize; 3]) -> Fingerprint {
        let partition = Partition::new(graph, 2, parts.map(Part).to_vec()).unwrap();
        Fingerprint::of(graph, &analyse(graph, &partition).unwrap())
    }

    #[test]
    fn each_difference_of_two_split_graphs_is_named() {
        let graph = chain(4);
        let ours = split(&graph, [0, 0, 1]);
        let difference = |other: Fingerprint| {
            let both = ours.entries().zip(other.entries());
            both.filter(|(ours, theirs)| ours != theirs).map(|(ours, _)| ours.0).collect::<Vec<_>>()
        };
        assert_eq!(difference(split(&chain(4), [0, 0, 1])), [""; 0]);
        assert_eq!(
            difference(split(&graph, [0, 1, 1])),
            ["the partition", "the placement of crossing tensors"]
        );
        assert_eq!(difference(split(&chain(9), [0, 0, 1])), ["the graph"], "another shape");
        let mut other = chain(4);
        other.result(Outlet { node: NodeId(1), output: 0 }).unwrap();
        assert_eq!(difference(split(&other, [0, 0, 1])), ["the graph"], "another result");
    }
}
