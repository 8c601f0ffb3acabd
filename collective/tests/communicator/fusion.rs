//! Fusion over communicators: each rank is a thread with a communicator of its own.

use std::future::IntoFuture as _;
use std::sync::{Mutex, mpsc};
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use tonic_rdma_collective::{CollectiveError, CollectiveErrorKind, Communicator, Fusion, Launch};

/// Connects `size` ranks, runs `each` on a thread for every rank, and returns the results in the order of the
/// ranks. All ranks stay until the last one is done.
fn ranks<R: Send>(size: usize, each: impl Fn(&Communicator) -> R + Sync) -> Vec<R> {
    ranks_that_may_leave(size, |communicator| {
        let result = each(&communicator);
        communicator.barrier().wait().unwrap();
        result
    })
}

fn ranks_that_may_leave<R: Send>(size: usize, each: impl Fn(Communicator) -> R + Sync) -> Vec<R> {
    let address = &support::free_address();
    std::thread::scope(|scope| {
        let each = &each;
        let threads: Vec<_> = (0..size)
            .map(|rank| {
                scope.spawn(move || {
                    let launch = Launch::new(rank, size, address.as_str());
                    let mut runtime = tokio::runtime::Builder::new_multi_thread();
                    let runtime = runtime.worker_threads(1).enable_all().build().unwrap();
                    let builder = Communicator::builder().launch(launch).deadline(Duration::from_secs(60));
                    each(runtime.block_on(builder.connect()).unwrap())
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Names and lengths, the last layer first.
const GRADIENTS: [(&str, usize); 6] =
    [("fc/bias", 10), ("fc/weight", 20_000), ("norm", 1), ("conv2", 70_001), ("unused", 0), ("conv1", 300)];

/// Whole numbers, so that sums are exact.
fn value(rank: usize, step: usize, gradient: usize, element: usize) -> f32 {
    ((rank + 1) * (step + gradient * 3 + element % 61)) as f32
}

fn mean(size: usize, step: usize, gradient: usize, element: usize) -> f32 {
    (0..size).map(|rank| value(rank, step, gradient, element)).sum::<f32>() / size as f32
}

fn check(fusion: &mut Fusion<f32>, rank: usize, size: usize, number: usize) {
    let mut step = fusion.step().unwrap();
    let mut order: Vec<usize> = (0..GRADIENTS.len()).collect();
    fastrand::Rng::with_seed((rank * 100 + number) as u64).shuffle(&mut order);
    for gradient in order {
        let (name, length) = GRADIENTS[gradient];
        let values = (0..length).map(|element| value(rank, number, gradient, element));
        if gradient % 2 == 0 {
            step.put(name, &values.collect::<Vec<_>>()).unwrap();
        } else {
            let mut slot = step.slot(name, length).unwrap();
            slot.iter_mut().zip(values).for_each(|(slot, value)| *slot = value);
            slot.ready().unwrap();
        }
    }
    let means = step.finish().wait().unwrap();
    for (gradient, &(name, length)) in GRADIENTS.iter().enumerate() {
        let expected: Vec<f32> = (0..length).map(|element| mean(size, number, gradient, element)).collect();
        assert!(means.get(name).unwrap() == expected, "{name} of step {number} on rank {rank}");
    }
    assert_eq!(means.iter().count(), GRADIENTS.len());
    assert_eq!(means.get("fc"), None);
}

#[test]
fn all_ranks_get_the_means_with_buckets_of_any_size() {
    for size in [1, 2, 3] {
        for bytes in [1, 100_000, 1 << 20] {
            ranks(size, |communicator| {
                let mut fusion = Fusion::builder(communicator).bucket_bytes(bytes).build().unwrap();
                for number in 0..5 {
                    check(&mut fusion, communicator.rank(), size, number);
                }
                assert_eq!(fusion.bucket_bytes(), bytes);
                // The agreement of the first step is three operations; each bucket is one.
                assert_eq!(communicator.statistics().operations, 3 + fusion.overlap().buckets);
                // No copy beyond those of `put`.
                assert_eq!(communicator.statistics().copied_bytes, 0);
            });
        }
    }
}

#[test]
fn a_step_is_awaited_on_a_runtime() {
    ranks(2, |communicator| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let mut fusion = Fusion::<f64>::builder(communicator).build().unwrap();
            for number in 0..3 {
                let mut step = fusion.step().unwrap();
                step.put("weight", &[communicator.rank() as f64, f64::from(number)]).unwrap();
                let means = step.finish().await.unwrap();
                assert_eq!(means.get("weight"), Some(&[0.5, f64::from(number)][..]));
                assert!(means.overlap().waited <= means.overlap().step);
            }
        });
    });
}

#[test]
fn ranks_with_other_gradients_all_learn_of_it_and_begin_anew() {
    type Change = fn(&mut Vec<(&'static str, usize)>);
    let cases: [(Change, &str, &str); 3] = [
        (
            |gradients| gradients.retain(|gradient| gradient.0 != "b"),
            "rank 1 did not give gradient `b`",
            "rank 1 did not give gradient `b`",
        ),
        (
            |gradients| gradients[2].1 = 7,
            "rank 1 gave gradient `c` with another length",
            "rank 1 gave gradient `c` with another length",
        ),
        (
            |gradients| gradients.push(("d", 1)),
            "rank 1 gave a gradient that rank 0 did not give",
            "rank 1, this rank, gave gradient `d`",
        ),
    ];
    ranks(3, |communicator| {
        let right = vec![("a", 2), ("b", 3), ("c", 4)];
        for (change, elsewhere, there) in cases {
            let mut fusion = Fusion::<f32>::new(communicator).unwrap();
            let (mut given, mut expected) = (right.clone(), elsewhere);
            if communicator.rank() == 1 {
                change(&mut given);
                expected = there;
            }
            let error = step_with(&mut fusion, &given).unwrap_err();
            assert_eq!((error.kind(), error.rank()), (CollectiveErrorKind::Mismatch, Some(1)), "{error}");
            assert!(error.to_string().starts_with(expected), "{error}");
            step_with(&mut fusion, &right).unwrap();
        }
    });
}

#[test]
fn a_rank_that_leaves_ends_the_step_of_the_others() {
    let ends = ranks_that_may_leave(3, |communicator| {
        let rank = communicator.rank();
        let mut fusion = Fusion::builder(&communicator).bucket_bytes(1).build().unwrap();
        check(&mut fusion, rank, 3, 0);
        if rank == 1 {
            return None;
        }
        let mut step = fusion.step().unwrap();
        // A bucket may already fail to start.
        let put = GRADIENTS.iter().try_for_each(|&(name, length)| step.put(name, &vec![1.0; length]));
        let error = put.err().unwrap_or_else(|| step.finish().wait().unwrap_err());
        assert_eq!(fusion.step().unwrap_err().kind(), CollectiveErrorKind::Revoked);
        Some(error)
    });
    let [Some(one), None, Some(two)] = &ends[..] else { panic!("{ends:?}") };
    for error in [one, two] {
        // The first rank that leaves is rank 1; the other survivor may leave before this rank hears of that.
        assert!(error.rank().is_some(), "{error}");
    }
    assert!([one, two].iter().any(|error| error.to_string().contains("rank 1")), "{one}; {two}");
}

/// Carries out a step with gradients of ones of these names and lengths.
fn step_with(fusion: &mut Fusion<f32>, gradients: &[(&str, usize)]) -> Result<(), CollectiveError> {
    let mut step = fusion.step()?;
    gradients.iter().try_for_each(|&(name, length)| step.put(name, &vec![1.0; length]))?;
    step.finish().wait().map(drop)
}

/// Gives `each` a fusion of one rank, after a step with gradients `a` (2 elements) and `b` (3), in buckets of
/// their own.
fn with_two_gradients(each: impl Fn(&Communicator, Fusion<f32>) + Sync) {
    ranks(1, |communicator| {
        let mut fusion = Fusion::builder(communicator).bucket_bytes(1).build().unwrap();
        step_with(&mut fusion, &[("a", 2), ("b", 3)]).unwrap();
        each(communicator, fusion);
    });
}

fn is_unfinished(error: &CollectiveError) -> bool {
    error.kind() == CollectiveErrorKind::Revoked && error.reason().contains("the ranks are out of step")
}

#[test]
fn rank_0_sets_the_size_of_all_ranks() {
    ranks(2, |communicator| {
        let mut fusion =
            Fusion::builder(communicator).bucket_bytes(4_096 + communicator.rank()).build().unwrap();
        check(&mut fusion, communicator.rank(), 2, 0);
        assert_eq!(fusion.bucket_bytes(), 4_096);
    });
}

#[test]
fn a_bucket_starts_when_its_last_gradient_is_there_and_those_before_it_have_started() {
    ranks(1, |communicator| {
        let operations = || communicator.statistics().operations;
        // Buckets of 8 bytes: {a, b}, {c, d}, {e}.
        let mut fusion = Fusion::<f32>::builder(communicator).bucket_bytes(8).build().unwrap();
        let mut step = fusion.step().unwrap();
        for name in ["a", "b", "c", "d", "e"] {
            step.put(name, &[1.0]).unwrap();
        }
        // Nothing starts in the first step before all ranks know the order.
        assert_eq!(operations(), 0);
        step.finish().wait().unwrap();
        let before = operations();
        let mut step = fusion.step().unwrap();
        for (name, started) in [("e", 0), ("a", 0), ("c", 0), ("b", 1), ("d", 3)] {
            step.put(name, &[2.0]).unwrap();
            assert_eq!(operations() - before, started, "{name}");
        }
        assert_eq!(step.finish().wait().unwrap().get("e"), Some(&[2.0][..]));
    });
}

#[test]
fn a_gradient_is_computed_where_it_is_reduced() {
    ranks(1, |communicator| {
        let mut fusion = Fusion::<f32>::new(communicator).unwrap();
        for round in 0..2 {
            let mut step = fusion.step().unwrap();
            step.put("a", &[1.0; 10]).unwrap();
            let mut slot = step.slot("b", 100).unwrap();
            slot.fill(5.0);
            let memory = slot.as_ptr();
            slot.ready().unwrap();
            let means = step.finish().wait().unwrap();
            let mean = means.get("b").unwrap();
            assert_eq!(mean, [5.0; 100]);
            // In the first step there are no buckets yet.
            assert!(round == 0 || mean.as_ptr() == memory);
        }
    });
}

#[test]
fn operations_that_end_before_finish_are_timed_before_it() {
    with_two_gradients(|_, mut fusion| {
        assert_eq!(fusion.overlap().hidden(), Duration::ZERO);
        let mut step = fusion.step().unwrap();
        let begun = Instant::now();
        step.put("a", &[1.0; 2]).unwrap();
        step.put("b", &[1.0; 3]).unwrap();
        let computed = begun.elapsed();
        // The caller computes on.
        std::thread::sleep(Duration::from_millis(5));
        let overlap = step.finish().wait().unwrap().overlap();
        assert_eq!((overlap.buckets, overlap.bytes), (2, 20));
        assert!(overlap.step >= overlap.waited);
        assert!(overlap.communication <= computed, "{overlap} after {computed:?}");
        assert_eq!(fusion.overlap().buckets, 4);
    });
}

#[test]
fn a_gradient_that_does_not_fit_is_named_and_the_step_goes_on() {
    with_two_gradients(|_, mut fusion| {
        let mut step = fusion.step().unwrap();
        let refused =
            |error: CollectiveError, start: &str| assert!(error.reason().starts_with(start), "{error}");
        refused(step.put("c", &[1.0; 2]).unwrap_err(), "gradient `c` was not part of the first step");
        refused(step.put("b", &[1.0; 4]).unwrap_err(), "gradient `b` has 4 elements, and had 3 before");
        step.put("a", &[1.0; 2]).unwrap();
        refused(step.put("a", &[1.0; 2]).unwrap_err(), "gradient `a` was given twice");
        step.put("b", &[2.0; 3]).unwrap();
        assert_eq!(step.finish().wait().unwrap().get("b"), Some(&[2.0; 3][..]));
    });
    ranks(1, |communicator| {
        let mut fusion = Fusion::<f32>::new(communicator).unwrap();
        let mut step = fusion.step().unwrap();
        step.put("a", &[1.0; 2]).unwrap();
        assert!(step.put("a", &[1.0; 2]).unwrap_err().reason().starts_with("gradient `a` was given twice"));
    });
}

#[test]
fn missing_gradients_are_named() {
    with_two_gradients(|communicator, mut fusion| {
        let error = step_with(&mut fusion, &[("b", 3)]).unwrap_err();
        assert_eq!(error.kind(), CollectiveErrorKind::InvalidArgument);
        assert!(error.to_string().starts_with("the step ends without gradient `a`;"), "{error}");
        // No operation had started, because `a` is first. So the next step may begin.
        let error = step_with(&mut fusion, &[("a", 2)]).unwrap_err();
        assert!(error.to_string().contains("`b`"), "{error}");
        assert!(is_unfinished(&fusion.step().unwrap_err()));
        // A slot of the first step that was not filled is missing, too.
        let mut fusion = Fusion::<f32>::new(communicator).unwrap();
        let mut step = fusion.step().unwrap();
        step.slot("a", 2).unwrap();
        let error = step.finish().wait().unwrap_err();
        assert!(error.reason().starts_with("the step ends without gradient `a`;"), "{error}");
        step_with(&mut fusion, &[("a", 2)]).unwrap();
    });
}

#[test]
fn long_lists_of_missing_gradients_are_cut() {
    ranks(1, |communicator| {
        let mut fusion = Fusion::<f32>::new(communicator).unwrap();
        let names: Vec<String> = (0..1_000).map(|gradient| format!("gradient {gradient}")).collect();
        let gradients: Vec<_> = names.iter().map(|name| (name.as_str(), 1)).collect();
        step_with(&mut fusion, &gradients).unwrap();
        let error = step_with(&mut fusion, &[]).unwrap_err().to_string();
        assert!(error.contains("and 995 more") && error.len() < 300, "{error}");
    });
}

#[test]
fn a_step_that_started_nothing_may_be_dropped_and_another_must_end() {
    with_two_gradients(|communicator, mut fusion| {
        let before = communicator.statistics().operations;
        fusion.step().unwrap().put("b", &[9.0; 3]).unwrap();
        assert_eq!(communicator.statistics().operations, before);
        let mut step = fusion.step().unwrap();
        step.put("b", &[4.0; 3]).unwrap();
        step.put("a", &[3.0; 2]).unwrap();
        assert_eq!(step.finish().wait().unwrap().get("b"), Some(&[4.0; 3][..]));
        fusion.step().unwrap().put("a", &[1.0; 2]).unwrap();
        assert!(is_unfinished(&fusion.step().unwrap_err()));
    });
}

#[test]
fn a_step_whose_end_is_dropped_while_it_waits_did_not_end() {
    let (sender, receiver) = mpsc::channel::<()>();
    let (sender, receiver) = (Mutex::new(Some(sender)), Mutex::new(receiver));
    ranks(2, |communicator| {
        let mut fusion = Fusion::<f32>::builder(communicator).bucket_bytes(1).build().unwrap();
        step_with(&mut fusion, &[("a", 2), ("b", 3)]).unwrap();
        if communicator.rank() == 1 {
            // Also if rank 0 has failed.
            let _ = receiver.lock().unwrap().recv();
            return step_with(&mut fusion, &[("a", 2), ("b", 3)]).unwrap();
        }
        let _dropped = sender.lock().unwrap().take();
        let mut step = fusion.step().unwrap();
        step.put("a", &[1.0; 2]).unwrap();
        step.put("b", &[1.0; 3]).unwrap();
        let mut finish = step.finish().into_future();
        assert!(finish.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        drop(finish);
        assert!(is_unfinished(&fusion.step().unwrap_err()));
    });
}

#[test]
fn the_error_of_an_operation_is_the_error_of_the_step() {
    let (sender, receiver) = mpsc::channel::<()>();
    let (sender, receiver) = (Mutex::new(Some(sender)), Mutex::new(receiver));
    ranks_that_may_leave(2, |communicator| {
        let mut fusion = Fusion::<f32>::builder(&communicator).bucket_bytes(1).build().unwrap();
        step_with(&mut fusion, &[("a", 2), ("b", 3)]).unwrap();
        if communicator.rank() == 1 {
            // Leaves when both operations of rank 0 wait for it.
            let _ = receiver.lock().unwrap().recv();
            return;
        }
        let started = sender.lock().unwrap().take();
        let mut step = fusion.step().unwrap();
        step.put("a", &[1.0; 2]).unwrap();
        step.put("b", &[1.0; 3]).unwrap();
        drop(started);
        let error = step.finish().wait().unwrap_err();
        assert_eq!(error.rank(), Some(1), "{error}");
        assert!(!is_unfinished(&error), "{error}");
    });
}

#[test]
fn a_bucket_that_could_not_start_fails_the_step_at_its_end_too() {
    ranks_that_may_leave(2, |communicator| {
        let mut fusion = Fusion::<f32>::builder(&communicator).bucket_bytes(1).build().unwrap();
        step_with(&mut fusion, &[("a", 2), ("b", 3)]).unwrap();
        if communicator.rank() == 1 {
            return;
        }
        communicator.barrier().wait().unwrap_err();
        let mut step = fusion.step().unwrap();
        step.put("a", &[1.0; 2]).unwrap_err();
        // The caller goes on all the same.
        step.put("b", &[1.0; 3]).unwrap_err();
        assert!(is_unfinished(&step.finish().wait().unwrap_err()));
        assert!(is_unfinished(&fusion.step().unwrap_err()));
    });
}

#[test]
fn integers_have_no_mean() {
    ranks(1, |communicator| {
        let error = Fusion::<i32>::builder(communicator).build().unwrap_err();
        assert_eq!(error.kind(), CollectiveErrorKind::InvalidArgument, "{error}");
        assert!(error.to_string().contains("int32"), "{error}");
    });
}
