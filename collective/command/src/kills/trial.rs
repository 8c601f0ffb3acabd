//! Which rank is lost where: an algorithm with a kind of messages, a number of ranks, a rank and a step.

use serde::{Deserialize, Serialize};
use tonic_rdma_collective::PlanTable;
use tonic_rdma_commands::Failure;

use crate::choices::Algorithm;

/// The step of a rank that is lost after the last step of an operation.
pub(crate) const END: u32 = u32::MAX;

/// An algorithm and a number of elements that the table below gives to it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Combination {
    pub(crate) algorithm: Algorithm,
    pub(crate) messages: &'static str,
    pub(crate) elements: usize,
}

const fn combination(algorithm: Algorithm, messages: &'static str, elements: usize) -> Combination {
    Combination { algorithm, messages, elements }
}

/// All algorithms with all kinds of messages. The numbers of elements are not multiples of the numbers of ranks.
pub(crate) const COMBINATIONS: [Combination; 9] = [
    combination(Algorithm::OneShot, "tiny", 7),
    combination(Algorithm::HalvingDoubling, "tiny", 13),
    combination(Algorithm::Ring, "tiny", 29),
    combination(Algorithm::OneShot, "inline", 1_003),
    combination(Algorithm::HalvingDoubling, "inline", 2_005),
    combination(Algorithm::Ring, "inline", 3_001),
    combination(Algorithm::OneShot, "pulled", 10_007),
    combination(Algorithm::HalvingDoubling, "pulled", 50_021),
    combination(Algorithm::Ring, "pulled", 100_003),
];

/// The plans: each combination gets its algorithm by its length.
const PLANS: &str = "one-shot:..32,halving-doubling:..64,ring:..128,\
                     one-shot:..4KiB,halving-doubling:..8KiB,ring:..16KiB,\
                     one-shot:..64KiB,halving-doubling/64KiB:..256KiB,ring/32KiB:..";

/// Returns the plans.
pub(crate) fn plans() -> Result<PlanTable, Failure> {
    PLANS.parse().map_err(|error| Failure::run("the plans of the trials").because(error))
}

/// How a rank is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Loss {
    Kill,
    Stop,
}

/// The trials of one group of processes: each trial takes a rank from the group of the one before.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Batch {
    pub(crate) loss: Loss,
    pub(crate) trials: Vec<Trial>,
}

/// One trial.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Trial {
    pub(crate) number: u64,
    /// The ranks of the group before.
    pub(crate) size: usize,
    /// The index of the combination.
    pub(crate) combination: usize,
    /// The rank that is lost.
    pub(crate) victim: usize,
    /// The step before which it is lost, or [`END`].
    pub(crate) step: u32,
}

impl Trial {
    /// Returns how many operations succeed before.
    pub(crate) const fn before(self) -> u64 {
        self.number % 4
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::choices::Named;

    #[test]
    fn each_combination_has_a_line_of_its_own_in_the_table() {
        let table = plans().unwrap();
        assert_eq!(table.ranges().len(), COMBINATIONS.len());
        for (range, combination) in table.ranges().iter().zip(COMBINATIONS) {
            let bytes = 4 * combination.elements;
            assert!(range.start <= bytes && range.end.is_none_or(|end| bytes < end), "{range:?}");
            let name = format!("{:?}", range.algorithm).to_lowercase();
            assert_eq!(name, combination.algorithm.name().replace('-', ""));
        }
    }
}
