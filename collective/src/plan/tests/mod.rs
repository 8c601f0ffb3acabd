//! Tests of plans: all ranks' plans are carried out together, in random interleavings.

mod checker;
mod dependencies;
mod hosts;
mod model;
mod pictures;
mod plans;
mod schedules;
mod tables;

use super::{Algorithm, Arguments, Collective, Hosts, Plan};

const ALGORITHMS: [Algorithm; 5] = Algorithm::ALL;

/// Returns the plans of all ranks.
fn plans(arguments: &Arguments) -> Vec<Plan> {
    (0..arguments.ranks).map(|rank| Plan::new(arguments, rank)).collect()
}

/// Returns arguments for an operation in one chunk, on hosts of three ranks and a last one of fewer.
fn arguments(collective: Collective, algorithm: Algorithm, ranks: usize, elements: usize) -> Arguments {
    let hosts = (0..ranks).map(|rank| rank / 3).collect();
    Arguments { collective, algorithm, ranks, elements, chunk: elements, inline: 0, hosts }
}
