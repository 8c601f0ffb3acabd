//! How the ranks of a group agree on their plans.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::time::Duration;

use tonic_rdma_collective::{
    Algorithm, CollectiveError, Communicator, Launch, PlanChoice, PlanTable, Reduction,
};

/// Long enough for a busy machine; only a hang takes so long.
const LIMIT: Duration = Duration::from_secs(120);

/// Connects one rank for each choice, each on a thread of its own, and returns what `run` makes of each, in order.
fn group<T: Send>(
    choices: &[PlanChoice],
    run: impl Fn(Result<Communicator, CollectiveError>, &tokio::runtime::Runtime) -> T + Sync,
) -> Vec<T> {
    let address = support::free_address();
    let (address, run) = (&address, &run);
    std::thread::scope(|scope| {
        let ranks = choices.iter().enumerate().map(|(rank, choice)| {
            scope.spawn(move || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                let builder = Communicator::builder()
                    .launch(Launch::new(rank, choices.len(), address.as_str()))
                    .deadline(LIMIT)
                    .plans(choice.clone());
                run(runtime.block_on(builder.connect()), &runtime)
            })
        });
        let threads: Vec<_> = ranks.collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn sum(communicator: &Communicator, length: usize) -> Vec<f32> {
    let mut elements = vec![communicator.rank() as f32 + 1.0; length];
    communicator.all_reduce(&mut elements[..], Reduction::Sum).wait().unwrap();
    elements
}

#[test]
fn all_ranks_use_the_measured_plans_of_rank_0() {
    let tables =
        group(&[PlanChoice::Measured, PlanChoice::Measured, PlanChoice::Measured], |connected, _| {
            let communicator = connected.unwrap();
            assert_eq!(communicator.statistics().operations, 0, "the measurement is not in the statistics");
            for length in [1, 5000, 400_000] {
                assert_eq!(sum(&communicator, length), vec![6.0; length]);
            }
            assert_eq!(communicator.statistics().operations, 3);
            communicator.plans().clone()
        });
    assert!(tables.iter().all(|table| *table == tables[0]), "{tables:?}");
    let text = tables[0].to_string();
    assert!(text.contains("because it took"), "no reason of a measurement: {text}");
    assert_eq!(tables[0].pinned().parse::<PlanTable>().unwrap().pinned(), tables[0].pinned());
}

#[test]
fn survivors_of_a_measured_group_have_the_default_plans() {
    let all = std::sync::Barrier::new(3);
    group(&[PlanChoice::Measured, PlanChoice::Measured, PlanChoice::Measured], |connected, runtime| {
        let communicator = connected.unwrap();
        all.wait();
        if communicator.rank() == 1 {
            return;
        }
        let smaller = runtime.block_on(communicator.shrink()).unwrap();
        assert_eq!(*smaller.plans(), PlanTable::unmeasured(2));
        assert_eq!(sum(&smaller, 1000), [3.0; 1000]);
    });
}

#[test]
fn a_rank_with_another_choice_is_named_on_all_ranks() {
    let pinned = PlanChoice::Pinned("one-shot:..1KiB,ring/64KiB:..".parse().unwrap());
    let all = std::sync::Barrier::new(3);
    let errors = group(&[pinned.clone(), pinned, PlanChoice::Measured], |connected, _| {
        let error = connected.err().unwrap().to_string();
        all.wait();
        error
    });
    for error in errors {
        assert!(error.contains(r#"rank 2 has the plans "measured""#), "{error}");
        assert!(error.contains("one-shot:..1KiB,ring/64KiB:.."), "{error}");
    }
}

#[test]
fn plans_that_the_program_sets_are_used_and_shown() {
    let fixed = PlanChoice::Fixed { algorithm: Algorithm::Ring, piece_bytes: 64 << 10 };
    let pinned = PlanChoice::Pinned("ring/64KiB".parse().unwrap());
    // They say the same, so they may meet.
    group(&[fixed, pinned], |connected, _| {
        let communicator = connected.unwrap();
        assert_eq!(communicator.plans().choose(8), (Algorithm::Ring, 64 << 10));
        assert_eq!(communicator.plans().pinned(), "ring/64KiB:..");
        assert_eq!(sum(&communicator, 70_000), vec![3.0; 70_000]);
    });
    group(&[PlanChoice::Measured], |connected, _| {
        let text = connected.unwrap().plans().to_string();
        assert!(text.contains("a group of one rank sends nothing"), "{text}");
    });
}
