//! Which node belongs to which part.

use super::Part;
use crate::dataflow::{NodeId, Role, Topology};
use crate::error::GraphError;

/// The part of each node of a graph.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Partition {
    count: usize,
    parts: Vec<Part>,
}

impl Partition {
    /// Makes a partition into `count` parts. `parts` has the part of each node, in the order of the nodes. Edges may have any
    /// direction. A part may have no nodes.
    ///
    /// ```
    /// use tonic_rdma_graph::dataflow::{Fact, Node, Outlet, Role, Topology};
    /// use tonic_rdma_graph::placement::{Part, Partition, analyse};
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
    /// let placements = analyse(&graph, &partition)?;
    /// assert_eq!(placements.crossings().len(), 1);
    /// assert_eq!(placements.crossings()[0].name, "relu to part 1");
    /// # Ok::<(), tonic_rdma_graph::GraphError>(())
    /// ```
    ///
    /// # Errors
    /// The list has another length than the graph, names a part that does not exist, or separates a node from its consumer although
    /// the output can't cross ([`Node::stays`](crate::dataflow::Node::stays)).
    pub fn new(graph: &Topology, count: usize, parts: Vec<Part>) -> Result<Self, GraphError> {
        if parts.len() != graph.len() {
            let reason = format!("it has {} nodes, and the graph has {}", parts.len(), graph.len());
            return Err(GraphError::Partition(reason));
        }
        for ((_, node), part) in graph.nodes().zip(&parts) {
            if part.0 >= count {
                let reason = format!("node {} is in part {part}, and there are {count} parts", node.name);
                return Err(GraphError::Partition(reason));
            }
        }
        let partition = Self { count, parts };
        let separated = partition.edges(graph).find(|edge| edge.stays && edge.from != edge.to);
        match separated {
            None => Ok(partition),
            Some(Edge { producer, consumer, from, to, .. }) => {
                Err(GraphError::Stays { producer, from: from.0, consumer, to: to.0 })
            }
        }
    }

    /// Returns the number of parts.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Returns the part of a node, or `None` if the graph has no such node. A constant is also in each other part that uses it.
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
    /// [`GraphError::Backward`] names a tensor that does not.
    pub fn check_pipeline(&self, graph: &Topology) -> Result<(), GraphError> {
        match self.edges(graph).find(|edge| edge.from > edge.to) {
            None => Ok(()),
            Some(Edge { producer, consumer, from, to, .. }) => {
                Err(GraphError::Backward { producer, from: from.0, consumer, to: to.0 })
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
