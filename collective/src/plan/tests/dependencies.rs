//! Dependencies, against a slow way to find them.

use super::checker::overlap;
use super::{ALGORITHMS, Arguments, Collective, Plan};
use crate::plan::builder::{Dependencies, reads, writes};
use crate::plan::{Action, Area, Span, Step};

/// Returns whether the two steps must not run together.
fn conflict(one: &Action, other: &Action) -> bool {
    let hits = |written: &Action, used: &Action| {
        let mut used = reads(used).into_iter().flatten().chain(writes(used));
        writes(written).is_some_and(|written| used.any(|span| overlap(written, span)))
    };
    hits(one, other) || hits(other, one)
}

/// Checks that each step waits for the steps that it must wait for, perhaps by way of others, and for no
/// other step.
fn check(steps: &[Step]) {
    let mut reached: Vec<Vec<bool>> = Vec::new();
    for (index, step) in steps.iter().enumerate() {
        let mut before = vec![false; index];
        for earlier in &step.after {
            let earlier = *earlier as usize;
            assert!(earlier < index, "step {index} waits for step {earlier}");
            assert!(
                conflict(&steps[earlier].action, &step.action),
                "step {index} need not wait for step {earlier}"
            );
            before[earlier] = true;
            for (known, is_before) in before.iter_mut().zip(&reached[earlier]) {
                *known |= is_before;
            }
        }
        for (earlier, is_before) in before.iter().enumerate() {
            assert!(
                *is_before || !conflict(&steps[earlier].action, &step.action),
                "step {index} must wait for step {earlier}: {steps:#?}"
            );
        }
        assert!(step.after.is_sorted_by(|one, other| one < other), "step {index}: {:?}", step.after);
        reached.push(before);
    }
}

fn any_span(random: &mut fastrand::Rng, length: usize) -> Span {
    let start = random.usize(..20);
    let area = [Area::Work, Area::Scratch][random.usize(..2)];
    Span { area, range: start..start + length }
}

fn any_action(random: &mut fastrand::Rng) -> Action {
    let length = random.usize(..8);
    let mut span = || any_span(random, length);
    let (one, into, other) = (span(), span(), span());
    match random.usize(..4) {
        0 => Action::Send { to: 0, from: one },
        1 => Action::Receive { from: 0, into, reduce: random.bool().then_some(other) },
        2 => Action::Local { with: one, into, reduce: other },
        _ => Action::Finish { span: into },
    }
}

#[test]
fn steps_wait_for_those_with_which_they_share_elements() {
    for seed in 0..500 {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut dependencies = Dependencies::default();
        let mut steps: Vec<Step> = Vec::new();
        for index in 0..random.u32(1..30) {
            let action = any_action(&mut random);
            let after = dependencies.add(index, &action, &[], &steps);
            steps.push(Step { action, after });
        }
        check(&steps);
    }
}

#[test]
fn plans_wait_for_no_step_in_vain() {
    for algorithm in ALGORITHMS {
        for collective in [
            Collective::AllReduce,
            Collective::ReduceScatter,
            Collective::AllGather,
            Collective::Broadcast { root: 1 },
        ] {
            for ranks in 2..=7 {
                let arguments = Arguments { chunk: 7, ..super::arguments(collective, algorithm, ranks, 50) };
                for rank in 0..ranks {
                    check(&Plan::new(&arguments, rank).steps);
                }
            }
        }
    }
}
