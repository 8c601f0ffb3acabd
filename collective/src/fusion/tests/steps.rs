use std::time::Duration;

use super::simulation::{Rank, group, ranks};
use crate::fusion::block_on;
use crate::fusion::steps::Steps;

const NO_DELAY: Duration = Duration::ZERO;

/// The gradients of a small model: biases and weights of many lengths, also of none.
const LENGTHS: [usize; 9] = [1, 300, 64, 0, 5_000, 2, 700, 1_024, 33];

fn name(gradient: usize) -> String {
    format!("layer{gradient}/weight")
}

/// Whole numbers that differ between ranks, steps, gradients and elements. Sums of some ranks are exact.
fn value(rank: usize, step: usize, gradient: usize, element: usize) -> f32 {
    ((rank + 1) * (step * 31 + gradient * 7 + element % 97)) as f32
}

fn values(rank: usize, step: usize, gradient: usize, length: usize) -> Vec<f32> {
    (0..length).map(|element| value(rank, step, gradient, element)).collect()
}

pub(super) fn put(steps: &mut Steps<f32, Rank>, name: &str, values: &[f32]) {
    let (index, slot) = steps.slot(name, values.len()).unwrap();
    slot.copy_from_slice(values);
    steps.ready(index).unwrap();
}

/// Carries out a step with the gradients in a random order, and checks the means.
fn step(rank: usize, size: usize, number: usize, steps: &mut Steps<f32, Rank>, lengths: &[usize]) {
    let mut order: Vec<usize> = (0..lengths.len()).collect();
    fastrand::Rng::with_seed((rank * 1_000 + number) as u64).shuffle(&mut order);
    steps.begin().unwrap();
    for gradient in order {
        put(steps, &name(gradient), &values(rank, number, gradient, lengths[gradient]));
    }
    block_on(steps.finish()).unwrap();
    for (gradient, &length) in lengths.iter().enumerate() {
        let expected: Vec<f32> = (0..length)
            .map(|element| {
                (0..size).map(|rank| value(rank, number, gradient, element)).sum::<f32>() / size as f32
            })
            .collect();
        assert_eq!(steps.mean(&name(gradient)).unwrap(), expected, "{} of step {number}", name(gradient));
    }
    assert_eq!(steps.means().count(), lengths.len());
}

#[test]
fn ranks_with_gradients_in_other_orders_get_the_same_means() {
    for size in [1, 2, 3, 5] {
        for pin in [1, 4_000, 1 << 30] {
            let delay = Duration::from_micros(300);
            let run = |rank: Rank, mut steps: Steps<f32, Rank>| {
                for number in 0..6 {
                    step(rank.index(), size, number, &mut steps, &LENGTHS);
                }
                (rank.started(), steps.total.buckets, steps.bucket_bytes)
            };
            let ends = ranks(size, delay, run, pin);
            assert!(ends.iter().all(|end| *end == ends[0]), "{ends:?}");
            // The agreement of the first step is two operations; each bucket is one.
            assert_eq!(ends[0].0, 2 + ends[0].1);
            assert_eq!(ends[0].2, pin);
        }
    }
}

#[test]
fn rank_0_sets_the_size_of_all_ranks() {
    let group = group(2, NO_DELAY);
    let sizes: Vec<usize> = std::thread::scope(|scope| {
        let threads: Vec<_> = group
            .into_iter()
            .map(|rank| {
                scope.spawn(move || {
                    let mut steps = Steps::new(rank.clone(), 4_096 + rank.index());
                    step(rank.index(), 2, 0, &mut steps, &LENGTHS);
                    steps.bucket_bytes
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(sizes, [4_096, 4_096]);
}

#[test]
fn a_bucket_starts_when_its_last_gradient_is_there_and_those_before_it_have_started() {
    let rank = group(1, NO_DELAY).remove(0);
    // Buckets of 8 bytes: {a, b}, {c, d}, {e}.
    let mut steps = Steps::new(rank.clone(), 8);
    steps.begin().unwrap();
    for name in ["a", "b", "c", "d", "e"] {
        put(&mut steps, name, &[1.0]);
    }
    // Nothing starts in the first step before all ranks know the order.
    assert_eq!(rank.started(), 0);
    block_on(steps.finish()).unwrap();
    let before = rank.started();
    let started = |steps: &mut Steps<f32, Rank>, name: &str| {
        put(steps, name, &[2.0]);
        rank.started() - before
    };
    steps.begin().unwrap();
    assert_eq!(started(&mut steps, "e"), 0);
    assert_eq!(started(&mut steps, "a"), 0);
    assert_eq!(started(&mut steps, "c"), 0);
    assert_eq!(started(&mut steps, "b"), 1);
    assert_eq!(started(&mut steps, "d"), 3);
    block_on(steps.finish()).unwrap();
    assert_eq!(steps.mean("e"), Some(&[2.0][..]));
}

#[test]
fn a_gradient_is_computed_where_it_is_reduced() {
    let rank = group(1, NO_DELAY).remove(0);
    let mut steps = Steps::new(rank, 1 << 20);
    for round in 0..2 {
        steps.begin().unwrap();
        put(&mut steps, "a", &[1.0; 10]);
        let (index, slot) = steps.slot("b", 100).unwrap();
        slot.fill(5.0);
        let memory = slot.as_ptr();
        steps.ready(index).unwrap();
        block_on(steps.finish()).unwrap();
        let mean = steps.mean("b").unwrap();
        assert_eq!(mean, [5.0; 100]);
        // In the first step there are no buckets yet.
        assert!(round == 0 || mean.as_ptr() == memory);
    }
}

#[test]
fn operations_that_end_before_finish_are_timed_before_it() {
    let rank = group(1, Duration::from_millis(5)).remove(0);
    let mut steps = Steps::new(rank.clone(), 4);
    for round in 0..2 {
        steps.begin().unwrap();
        let begun = std::time::Instant::now();
        put(&mut steps, "a", &[1.0]);
        put(&mut steps, "b", &[1.0]);
        while !rank.idle() {
            std::thread::yield_now();
        }
        let computed = begun.elapsed();
        // The caller computes on.
        std::thread::sleep(Duration::from_millis(5));
        block_on(steps.finish()).unwrap();
        let overlap = steps.latest;
        assert_eq!((overlap.buckets, overlap.bytes), (2, 8));
        assert!(overlap.step >= overlap.waited);
        if round == 0 {
            assert_eq!(overlap.hidden(), Duration::ZERO);
        } else {
            assert!(overlap.communication <= computed, "{overlap} after {computed:?}");
        }
    }
    assert_eq!(steps.total.buckets, 4);
}
