//! What a run found, for people and for scripts.

use tonic_rdma_graph::explain::{Explanation, SenderReport};

use super::plan::Plan;
use super::reference::Reference;
use crate::control::messages::Described;
use crate::options::RunOptions;
use crate::output::{ModeRow, Results};

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
    let reports: Vec<SenderReport> = described.iter().flat_map(|part| part.tensors.iter().copied()).collect();
    let mut explanation = Explanation::new(plan.model.topology(), &plan.placements, &reports);
    for (tensor, crossing) in explanation.tensors.iter_mut().zip(crossings) {
        tensor.bytes = Some(reference.bytes(crossing.outlet));
    }
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
        explanation,
        modes,
    }
}
