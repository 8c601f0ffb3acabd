//! Fusion over communicators: each rank is a thread with a communicator of its own.
#![allow(clippy::unwrap_used, reason = "a test that fails should say so on the spot")]

use std::time::Duration;

use tonic_rdma_collective::{CollectiveErrorKind, Communicator, Fusion, Launch};

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
fn ranks_with_other_gradients_all_learn_of_it() {
    let errors = ranks(3, |communicator| {
        let mut fusion = Fusion::<f32>::builder(communicator).build().unwrap();
        let mut step = fusion.step().unwrap();
        step.put("weight", &vec![1.0; if communicator.rank() == 2 { 5 } else { 4 }]).unwrap();
        let error = step.finish().wait().unwrap_err();
        assert_eq!((error.kind(), error.rank()), (CollectiveErrorKind::Mismatch, Some(2)), "{error}");
        error.to_string()
    });
    for error in errors {
        assert!(error.starts_with("rank 2 gave gradient `weight` with another length"), "{error}");
    }
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

#[test]
fn integers_have_no_mean() {
    ranks(1, |communicator| {
        let error = Fusion::<i32>::builder(communicator).build().unwrap_err();
        assert_eq!(error.kind(), CollectiveErrorKind::InvalidArgument, "{error}");
        assert!(error.to_string().contains("int32"), "{error}");
    });
}
