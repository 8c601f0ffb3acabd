//! Random operations in random interleavings. No rank waits forever, each rank gets the right result, and the
//! results are the same bits for all interleavings.
//!
//! `TONIC_RDMA_SCHEDULES` sets the number of schedules; `TONIC_RDMA_SEED` runs a single one.

use super::checker::{LinkConditions, carry_out};
use super::{ALGORITHMS, Arguments, Collective, Plan};

const SCHEDULES: u64 = 6_000;

#[test]
fn any_schedule() {
    let number = |name: &str| std::env::var(name).ok().map(|value| value.parse::<u64>().expect(name));
    if let Some(seed) = number("TONIC_RDMA_SEED") {
        return run(seed);
    }
    for seed in 0..number("TONIC_RDMA_SCHEDULES").unwrap_or(SCHEDULES) {
        let outcome = std::panic::catch_unwind(|| run(seed));
        assert!(outcome.is_ok(), "seed {seed}: set TONIC_RDMA_SEED={seed} to run it alone");
    }
}

/// Carries out one random operation in two interleavings.
fn run(seed: u64) {
    let mut random = fastrand::Rng::with_seed(seed);
    let arguments = any_arguments(&mut random);
    // The ranks may differ in what their links copy.
    let copies = random.bool();
    let mut inline = || if copies { [0, 5, 100_000][random.usize(..3)] } else { 0 };
    let inline: Vec<usize> = (0..arguments.ranks).map(|_| inline()).collect();
    let plan = |(rank, inline): (usize, &usize)| {
        Plan::new(&Arguments { inline: *inline, ..arguments.clone() }, rank)
    };
    let plans: Vec<Plan> = inline.iter().enumerate().map(plan).collect();
    let links = |random: &mut fastrand::Rng| LinkConditions {
        inline: inline
            .iter()
            .map(|inline| inline + if copies { [0, 3, 1000][random.usize(..3)] } else { 0 })
            .collect(),
        copied_percent: if copies { [0, 50, 100][random.usize(..3)] } else { 0 },
        depth: 1 + random.usize(..8),
        slow: random.bool().then(|| random.usize(..arguments.ranks)),
    };
    let first = carry_out(&arguments, &plans, links(&mut random), random.u64(..));
    let second = carry_out(&arguments, &plans, links(&mut random), random.u64(..));
    assert_eq!(first, second, "the results of two interleavings of {arguments:?}");
}

fn any_arguments(random: &mut fastrand::Rng) -> Arguments {
    let ranks = match random.usize(..10) {
        0 => 1,
        1..8 => 2 + random.usize(..7),
        _ => 9 + random.usize(..12),
    };
    let elements = match random.usize(..10) {
        0 => 0,
        1..3 => random.usize(..ranks),
        3..9 => random.usize(..60),
        // Halvings are aligned from here on.
        _ => 1000 + random.usize(..200),
    };
    let collective = match random.usize(..12) {
        0 => Collective::Barrier,
        1 | 2 => Collective::Broadcast { root: random.usize(..ranks) },
        3 | 4 => Collective::AllGather,
        5 | 6 => Collective::ReduceScatter,
        _ => Collective::AllReduce,
    };
    let most = 1 + random.usize(..5);
    Arguments {
        collective,
        algorithm: ALGORITHMS[random.usize(..ALGORITHMS.len())],
        ranks,
        elements,
        chunk: elements.div_ceil(1 + random.usize(..12)) + random.usize(..2),
        inline: 0,
        hosts: (0..ranks).map(|_| random.usize(..most)).collect(),
    }
}
