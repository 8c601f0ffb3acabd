//! What a run found, for people and for scripts.

use tonic_rdma_graph::explain::SenderReport;
use tonic_rdma_graph::placement::{Crossing, Placement};

use super::plan::Plan;
use super::reference::Reference;
use crate::control::messages::Described;
use crate::options::RunOptions;
use crate::output::{ModeRow, Results, TensorRow};

/// Gathers the results of a run. `addresses` is the number of addresses of static slots that were distributed.
pub(crate) fn results(
    options: &RunOptions,
    plan: &Plan,
    reference: &Reference,
    addresses: usize,
    described: &[Described],
    modes: Vec<ModeRow>,
) -> Results {
    let crossings = plan.placements.crossings();
    let partition = plan.placements.partition();
    let reports: Vec<&SenderReport> = described.iter().flat_map(|part| &part.tensors).collect();
    let row = |crossing: &Crossing| {
        let report = reports.iter().copied().find(|report| report.crossing == crossing.id.0);
        tensor(plan, reference, crossing, report)
    };
    Results {
        model: plan.name.clone(),
        parts: partition.count(),
        micro_batches: options.micro_batches,
        receive: options.receive.to_string(),
        nodes: (0..partition.count())
            .map(|part| partition.parts().iter().filter(|owner| owner.0 == part).count())
            .collect(),
        bytes: crossings.iter().map(|crossing| reference.bytes(crossing.outlet)).sum(),
        static_addresses: addresses,
        tensors: crossings.iter().map(row).collect(),
        modes,
    }
}

fn tensor(
    plan: &Plan,
    reference: &Reference,
    crossing: &Crossing,
    report: Option<&SenderReport>,
) -> TensorRow {
    let graph = plan.model.topology();
    let name = |id| graph.node(id).map_or_else(String::new, |node| node.name.clone());
    let (placement, why) = match &crossing.placement {
        Placement::Static(_) => ("static", "the shape is known".to_owned()),
        Placement::Dynamic { why } => ("dynamic", why.clone()),
    };
    let site = report.and_then(|report| report.seen.site).map(|site| {
        let node =
            graph.nodes().nth(site.node).map_or_else(|| site.node.to_string(), |(_, node)| node.name.clone());
        format!("{node}, allocation {}", site.ordinal)
    });
    TensorRow {
        name: crossing.name.clone(),
        from: crossing.from.0,
        to: crossing.to.0,
        producer: name(crossing.outlet.node),
        consumers: crossing.consumers.iter().map(|id| name(*id)).collect(),
        shape: graph.fact(crossing.outlet).map_or_else(String::new, ToString::to_string),
        bytes: reference.bytes(crossing.outlet),
        placement,
        why,
        site,
        sender_copies_first: report.map(|report| report.first_step.copied),
        sender_copies: report.map(|report| report.later.copied),
        sent_later: report.map(|report| report.later.copied + report.later.in_place + report.later.inline),
    }
}
