//! The operations of communicators.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Wake, Waker};
use std::time::{Duration, Instant};

use support::free_address;
use tonic_rdma::Config;
use tonic_rdma_collective::{
    Algorithm, CollectiveError, CollectiveErrorKind, Communicator, Launch, Number, Owned, PlanChoice,
    Reduction,
};

/// Long enough for a busy machine; only a hang takes so long.
const LIMIT: Duration = Duration::from_secs(120);

/// Runs `rank` on a thread of its own for each rank, and returns the results in order.
fn group<T: Send>(
    ranks: usize,
    plans: PlanChoice,
    run: impl Fn(Communicator, &tokio::runtime::Runtime) -> T + Sync,
) -> Vec<T> {
    let address = free_address();
    let (address, plans, run) = (&address, &plans, &run);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..ranks)
            .map(|rank| {
                scope.spawn(move || {
                    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                    // The variables RDMA_* choose the device.
                    let builder = Communicator::builder()
                        .config(Config::from_env().unwrap())
                        .launch(Launch::new(rank, ranks, address.as_str()))
                        .deadline(LIMIT)
                        .plans(plans.clone());
                    let communicator = runtime.block_on(builder.connect()).unwrap();
                    run(communicator, &runtime)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn fixed(algorithm: Algorithm, chunk_bytes: usize) -> PlanChoice {
    PlanChoice::Fixed { algorithm, chunk_bytes }
}

/// Returns the value of element `index` of a rank: a small whole number, so that sums are exact.
fn value(rank: usize, index: usize) -> i8 {
    ((index * 7 + rank * 3) % 11) as i8
}

fn elements<T: Number + From<i8>>(rank: usize, count: usize) -> Vec<T> {
    (0..count).map(|index| T::from(value(rank, index))).collect()
}

fn sums<T: Number + From<i8>>(ranks: usize, count: usize) -> Vec<T> {
    (0..count).map(|index| T::from((0..ranks).map(|rank| value(rank, index)).sum::<i8>())).collect()
}

fn all_forms<T: Number + From<i8> + PartialEq + std::fmt::Debug>(communicator: &Communicator, count: usize) {
    let (rank, ranks) = (communicator.rank(), communicator.size());
    let own = elements::<T>(rank, count);
    let sum = sums::<T>(ranks, count);

    let mut buffer = communicator.allocate::<T>(count).unwrap();
    buffer.copy_from_slice(&own);
    let buffer = communicator.all_reduce(buffer, Reduction::Sum).wait().unwrap();
    assert_eq!(buffer[..], sum[..], "{count} elements in place");

    let (mut input, output) = (communicator.allocate::<T>(count).unwrap(), buffer);
    input.copy_from_slice(&own);
    let (input, output) = communicator.all_reduce((input, output), Reduction::Sum).wait().unwrap();
    assert_eq!((&input[..], &output[..]), (&own[..], &sum[..]), "{count} elements out of place");

    let mut slice = own.clone();
    communicator.all_reduce(&mut slice[..], Reduction::Sum).wait().unwrap();
    assert_eq!(slice, sum, "{count} elements of a slice");

    let Owned(vector) = communicator.all_reduce(Owned(own.clone()), Reduction::Sum).wait().unwrap();
    assert_eq!(vector, sum, "{count} elements of a vector");
    let pair = (Owned(own.clone().into_boxed_slice()), Owned(vec![T::from(0); count]));
    let (Owned(input), Owned(output)) = communicator.all_reduce(pair, Reduction::Sum).start().wait().unwrap();
    assert_eq!((&input[..], output), (&own[..], sum.clone()), "{count} elements of two memories");

    let mut output = own.clone();
    communicator.all_reduce((&own[..], &mut output[..]), Reduction::Max).wait().unwrap();
    let largest = |index| (0..ranks).map(|rank| value(rank, index)).max().unwrap();
    assert!(output.iter().enumerate().all(|(index, found)| *found == T::from(largest(index))));

    let part = communicator.part(count, rank);
    let mut output = own[..part.len()].to_vec();
    communicator.reduce_scatter((&own[..], &mut output[..]), Reduction::Sum).wait().unwrap();
    assert_eq!(output, sum[part.clone()], "{count} elements scattered");
    let mut buffer = communicator.allocate::<T>(count).unwrap();
    buffer.copy_from_slice(&own);
    let buffer = communicator.reduce_scatter(buffer, Reduction::Sum).wait().unwrap();
    assert_eq!(buffer[part.clone()], sum[part.clone()]);

    let mut whole = vec![T::from(0); count];
    communicator.all_gather((&sum[part.clone()], &mut whole[..])).wait().unwrap();
    assert_eq!(whole, sum, "{count} elements gathered");
    let mut whole = communicator.allocate::<T>(count).unwrap();
    whole[part.clone()].copy_from_slice(&sum[part]);
    assert_eq!(communicator.all_gather(whole).wait().unwrap()[..], sum[..]);

    let root = ranks - 1;
    let mut slice = own.clone();
    communicator.broadcast(&mut slice[..], root).wait().unwrap();
    assert_eq!(slice, elements::<T>(root, count), "{count} elements broadcast");
    communicator.barrier().wait().unwrap();
}

/// A barrier that fails after [`LIMIT`], so that a rank that panicked does not keep the others waiting for
/// ever.
struct LimitedBarrier {
    ranks: usize,
    arrived: std::sync::Mutex<usize>,
    all: std::sync::Condvar,
}

impl LimitedBarrier {
    fn new(ranks: usize) -> Self {
        Self { ranks, arrived: std::sync::Mutex::new(0), all: std::sync::Condvar::new() }
    }

    /// Waits until all ranks have called this.
    fn wait(&self) {
        let mut arrived = self.arrived.lock().unwrap();
        *arrived += 1;
        self.all.notify_all();
        let waited = self.all.wait_timeout_while(arrived, LIMIT, |arrived| *arrived < self.ranks).unwrap();
        assert!(!waited.1.timed_out(), "not all ranks came");
    }
}

#[test]
fn all_operations_give_the_right_results() {
    let plans = [
        PlanChoice::Default,
        fixed(Algorithm::OneShot, 64 << 10),
        fixed(Algorithm::HalvingDoubling, 40_000),
        fixed(Algorithm::Ring, 20_000),
        fixed(Algorithm::Hierarchical, 30_000),
        fixed(Algorithm::Naive, 30_000),
    ];
    for ranks in 1..=5 {
        for plans in &plans {
            group(ranks, plans.clone(), |communicator, _| {
                for count in [0, 1, 2, 1000, 70_001] {
                    all_forms::<f32>(&communicator, count);
                    all_forms::<i64>(&communicator, count);
                }
            });
        }
    }
}

fn unsigned<T: Number + From<u8> + PartialEq + std::fmt::Debug>(communicator: &Communicator, count: usize) {
    let (rank, ranks) = (communicator.rank(), communicator.size());
    let own = |rank: usize, index: usize| ((index * 5 + rank * 3) % 70) as u8;
    let mut elements: Vec<T> = (0..count).map(|index| own(rank, index).into()).collect();
    communicator.all_reduce(&mut elements[..], Reduction::Sum).wait().unwrap();
    let sum = |index: usize| T::from((0..ranks).map(|rank| own(rank, index)).sum::<u8>());
    assert!(elements.iter().enumerate().all(|(index, found)| *found == sum(index)), "{count} elements");
    let mut elements: Vec<T> = (0..count).map(|index| own(rank, index).into()).collect();
    communicator.all_reduce(&mut elements[..], Reduction::Max).wait().unwrap();
    let largest = |index: usize| T::from((0..ranks).map(|rank| own(rank, index)).max().unwrap());
    assert!(elements.iter().enumerate().all(|(index, found)| *found == largest(index)), "{count} elements");
}

#[test]
fn all_types_are_reduced() {
    group(3, PlanChoice::Default, |communicator, _| {
        for count in [5, 9000] {
            all_forms::<f64>(&communicator, count);
            all_forms::<half::f16>(&communicator, count);
            all_forms::<half::bf16>(&communicator, count);
            all_forms::<i8>(&communicator, count);
            all_forms::<i16>(&communicator, count);
            all_forms::<i32>(&communicator, count);
            unsigned::<u8>(&communicator, count);
            unsigned::<u16>(&communicator, count);
            unsigned::<u32>(&communicator, count);
            unsigned::<u64>(&communicator, count);
        }
        let mut bytes = vec![200_u8, 3];
        communicator.all_reduce(&mut bytes[..], Reduction::Min).wait().unwrap();
        assert_eq!(bytes, [200, 3]);
        let error = communicator.all_reduce(&mut bytes[..], Reduction::Mean).wait().unwrap_err();
        assert!(error.to_string().contains("mean"), "{error}");
        let mut mean = vec![communicator.rank() as f32; 10];
        communicator.all_reduce(&mut mean[..], Reduction::Mean).wait().unwrap();
        assert_eq!(mean, [1.0; 10]);
    });
}

#[test]
fn operations_under_way_are_awaited_in_any_order() {
    group(3, PlanChoice::Default, |communicator, runtime| {
        runtime.block_on(async {
            let mut under_way = Vec::new();
            for count in [10, 50_000, 3, 0, 200_000, 1000] {
                let mut buffer = communicator.allocate::<f64>(count).unwrap();
                buffer.copy_from_slice(&elements::<f64>(communicator.rank(), count));
                under_way.push(communicator.all_reduce(buffer, Reduction::Sum).start());
            }
            for operation in under_way.into_iter().rev() {
                let buffer = operation.await.unwrap();
                assert_eq!(buffer[..], sums::<f64>(3, buffer.len())[..]);
            }
            let mut slice = elements::<f32>(communicator.rank(), 100_000);
            communicator.all_reduce(&mut slice[..], Reduction::Sum).await.unwrap();
            assert_eq!(slice, sums::<f32>(3, 100_000));
        });
    });
}

#[test]
fn messages_between_two_ranks_arrive_in_order() {
    group(3, PlanChoice::Default, |communicator, _| {
        let (rank, next, last) =
            (communicator.rank(), (communicator.rank() + 1) % 3, (communicator.rank() + 2) % 3);
        for count in [1, 40_000] {
            let mut buffer = communicator.allocate::<i32>(count).unwrap();
            buffer.fill(rank as i32);
            let sent = communicator.send(next, buffer).start();
            let received =
                communicator.recv(last, communicator.allocate::<i32>(count).unwrap()).wait().unwrap();
            assert!(received.iter().all(|element| *element == last as i32));
            sent.wait().unwrap();
        }
        let elements: Vec<u16> = (0..40_000).map(|index| index + rank as u16).collect();
        for count in [0, 5, 40_000] {
            let sender = communicator.clone();
            let sent = &elements[..count];
            let mut received = vec![0_u16; count];
            std::thread::scope(|scope| {
                scope.spawn(move || sender.send(next, sent).wait().unwrap());
                communicator.recv(last, &mut received[..]).wait().unwrap();
            });
            assert!((0..).zip(&received).all(|(index, element)| *element == index + last as u16), "{count}");
        }
        let error = communicator.all_reduce(&elements[..], Reduction::Sum).wait().unwrap_err();
        assert!(error.to_string().contains("do not fit"), "{error}");
        let error = communicator.send(rank, communicator.allocate::<i32>(1).unwrap()).wait().unwrap_err();
        assert!(error.to_string().contains("itself"), "{error}");
    });
}

#[test]
fn buffers_are_not_copied_and_slices_are_copied_once() {
    let count = 300_000;
    let bytes = (count * size_of::<f32>()) as u64;
    group(3, fixed(Algorithm::Ring, 64 << 10), |communicator, _| {
        let buffer = communicator.allocate::<f32>(count).unwrap();
        communicator.all_reduce(buffer, Reduction::Sum).wait().unwrap();
        assert_eq!(communicator.statistics().copied_bytes, 0);
        let mut slice = vec![1.0_f32; count];
        communicator.all_reduce(&mut slice[..], Reduction::Sum).wait().unwrap();
        let copied = communicator.statistics().copied_bytes;
        assert!(copied <= bytes + bytes / 100, "{copied} of {bytes} bytes");
    });
}

#[test]
fn calls_that_differ_are_named_on_all_ranks() {
    let all = LimitedBarrier::new(3);
    let errors = group(3, PlanChoice::Default, |communicator, _| {
        let count = if communicator.rank() == 1 { 20 } else { 10 };
        let mut elements = vec![1.0_f32; count];
        let first = communicator.all_reduce(&mut elements[..], Reduction::Sum).wait();
        let second = communicator.barrier().wait();
        let error: CollectiveError = match (first, second) {
            (Err(failed), _) => failed.into(),
            (Ok(_), Err(failed)) => failed.into(),
            (Ok(_), Ok(())) => panic!("rank {} got a result", communicator.rank()),
        };
        all.wait();
        error.to_string()
    });
    assert!(errors.iter().any(|error| error.contains("20 elements")), "{errors:?}");
}

#[test]
fn survivors_go_on_after_a_rank_has_left() {
    let sums = group(4, PlanChoice::Default, |communicator, runtime| {
        communicator.barrier().wait().unwrap();
        if communicator.rank() == 2 {
            return 0.0;
        }
        let mut elements = vec![1.0_f32; 50_000];
        let failed = communicator.all_reduce(&mut elements[..], Reduction::Sum).wait().unwrap_err();
        assert!(failed.to_string().contains("rank 2"), "{failed}");
        let smaller = runtime.block_on(communicator.shrink()).unwrap();
        assert_eq!(smaller.size(), 3);
        let mut elements = vec![1.0_f32; 50_000];
        smaller.all_reduce(&mut elements[..], Reduction::Sum).wait().unwrap();
        elements[49_999]
    });
    assert_eq!(sums, [3.0, 3.0, 0.0, 3.0]);
}

#[test]
fn a_rank_that_makes_no_call_is_named_at_the_deadline() {
    let (say_done, done) = std::sync::mpsc::channel::<()>();
    let done = std::sync::Mutex::new(done);
    group(2, PlanChoice::Default, |communicator, _| {
        if communicator.rank() == 1 {
            // It lives until the other rank has got its error.
            let _ = done.lock().unwrap().recv_timeout(LIMIT);
            return;
        }
        let limit = Duration::from_millis(300);
        // An operation that has started takes a deadline too.
        let mut operation = communicator.barrier().start().deadline(limit);
        assert!(operation.wait_timeout(Duration::ZERO).is_none());
        let failed = operation.wait().unwrap_err();
        let error = failed.error();
        assert_eq!((error.kind(), error.rank()), (CollectiveErrorKind::Deadline, Some(1)), "{error}");
        say_done.send(()).unwrap();
    });
}

#[test]
fn what_a_rank_sent_before_it_left_serves_operations_that_start_later() {
    let left = LimitedBarrier::new(2);
    let sums = group(2, PlanChoice::Default, |communicator, _| {
        let mut elements = [0.0_f32; 3];
        if communicator.rank() == 1 {
            elements.fill(5.0);
            communicator.broadcast(&mut elements[..], 1).wait().unwrap();
            drop(communicator);
            left.wait();
        } else {
            left.wait();
            // This rank learns of the loss meanwhile.
            std::thread::sleep(Duration::from_millis(300));
            communicator.broadcast(&mut elements[..], 1).wait().unwrap();
            let failed = communicator.barrier().wait().unwrap_err();
            assert_eq!(failed.error().lost_rank(), Some(1), "{failed}");
        }
        elements
    });
    assert_eq!(sums, [[5.0; 3]; 2]);
}

#[test]
fn errors_of_operations_on_slices_fit_any_error_type() {
    fn reduce(communicator: &Communicator, elements: &mut [f32]) -> Result<(), Box<dyn std::error::Error>> {
        communicator.all_reduce(elements, Reduction::Sum).wait()?;
        Ok(())
    }
    group(1, PlanChoice::Default, |communicator, _| reduce(&communicator, &mut [1.0; 3]).unwrap());
}

#[test]
fn a_dropped_operation_on_a_slice_ends_the_group() {
    let (connected, both) = (LimitedBarrier::new(2), LimitedBarrier::new(2));
    group(2, PlanChoice::Default, |communicator, _| {
        let mut elements = vec![1.0_f32; 100_000];
        // A rank that has connected may end the group while the other one still connects, which then fails
        // there.
        connected.wait();
        if communicator.rank() == 0 {
            drop(communicator.all_reduce(&mut elements[..], Reduction::Sum).start());
            let error = communicator.barrier().wait().unwrap_err();
            assert!(error.to_string().contains("dropped"), "{error}");
        } else {
            let failed = communicator.all_reduce(&mut elements[..], Reduction::Sum).wait().unwrap_err();
            assert!(failed.to_string().contains("dropped"), "{failed}");
        }
        // A report needs the process that makes it.
        both.wait();
    });
}

#[test]
fn a_stranger_attaches_no_memory_of_a_group() {
    let address = free_address();
    let join = |rank| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        // Rank 1 waits in the barrier until rank 0 has tried.
        let builder = Communicator::builder().launch(Launch::new(rank, 2, address.as_str())).deadline(LIMIT);
        let communicator = runtime.block_on(builder.connect()).unwrap();
        let buffer = communicator.allocate::<f32>(1 << 16).unwrap();
        communicator.all_reduce(buffer, Reduction::Sum).wait().unwrap();
        if rank == 0 {
            let refused = runtime.block_on(async {
                let outsider = tonic_rdma_tensor::RdmaDevice::builder().bind("127.0.0.1:0").await.unwrap();
                outsider.channel(&address, 0).await.unwrap_err()
            });
            assert!(refused.to_string().contains("does not belong to the group"), "{refused}");
        }
        communicator.barrier().wait().unwrap();
    };
    std::thread::scope(|scope| {
        scope.spawn(|| join(1));
        join(0);
    });
}

/// Counts its wake-ups, and panics then.
struct Alarm(AtomicUsize);

impl Wake for Alarm {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
        panic!("as the test asked");
    }
}

/// The thread that carries operations on wakes tasks whose wakers are the application's own.
#[test]
fn a_waker_that_panics_ends_no_other_operation() {
    let begun = [const { AtomicUsize::new(0) }; 2];
    let until_all = |round| {
        let began = Instant::now();
        while began.elapsed() < LIMIT && begun.iter().any(|begun| begun.load(Ordering::SeqCst) < round) {
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    group(2, fixed(Algorithm::Ring, 1 << 20), |communicator, _| {
        let rank = communicator.rank();
        for round in 1..=3 {
            let buffer = communicator.allocate::<f32>(1 << 10).unwrap();
            let mut operation = pin!(communicator.all_reduce(buffer, Reduction::Sum));
            let alarm = Arc::new(Alarm(AtomicUsize::new(0)));
            if rank == 0 {
                let waker = Waker::from(Arc::clone(&alarm));
                assert!(operation.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
            }
            begun[rank].store(round, Ordering::SeqCst);
            until_all(round);
            if rank == 0 {
                let began = Instant::now();
                while alarm.0.load(Ordering::SeqCst) == 0 {
                    assert!(began.elapsed() < LIMIT, "nothing has ended the operation of round {round}");
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
            let began = Instant::now();
            while operation.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending() {
                assert!(began.elapsed() < LIMIT);
            }
        }
    });
}
