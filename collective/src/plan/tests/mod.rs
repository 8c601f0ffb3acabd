//! Tests of plans: all ranks' plans are carried out together, in random interleavings.

mod checker;
mod dependencies;
mod pictures;
mod plans;
mod schedules;
mod tables;

use super::{Algorithm, Arguments, Collective, Plan};

const ALGORITHMS: [Algorithm; 3] = [Algorithm::OneShot, Algorithm::HalvingDoubling, Algorithm::Ring];

/// Returns the plans of all ranks.
fn plans(arguments: &Arguments) -> Vec<Plan> {
    (0..arguments.ranks).map(|rank| Plan::new(arguments, rank)).collect()
}

/// Returns arguments for an operation in one chunk.
fn arguments(collective: Collective, algorithm: Algorithm, ranks: usize, elements: usize) -> Arguments {
    Arguments { collective, algorithm, ranks, elements, chunk: elements, inline: 0 }
}
