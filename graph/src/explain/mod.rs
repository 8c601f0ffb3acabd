//! What becomes of each crossing tensor: where it comes from, how it is placed and why, what allocated it,
//! and how often it was copied.
//!
//! ```text
//!  Topology, Placements           producer, consumers, shape, static or dynamic and why   known before the first step
//!  SenderReport of each sender    site, bytes, tensors sent in place, copied, inline      counted in the run
//! ```
//!
//! This module counts nothing itself.

#[cfg(test)]
mod tests;

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::dataflow::{NodeId, Topology};
use crate::placement::{Crossing, CrossingId, Placement, Placements};
use crate::schedule::CrossingCounts;
use crate::sites::{AllocationSite, CrossingMemory, NodeSites, SiteOwner};

/// All crossing tensors of a split graph. Its text has a paragraph for each.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Explanation {
    /// The crossing tensors, by number.
    pub tensors: Vec<ExplainedTensor>,
}

/// A crossing tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ExplainedTensor {
    /// The name of the crossing tensor.
    pub name: String,
    /// The node whose output crosses, with its operation.
    pub producer: String,
    /// The part of the producer.
    pub from: usize,
    /// The nodes of the other part that need the tensor.
    pub consumers: Vec<String>,
    /// The part of the consumers.
    pub to: usize,
    /// Type and shape, such as `float32[N, 3]`.
    pub shape: String,
    /// The number of bytes, for a dynamic tensor those of the latest one. `None` if none was sent.
    pub bytes: Option<u64>,
    /// `static` or `dynamic`.
    pub placement: &'static str,
    /// Why the tensor is placed so.
    pub why: String,
    /// The allocation site, in words. `None` if the process of the sender has not reported.
    pub site: Option<String>,
    /// The number of tensors that were sent in the first step, and how many of them the sender copied.
    pub first_step: Option<Copies>,
    /// The same for all later steps together.
    pub later_steps: Option<Copies>,
    /// How many tensors the sender copied after the first step. `None` if there were no later steps, or the
    /// process of the sender has not reported.
    pub sender_copies: Option<u64>,
}

/// How many of the sent tensors the sender copied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Copies {
    /// All tensors.
    pub tensors: u64,
    /// Tensors that the sender copied into registered memory or into a message.
    pub copied: u64,
    /// Small tensors that travelled within the request itself.
    pub inline: u64,
}

impl Explanation {
    /// Explains the crossing tensors of a split graph. A tensor without a report of its sender is explained
    /// as far as it is known before the first step. If a tensor has several reports, the last one counts.
    ///
    /// ```
    /// use tonic_rdma_graph::dataflow::{Fact, Node, NodeId, Outlet, Role, Topology};
    /// use tonic_rdma_graph::explain::Explanation;
    /// use tonic_rdma_graph::placement::{Partition, Placements};
    /// use tonic_rdma_tensor::Dtype;
    ///
    /// let mut graph = Topology::new();
    /// for (name, role) in [("image", Role::Input), ("conv", Role::Compute), ("relu", Role::Compute)] {
    ///     let inputs = graph.len().checked_sub(1).map(|node| Outlet { node: NodeId(node), output: 0 });
    ///     graph.add(Node {
    ///         name: name.to_owned(),
    ///         kind: "Example".to_owned(),
    ///         role,
    ///         inputs: inputs.into_iter().collect(),
    ///         outputs: vec![Fact::known(Dtype::F32, &[1, 3, 8, 8])],
    ///         work: 100,
    ///         stays: false,
    ///     })?;
    /// }
    /// let placements = Placements::new(&graph, &Partition::balanced(&graph, 2)?)?;
    /// let explanation = Explanation::new(&graph, &placements, &[]);
    /// assert_eq!(explanation.tensors[0].name, "conv to part 1");
    /// assert!(explanation.to_string().contains("static: all dimensions are known"));
    /// # Ok::<(), tonic_rdma_graph::GraphError>(())
    /// ```
    pub fn new(graph: &Topology, placements: &Placements, reports: &[SenderReport]) -> Self {
        let tensors = placements.crossings().iter().map(|crossing| {
            let report = reports.iter().rev().find(|report| report.crossing == crossing.id.0);
            explain(graph, placements, crossing, report)
        });
        Self { tensors: tensors.collect() }
    }
}

fn explain(
    graph: &Topology,
    placements: &Placements,
    crossing: &Crossing,
    report: Option<&SenderReport>,
) -> ExplainedTensor {
    let (placement, why, known) = match &crossing.placement {
        Placement::Static(spec) => ("static", "all dimensions are known".to_owned(), spec.bytes()),
        Placement::Dynamic { why, .. } => ("dynamic", why.clone(), None),
    };
    let seen = report.map(|report| report.seen).filter(|seen| seen.tensors > 0);
    let later = report.map(|report| report.later);
    ExplainedTensor {
        name: crossing.name.clone(),
        producer: node(graph, crossing.outlet.node),
        from: crossing.from.0,
        consumers: crossing.consumers.iter().map(|consumer| node(graph, *consumer)).collect(),
        to: crossing.to.0,
        shape: graph.fact(crossing.outlet).map(ToString::to_string).unwrap_or_default(),
        bytes: known.or(seen.map(|seen| seen.bytes)),
        placement,
        why,
        site: report.map(|report| site(graph, placements, report)),
        first_step: report.map(|report| report.first_step),
        later_steps: later,
        sender_copies: later.filter(|later| later.tensors > 0).map(|later| later.copied),
    }
}

/// Returns the name of a node with its operation.
fn node(graph: &Topology, id: NodeId) -> String {
    match graph.node(id) {
        Some(node) => format!("{} ({})", node.name, node.kind),
        None => format!("node {}", id.0),
    }
}

fn site(graph: &Topology, placements: &Placements, report: &SenderReport) -> String {
    match report.seen.site {
        Some(AllocationSite { owner: SiteOwner::Node(id), ordinal }) => {
            format!("allocation {ordinal} of node {}", node(graph, NodeId(id)))
        }
        Some(AllocationSite { owner: SiteOwner::Receive(id), ordinal }) => {
            let received = placements.crossings().get(id).map_or("?", |crossing| crossing.name.as_str());
            format!("allocation {ordinal} of the receive of {received}")
        }
        None if !report.traced => {
            "not known, because the global allocator of the program does not trace".to_owned()
        }
        None if report.seen.tensors == 0 => "not known, because no tensor was sent".to_owned(),
        None if report.seen.registered > 0 => "no node; the program allocated registered memory".to_owned(),
        None => "no node: it was allocated before the first step, or by a thread of a kernel".to_owned(),
    }
}

/// What a process counted for a crossing tensor that it sends. It travels to the process that explains.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SenderReport {
    /// The number of the crossing tensor.
    pub crossing: usize,
    /// Whether the allocator of the process traces.
    pub traced: bool,
    /// The memory of the tensors.
    pub seen: CrossingMemory,
    /// How they were sent in the first step.
    pub first_step: Copies,
    /// How they were sent in all later steps.
    pub later: Copies,
}

impl SenderReport {
    /// Makes the report of a crossing tensor from the counts of its sender after the first step and at the
    /// end.
    ///
    /// ```
    /// use tonic_rdma_graph::dataflow::Topology;
    /// use tonic_rdma_graph::explain::{Copies, SenderReport};
    /// use tonic_rdma_graph::placement::CrossingId;
    /// use tonic_rdma_graph::sites::NodeSites;
    ///
    /// let sites = NodeSites::untraced(&Topology::new());
    /// let (first, all) = (Copies { tensors: 1, copied: 1, inline: 0 }, Copies { tensors: 10, copied: 1, inline: 0 });
    /// let report = SenderReport::new(CrossingId(0), &sites, first, all);
    /// assert_eq!(report.later, Copies { tensors: 9, ..Copies::default() });
    /// ```
    pub fn new(crossing: CrossingId, sites: &NodeSites, first_step: Copies, all: Copies) -> Self {
        let later = Copies {
            tensors: all.tensors.saturating_sub(first_step.tensors),
            copied: all.copied.saturating_sub(first_step.copied),
            inline: all.inline.saturating_sub(first_step.inline),
        };
        let (traced, seen) = (sites.is_traced(), sites.seen(crossing));
        Self { crossing: crossing.0, traced, seen, first_step, later }
    }
}

impl From<CrossingCounts> for Copies {
    fn from(counts: CrossingCounts) -> Self {
        Self { tensors: counts.sent, copied: counts.copied, inline: counts.inline }
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.tensors.is_empty() {
            return writeln!(f, "no tensor crosses");
        }
        for (index, tensor) in self.tensors.iter().enumerate() {
            if index > 0 {
                writeln!(f)?;
            }
            tensor.fmt(f)?;
        }
        Ok(())
    }
}

impl fmt::Display for ExplainedTensor {
    /// Writes a line with the name, and a line for each fact.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.name)?;
        writeln!(f, "  producer   {}, part {}", self.producer, self.from)?;
        writeln!(f, "  consumers  {}, part {}", self.consumers.join(", "), self.to)?;
        match self.bytes {
            Some(bytes) => writeln!(f, "  shape      {}, {bytes} bytes", self.shape)?,
            None => writeln!(f, "  shape      {}", self.shape)?,
        }
        writeln!(f, "  placement  {}: {}", self.placement, self.why)?;
        if let Some(site) = &self.site {
            writeln!(f, "  site       {site}")?;
        }
        if let (Some(first), Some(later)) = (self.first_step, self.later_steps) {
            writeln!(f, "  copies     first step: {first}; later steps: {later}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Copies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self { tensors: 0, .. } => f.write_str("nothing sent"),
            Self { tensors, copied, inline: 0 } => write!(f, "{copied} of {tensors} tensors copied"),
            Self { tensors, copied, inline } => {
                write!(f, "{copied} of {tensors} tensors copied, {inline} sent inline")
            }
        }
    }
}
