//! Which rank is lost when: all ranks work it out from the number of the trial.

use serde::{Deserialize, Serialize};
use tonic_rdma_collective::PlanTable;
use tonic_rdma_commands::Failure;

/// An algorithm and a number of elements that the table below gives to it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Combination {
    pub(crate) algorithm: &'static str,
    pub(crate) messages: &'static str,
    pub(crate) elements: usize,
}

const fn combination(algorithm: &'static str, messages: &'static str, elements: usize) -> Combination {
    Combination { algorithm, messages, elements }
}

/// All algorithms with all kinds of messages. The numbers of elements are not multiples of the numbers of ranks.
pub(crate) const COMBINATIONS: [Combination; 9] = [
    combination("one-shot", "tiny", 7),
    combination("halving-doubling", "tiny", 13),
    combination("ring", "tiny", 29),
    combination("one-shot", "inline", 1_003),
    combination("halving-doubling", "inline", 2_005),
    combination("ring", "inline", 3_001),
    combination("one-shot", "pulled", 10_007),
    combination("halving-doubling", "pulled", 50_021),
    combination("ring", "pulled", 100_003),
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Batch {
    pub(crate) loss: Loss,
    pub(crate) first: u64,
    pub(crate) trials: u64,
}

/// One trial in a group of so many ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Trial {
    pub(crate) number: u64,
    pub(crate) size: usize,
}

impl Trial {
    /// Returns the index of the combination.
    pub(crate) const fn combination(self) -> usize {
        (self.number % COMBINATIONS.len() as u64) as usize
    }

    /// Returns the rank that is lost.
    pub(crate) const fn victim(self) -> usize {
        (self.number / COMBINATIONS.len() as u64 % self.size as u64) as usize
    }

    /// Returns how many operations succeed before.
    pub(crate) const fn before(self) -> u64 {
        self.number % 4
    }

    /// Returns the step before which the rank is lost; `steps` stands for the end of the operation. The steps go round: each
    /// visit of a combination is about 0.618 of all steps behind the one before, which spreads visits evenly.
    pub(crate) fn step(self, steps: u32) -> u32 {
        const GOLDEN: u64 = 2_654_435_769;
        let visit = self.number / COMBINATIONS.len() as u64;
        let fraction = visit.wrapping_mul(GOLDEN) & 0xffff_ffff;
        ((fraction * (u64::from(steps) + 1)) >> 32) as u32
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn trials_reach_all_combinations_victims_and_steps() {
        let (mut victims, mut steps) = (BTreeSet::new(), BTreeSet::new());
        for number in 0..600 {
            let trial = Trial { number, size: 4 };
            assert!(trial.victim() < 4);
            victims.insert((trial.combination(), trial.victim()));
            steps.insert((trial.combination(), trial.step(12)));
        }
        assert_eq!((victims.len(), steps.len()), (36, 9 * 13));
    }

    #[test]
    fn each_combination_has_a_line_of_its_own_in_the_table() {
        let table = plans().unwrap();
        assert_eq!(table.ranges().len(), COMBINATIONS.len());
        for (range, combination) in table.ranges().iter().zip(COMBINATIONS) {
            let bytes = 4 * combination.elements;
            assert!(range.start <= bytes && range.end.is_none_or(|end| bytes < end), "{range:?}");
            let name = format!("{:?}", range.algorithm).to_lowercase();
            assert_eq!(name, combination.algorithm.replace('-', ""));
        }
    }
}
