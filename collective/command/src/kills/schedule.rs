//! The order of the trials. The steps of all ranks are known before the first trial, so that no step is left out.

use std::collections::BTreeMap;

use super::trial::{Batch, COMBINATIONS, END, Loss, Trial};
use crate::choices::Algorithm;
use crate::options::Trials;

/// The steps of each rank of a group, for each combination.
pub(super) type Steps = Vec<Vec<u32>>;

/// A place in an operation, and the ranks that come there.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Target {
    combination: usize,
    step: u32,
    ranks: Vec<usize>,
}

/// The targets of a number of ranks.
#[derive(Debug)]
struct Targets {
    list: Vec<Target>,
    /// The trials so far, in all passes.
    done: usize,
}

/// The trials that are left.
#[derive(Debug)]
pub(super) struct Schedule {
    loss: Loss,
    sizes: BTreeMap<usize, Targets>,
    /// How often all targets have been visited.
    pass: usize,
    next: u64,
    trials: u64,
}

impl Schedule {
    /// Makes the schedule of trials in groups of these sizes, in the steps of these algorithms.
    pub(super) fn new(
        loss: Loss,
        trials: Trials,
        sizes: &[usize],
        algorithms: &[Algorithm],
        steps: &BTreeMap<usize, Steps>,
    ) -> Self {
        let targets = |size: &usize| {
            let list = steps.get(size).map(|steps| targets(steps, algorithms)).unwrap_or_default();
            (*size, Targets { list, done: 0 })
        };
        let sizes: BTreeMap<_, _> = sizes.iter().map(targets).filter(|(_, it)| !it.list.is_empty()).collect();
        let all = sizes.values().map(|targets| targets.list.len() as u64).sum();
        let trials = match trials {
            Trials::Number(number) => number,
            Trials::All => all,
        };
        Self { loss, sizes, pass: 0, next: 0, trials }
    }

    /// Returns the number of trials.
    pub(super) const fn trials(&self) -> u64 {
        self.trials
    }

    /// Returns the trials of the next group of processes, of which each takes one rank away.
    pub(super) fn batch(&mut self) -> Option<Batch> {
        let open = |targets: &Targets, pass: usize| targets.done < (pass + 1) * targets.list.len();
        if !self.sizes.values().any(|targets| open(targets, self.pass)) {
            self.pass += 1;
        }
        let pass = self.pass;
        let sizes = self.sizes.iter().filter(|(_, targets)| open(targets, pass));
        // The largest of those that were visited least.
        let mut size =
            sizes.min_by_key(|(size, targets)| (targets.done, usize::MAX - **size)).map(|it| *it.0)?;
        let mut trials = Vec::new();
        while self.next < self.trials {
            let Some(targets) = self.sizes.get_mut(&size).filter(|targets| open(targets, pass)) else {
                break;
            };
            let index = targets.done % targets.list.len();
            let Target { combination, step, ranks } = &targets.list[index];
            let victim = ranks[(index + pass) % ranks.len()];
            trials.push(Trial { number: self.next, size, combination: *combination, victim, step: *step });
            targets.done += 1;
            self.next += 1;
            size -= 1;
        }
        (!trials.is_empty()).then_some(Batch { loss: self.loss, trials })
    }

    /// Returns the number of steps of an algorithm in a group of this size, with the ends of operations.
    pub(super) fn steps(&self, algorithm: Algorithm, size: usize) -> usize {
        let is = |target: &&Target| COMBINATIONS[target.combination].algorithm == algorithm;
        self.sizes.get(&size).map_or(0, |targets| targets.list.iter().filter(is).count())
    }
}

/// Returns all steps of the algorithms. The combinations take turns, and the steps of each come in an order that spreads.
fn targets(steps: &Steps, algorithms: &[Algorithm]) -> Vec<Target> {
    let mut all = Vec::new();
    for (combination, it) in COMBINATIONS.iter().enumerate() {
        if !algorithms.contains(&it.algorithm) {
            continue;
        }
        let of = |rank: &Vec<u32>| rank.get(combination).copied().unwrap_or(0);
        let most = steps.iter().map(of).max().unwrap_or(0);
        let end = Target { combination, step: END, ranks: (0..steps.len()).collect() };
        let target = |step: u32| {
            let ranks = steps.iter().enumerate().filter(|(_, rank)| step < of(rank)).map(|(rank, _)| rank);
            Target { combination, step, ranks: ranks.collect() }
        };
        let mut each: Vec<Target> = (0..most).map(target).chain([end]).collect();
        each.sort_by_key(|target| scattered(target.step));
        all.extend(each.into_iter().enumerate());
    }
    all.sort_by_key(|(turn, target)| (*turn, target.combination));
    all.into_iter().map(|(_, target)| target).collect()
}

/// Returns the fraction of the product with the golden ratio, which spreads numbers that follow one another.
const fn scattered(step: u32) -> u32 {
    step.wrapping_mul(2_654_435_769)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::choices::Named;

    /// Rank 0 of each group has fewer steps than the others.
    fn steps() -> BTreeMap<usize, Steps> {
        let rank = |size: usize, rank: usize| {
            (0..COMBINATIONS.len())
                .map(|index| (size * (1 + index) - usize::from(rank == 0)) as u32)
                .collect()
        };
        (1..=4).map(|size| (size, (0..size).map(|it| rank(size, it)).collect())).collect()
    }

    fn algorithms() -> Vec<Algorithm> {
        Algorithm::ALL.iter().map(|(algorithm, _)| *algorithm).collect()
    }

    fn trials(schedule: &mut Schedule) -> Vec<Trial> {
        let mut all = Vec::new();
        while let Some(batch) = schedule.batch() {
            for pair in batch.trials.windows(2) {
                assert_eq!(pair[1].size, pair[0].size - 1);
            }
            all.extend(batch.trials);
        }
        all
    }

    #[test]
    fn all_trials_visit_each_step_once_by_a_rank_that_comes_there() {
        let mut schedule = Schedule::new(Loss::Kill, Trials::All, &[2, 3, 4], &algorithms(), &steps());
        let all = trials(&mut schedule);
        assert_eq!(all.len() as u64, schedule.trials());
        let places: BTreeSet<_> =
            all.iter().map(|trial| (trial.size, trial.combination, trial.step)).collect();
        assert_eq!(places.len(), all.len());
        for size in 2..=4_usize {
            let of = |algorithm| schedule.steps(algorithm, size);
            let sum: usize = algorithms().into_iter().map(of).sum();
            assert_eq!(sum, all.iter().filter(|trial| trial.size == size).count());
            // For each combination all steps of the rank with most, and the end.
            assert_eq!(sum, (1..=COMBINATIONS.len()).map(|index| size * index + 1).sum::<usize>());
        }
        for trial in all {
            let steps = steps()[&trial.size][trial.victim][trial.combination];
            assert!(trial.victim < trial.size && (trial.step < steps || trial.step == END), "{trial:?}");
        }
    }

    #[test]
    fn a_second_pass_takes_other_ranks_at_the_same_steps() {
        let number = {
            let schedule = Schedule::new(Loss::Kill, Trials::All, &[4], &algorithms(), &steps());
            schedule.trials()
        };
        let mut schedule =
            Schedule::new(Loss::Kill, Trials::Number(2 * number), &[4], &algorithms(), &steps());
        let all = trials(&mut schedule);
        let (first, second) = all.split_at(number as usize);
        for (one, other) in first.iter().zip(second) {
            assert_eq!((one.combination, one.step), (other.combination, other.step));
            assert_ne!(one.victim, other.victim);
        }
    }

    #[test]
    fn few_trials_take_turns_and_stay_within_the_sizes_and_algorithms() {
        let mut schedule =
            Schedule::new(Loss::Stop, Trials::Number(7), &[2, 4], &[Algorithm::Ring], &steps());
        let all = trials(&mut schedule);
        let sizes: Vec<usize> = all.iter().map(|trial| trial.size).collect();
        assert_eq!(sizes, [4, 2, 4, 2, 4, 2, 4]);
        assert!(all.iter().all(|trial| COMBINATIONS[trial.combination].algorithm == Algorithm::Ring));
        let combinations: BTreeSet<usize> = all.iter().map(|trial| trial.combination).collect();
        assert_eq!(combinations.len(), 3);
    }
}
