//! What a process reports of a tensor that it sends.

use serde::{Deserialize, Serialize};

use crate::placement::CrossingId;
use crate::schedule::CrossingCounts;
use crate::sites::{NodeSites, SeenCrossing};

/// How a sender has sent its tensors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sent {
    /// The number of tensors that the device took from their own memory.
    pub in_place: u64,
    /// The number of tensors that were copied into registered memory first, or into a message.
    pub copied: u64,
    /// The number of tensors that travelled within the request itself, because they are small.
    pub inline: u64,
}

/// What a process counted for a crossing tensor that it sends. It travels to the process that explains.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SenderReport {
    /// The number of the crossing tensor.
    pub crossing: usize,
    /// Whether the allocator of the process traces.
    pub traced: bool,
    /// The memory of the tensors.
    pub seen: SeenCrossing,
    /// How they were sent in the first step.
    pub first_step: Sent,
    /// How they were sent in all later steps.
    pub later: Sent,
}

impl SenderReport {
    /// Makes the report of a crossing tensor from the counts of its sender after the first step and at the end.
    ///
    /// ```
    /// use tonic_rdma_graph::dataflow::Topology;
    /// use tonic_rdma_graph::explain::{SenderReport, Sent};
    /// use tonic_rdma_graph::placement::CrossingId;
    /// use tonic_rdma_graph::sites::NodeSites;
    ///
    /// let sites = NodeSites::untraced(&Topology::new());
    /// let (first, all) = (Sent { copied: 1, ..Sent::default() }, Sent { copied: 1, in_place: 9, inline: 0 });
    /// let report = SenderReport::new(CrossingId(0), &sites, first, all);
    /// assert_eq!(report.later, Sent { in_place: 9, ..Sent::default() });
    /// ```
    pub fn new(crossing: CrossingId, sites: &NodeSites, first_step: Sent, all: Sent) -> Self {
        let later = Sent {
            in_place: all.in_place.saturating_sub(first_step.in_place),
            copied: all.copied.saturating_sub(first_step.copied),
            inline: all.inline.saturating_sub(first_step.inline),
        };
        Self {
            crossing: crossing.0,
            traced: sites.is_traced(),
            seen: sites.seen(crossing),
            first_step,
            later,
        }
    }
}

impl From<CrossingCounts> for Sent {
    fn from(counts: CrossingCounts) -> Self {
        let CrossingCounts { sent, copied, inline, .. } = counts;
        Self { in_place: sent.saturating_sub(copied).saturating_sub(inline), copied, inline }
    }
}
