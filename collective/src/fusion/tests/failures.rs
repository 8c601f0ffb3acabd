use std::time::Duration;

use super::simulation::{Rank, group, ranks};
use super::steps::put;
use crate::error::{CollectiveError, CollectiveErrorKind};
use crate::fusion::block_on;
use crate::fusion::steps::Steps;

/// Returns a rank alone, after a step with gradients `a` (2 elements) and `b` (3), in buckets of their own.
fn laid() -> (Rank, Steps<f32, Rank>) {
    let rank = group(1, Duration::ZERO).remove(0);
    let mut steps = Steps::new(rank.clone(), 1);
    steps.begin().unwrap();
    put(&mut steps, "a", &[1.0; 2]);
    put(&mut steps, "b", &[1.0; 3]);
    block_on(steps.finish()).unwrap();
    (rank, steps)
}

fn is_unfinished(error: &CollectiveError) -> bool {
    error.kind() == CollectiveErrorKind::Revoked && error.reason().contains("the ranks are out of step")
}

#[test]
fn a_gradient_that_the_first_step_did_not_have_is_named() {
    let (_, mut steps) = laid();
    steps.begin().unwrap();
    let error = steps.slot("c", 2).unwrap_err();
    assert!(error.reason().starts_with("gradient `c` was not part of the first step"), "{error}");
}

#[test]
fn another_length_is_named() {
    let (_, mut steps) = laid();
    steps.begin().unwrap();
    let error = steps.slot("b", 4).unwrap_err();
    assert!(error.reason().starts_with("gradient `b` has 4 elements, and had 3 before"), "{error}");
    // The step goes on.
    put(&mut steps, "b", &[2.0; 3]);
    put(&mut steps, "a", &[2.0; 2]);
    block_on(steps.finish()).unwrap();
}

#[test]
fn a_gradient_that_is_given_twice_is_named() {
    let (_, mut steps) = laid();
    for _ in 0..2 {
        steps.begin().unwrap();
        put(&mut steps, "a", &[1.0; 2]);
        let error = steps.slot("a", 2).unwrap_err();
        assert!(error.reason().starts_with("gradient `a` was given twice"), "{error}");
        put(&mut steps, "b", &[1.0; 3]);
        block_on(steps.finish()).unwrap();
    }
    let mut steps = Steps::<f32, Rank>::new(group(1, Duration::ZERO).remove(0), 1 << 20);
    steps.begin().unwrap();
    put(&mut steps, "a", &[1.0; 2]);
    assert!(steps.slot("a", 2).unwrap_err().reason().starts_with("gradient `a` was given twice"));
}

#[test]
fn missing_gradients_are_named() {
    let (_, mut steps) = laid();
    steps.begin().unwrap();
    put(&mut steps, "b", &[1.0; 3]);
    let error = block_on(steps.finish()).unwrap_err();
    assert_eq!(error.kind(), CollectiveErrorKind::InvalidArgument);
    assert!(error.to_string().starts_with("the step ends without gradient `a`;"), "{error}");
    // No operation had started, because `a` is first. So the next step may begin.
    steps.begin().unwrap();
    put(&mut steps, "a", &[1.0; 2]);
    let error = block_on(steps.finish()).unwrap_err();
    assert!(error.to_string().contains("`b`"), "{error}");
    assert!(is_unfinished(&steps.begin().unwrap_err()));
}

#[test]
fn a_slot_of_the_first_step_that_was_not_filled_is_missing() {
    let mut steps = Steps::<f32, Rank>::new(group(1, Duration::ZERO).remove(0), 1 << 20);
    steps.begin().unwrap();
    steps.slot("a", 2).unwrap();
    let error = block_on(steps.finish()).unwrap_err();
    assert!(error.reason().starts_with("the step ends without gradient `a`;"), "{error}");
    steps.begin().unwrap();
    put(&mut steps, "a", &[1.0; 2]);
    block_on(steps.finish()).unwrap();
}

#[test]
fn long_lists_of_missing_gradients_are_cut() {
    let mut steps = Steps::<f32, Rank>::new(group(1, Duration::ZERO).remove(0), 1 << 20);
    steps.begin().unwrap();
    for gradient in 0..1_000 {
        put(&mut steps, &format!("gradient {gradient}"), &[1.0]);
    }
    block_on(steps.finish()).unwrap();
    steps.begin().unwrap();
    let error = block_on(steps.finish()).unwrap_err().to_string();
    assert!(error.contains("and 995 more") && error.len() < 300, "{error}");
}

#[test]
fn ranks_with_other_gradients_in_the_first_step_all_learn_of_it_and_begin_anew() {
    type Change = fn(&mut Vec<(&'static str, usize)>);
    let cases: [(Change, &str, &str); 3] = [
        (
            |gradients| gradients.retain(|gradient| gradient.0 != "b"),
            "rank 1 did not give gradient `b`",
            "rank 1 did not give gradient `b`",
        ),
        (
            |gradients| gradients[2].1 = 7,
            "rank 1 gave gradient `c` with another",
            "rank 1 gave gradient `c` with another",
        ),
        (
            |gradients| gradients.push(("d", 1)),
            "rank 1 gave a gradient that rank 0 did not give",
            "rank 1, this rank, gave gradient `d`",
        ),
    ];
    for (change, elsewhere, there) in cases {
        let run = |rank: Rank, mut steps: Steps<f32, Rank>| {
            let right = vec![("a", 2), ("b", 3), ("c", 4)];
            let mut wrong = right.clone();
            if rank.index() == 1 {
                change(&mut wrong);
            }
            steps.begin().unwrap();
            for (name, length) in wrong {
                put(&mut steps, name, &vec![1.0; length]);
            }
            let error = block_on(steps.finish()).unwrap_err().to_string();
            steps.begin().unwrap();
            for (name, length) in right {
                put(&mut steps, name, &vec![1.0; length]);
            }
            block_on(steps.finish()).unwrap();
            error
        };
        let errors = ranks(3, Duration::ZERO, run, 1 << 20);
        for (rank, error) in errors.iter().enumerate() {
            assert!(error.contains(if rank == 1 { there } else { elsewhere }), "rank {rank}: {error}");
        }
    }
}

#[test]
fn a_step_that_started_nothing_may_be_dropped() {
    let (rank, mut steps) = laid();
    let before = rank.started();
    steps.begin().unwrap();
    put(&mut steps, "b", &[9.0; 3]);
    assert_eq!(rank.started(), before);
    steps.begin().unwrap();
    put(&mut steps, "b", &[4.0; 3]);
    put(&mut steps, "a", &[3.0; 2]);
    block_on(steps.finish()).unwrap();
    assert_eq!(steps.mean("b"), Some(&[4.0; 3][..]));
}

#[test]
fn a_step_that_started_an_operation_must_end() {
    let (_, mut steps) = laid();
    steps.begin().unwrap();
    put(&mut steps, "a", &[1.0; 2]);
    let error = steps.begin().unwrap_err();
    assert!(is_unfinished(&error), "{error}");
}

#[test]
fn a_step_whose_end_is_dropped_while_it_waits_did_not_end() {
    let (rank, mut steps) = laid();
    steps.begin().unwrap();
    rank.hold(true);
    put(&mut steps, "a", &[1.0; 2]);
    put(&mut steps, "b", &[1.0; 3]);
    {
        let mut finish = std::pin::pin!(steps.finish());
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        assert!(finish.as_mut().poll(&mut context).is_pending());
    }
    rank.hold(false);
    assert!(is_unfinished(&steps.begin().unwrap_err()));
    // No memory that is under way is shown.
    assert_eq!(steps.mean("a"), None);
}

#[test]
fn the_error_of_an_operation_is_the_error_of_the_step() {
    let (rank, mut steps) = laid();
    steps.begin().unwrap();
    rank.hold(true);
    rank.fail(rank.started() + 1);
    put(&mut steps, "a", &[1.0; 2]);
    put(&mut steps, "b", &[1.0; 3]);
    rank.hold(false);
    let error = block_on(steps.finish()).unwrap_err();
    assert_eq!(error.reason(), "this operation shall fail");
    assert!(is_unfinished(&steps.begin().unwrap_err()));
    assert_eq!(steps.mean("b"), None);
}

#[test]
fn a_bucket_that_could_not_start_fails_the_step_at_its_end_too() {
    let (rank, mut steps) = laid();
    steps.begin().unwrap();
    rank.fail(rank.started() + 1);
    put(&mut steps, "a", &[1.0; 2]);
    let (index, slot) = steps.slot("b", 3).unwrap();
    slot.fill(1.0);
    steps.ready(index).unwrap_err();
    // The caller goes on all the same.
    let error = block_on(steps.finish()).unwrap_err();
    assert!(is_unfinished(&error), "{error}");
    assert!(is_unfinished(&steps.begin().unwrap_err()));
}
