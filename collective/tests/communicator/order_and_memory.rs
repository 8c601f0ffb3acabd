//! Operations in unusual orders, and memory of other communicators.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use support::free_address;
use tonic_rdma_collective::{
    Algorithm, CollectiveError, CollectiveErrorKind, Communicator, Launch, Owned, PlanChoice, Reduction,
};

/// Long enough for a busy machine; only a hang takes so long.
const LIMIT: Duration = Duration::from_secs(120);

/// Runs `rank` on a thread of its own for each rank, with a communicator for each of the plans.
fn groups(
    ranks: usize,
    plans: &[PlanChoice],
    run: impl Fn(Vec<Communicator>, &tokio::runtime::Runtime) + Sync,
) {
    let addresses: Vec<String> = plans.iter().map(|_| free_address()).collect();
    let (addresses, run) = (&addresses, &run);
    std::thread::scope(|scope| {
        for rank in 0..ranks {
            scope.spawn(move || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                let communicators = std::iter::zip(addresses, plans).map(|(address, plans)| {
                    let builder = Communicator::builder()
                        .launch(Launch::new(rank, ranks, address.as_str()))
                        .deadline(LIMIT)
                        .plans(plans.clone());
                    runtime.block_on(builder.connect()).unwrap()
                });
                run(communicators.collect(), &runtime);
            });
        }
    });
}

fn group(ranks: usize, run: impl Fn(Communicator, &tokio::runtime::Runtime) + Sync) {
    groups(ranks, &[PlanChoice::Default], |mut communicators, runtime| run(communicators.remove(0), runtime));
}

fn ring(chunk_bytes: usize) -> PlanChoice {
    PlanChoice::Fixed { algorithm: Algorithm::Ring, chunk_bytes }
}

#[test]
fn a_buffer_of_another_communicator_gives_the_right_result() {
    let count = 100_000;
    groups(2, &[ring(64 << 10), ring(64 << 10)], |communicators, _| {
        let [first, second] = &communicators[..] else { panic!("two communicators") };
        // Memory of the second communicator that has the same number, and other content.
        let mut own = second.allocate::<f32>(count).unwrap();
        own.fill(100.0);
        let own = second.all_reduce(own, Reduction::Sum).wait().unwrap();
        assert_eq!(own[count - 1], 200.0);

        let mut buffer = first.allocate::<f32>(count).unwrap();
        buffer.fill(1.0);
        let buffer = second.all_reduce(buffer, Reduction::Sum).wait().unwrap();
        assert!(buffer.iter().all(|element| *element == 2.0), "{} and {}", buffer[0], buffer[count - 1]);
        let (buffer, own) = second.all_reduce((buffer, own), Reduction::Sum).wait().unwrap();
        assert!(own.iter().all(|element| *element == 4.0), "{} and {}", own[0], own[count - 1]);
        // The first communicator still takes its own buffer without a copy.
        let buffer = first.all_reduce(buffer, Reduction::Sum).wait().unwrap();
        assert_eq!((buffer[0], first.statistics().copied_bytes), (4.0, 0));
    });
}

#[test]
fn buffers_go_on_into_the_group_of_the_survivors_without_a_copy() {
    let count = 50_000;
    let all = Barrier::new(3);
    group(3, |communicator, runtime| {
        let mut buffer = communicator.allocate::<f32>(count).unwrap();
        buffer.fill(1.0);
        let mut buffer = communicator.all_reduce(buffer, Reduction::Sum).wait().unwrap();
        all.wait();
        if communicator.rank() == 2 {
            return;
        }
        communicator.barrier().wait().unwrap_err();
        let smaller = runtime.block_on(communicator.shrink()).unwrap();
        buffer.fill(1.0);
        let buffer = smaller.all_reduce(buffer, Reduction::Sum).wait().unwrap();
        assert!(buffer.iter().all(|element| *element == 2.0));
        assert_eq!(smaller.statistics().copied_bytes, 0);
        smaller.barrier().wait().unwrap();
    });
}

#[test]
fn messages_of_two_ranks_go_on_while_a_thread_waits_for_the_group() {
    group(2, |communicator, _| {
        let buffer = communicator.allocate::<f32>(100_000).unwrap();
        if communicator.rank() == 0 {
            let received = communicator.recv(1, buffer).start();
            communicator.barrier().wait().unwrap();
            received.wait().unwrap();
        } else {
            // The other rank waits in the barrier by now, most of the time.
            std::thread::sleep(Duration::from_millis(50));
            communicator.send(0, buffer).wait().unwrap();
            communicator.barrier().wait().unwrap();
        }
    });
}

#[test]
fn many_receives_under_way_do_not_hold_up_a_send() {
    group(2, |communicator, _| {
        if communicator.rank() == 0 {
            let receives: Vec<_> = (0..200)
                .map(|_| communicator.recv(1, communicator.allocate::<i32>(1).unwrap()).start())
                .collect();
            let go = communicator.allocate::<i32>(1).unwrap();
            communicator.send(1, go).wait().unwrap();
            for (at, received) in receives.into_iter().enumerate() {
                assert_eq!(received.wait().unwrap()[0], at as i32);
            }
        } else {
            let mut number = communicator.recv(0, communicator.allocate::<i32>(1).unwrap()).wait().unwrap();
            for at in 0..200 {
                number[0] = at;
                number = communicator.send(0, number).wait().unwrap();
            }
        }
    });
}

#[test]
fn a_call_that_differs_and_is_found_at_once_ends_the_operations_of_all_ranks() {
    let all = Barrier::new(3);
    group(3, |communicator, _| {
        if communicator.rank() == 1 {
            // The messages of a short broadcast leave at once.
            communicator.broadcast(communicator.allocate::<i32>(4).unwrap(), 1).wait().unwrap();
        }
        all.wait();
        let error: CollectiveError = if communicator.rank() == 0 {
            communicator.all_reduce(&mut [1.0_f32; 4][..], Reduction::Sum).wait().unwrap_err().into()
        } else {
            communicator.recv(0, communicator.allocate::<i32>(4).unwrap()).wait().unwrap_err().into()
        };
        // A report needs the process that makes it.
        all.wait();
        match communicator.rank() {
            0 => {
                assert_eq!((error.kind(), error.rank()), (CollectiveErrorKind::Mismatch, Some(1)), "{error}")
            }
            _ => {
                assert_eq!((error.kind(), error.rank()), (CollectiveErrorKind::Reported, Some(0)), "{error}")
            }
        }
    });
}

#[test]
fn a_rank_that_waited_earlier_and_makes_no_call_now_is_named() {
    let all = Barrier::new(3);
    groups(3, &[ring(64 << 10)], |communicators, _| {
        let communicator = &communicators[0];
        let rank = communicator.rank();
        if rank == 1 {
            std::thread::sleep(Duration::from_millis(200));
        }
        // Rank 2 waits for rank 1 here, and for no rank later.
        let mut elements = [1.0_f32; 3000];
        communicator.broadcast(&mut elements[..], 1).wait().unwrap();
        // In the ring, rank 1 waits for rank 0, and rank 0 for rank 2.
        let error: Option<CollectiveError> = (rank < 2).then(|| {
            let limit = if rank == 0 { Duration::from_secs(1) } else { LIMIT };
            let operation = communicator.all_reduce(&mut elements[..], Reduction::Sum).deadline(limit);
            operation.wait().unwrap_err().into()
        });
        all.wait();
        if let (0, Some(error)) = (rank, error) {
            assert_eq!((error.kind(), error.rank()), (CollectiveErrorKind::Deadline, Some(2)), "{error}");
        }
    });
}

#[test]
fn pieces_have_any_length() {
    for chunk_bytes in [0, usize::MAX] {
        for algorithm in [Algorithm::OneShot, Algorithm::HalvingDoubling, Algorithm::Ring] {
            groups(3, &[PlanChoice::Fixed { algorithm, chunk_bytes }], |communicators, _| {
                let mut elements = [1_i8; 100];
                communicators[0].all_reduce(&mut elements[..], Reduction::Sum).wait().unwrap();
                assert_eq!(elements, [3; 100]);
            });
        }
    }
}

#[test]
fn a_rank_that_does_not_poll_its_operation_on_a_slice_names_itself() {
    let all = Barrier::new(2);
    groups(2, &[ring(4 << 10)], |communicators, _| {
        let communicator = &communicators[0];
        let mut elements = vec![1.0_f32; 10_000];
        let operation = communicator.all_reduce(&mut elements[..], Reduction::Sum);
        let error: CollectiveError = if communicator.rank() == 0 {
            // Rank 1 has to begin within this time, also on a slow machine: otherwise this rank would wait
            // for it.
            let operation = operation.deadline(Duration::from_secs(5)).start();
            // The caller does something else for longer than the deadline, or until the group has failed.
            all.wait();
            operation.wait().unwrap_err().into()
        } else {
            let error = operation.wait().unwrap_err().into();
            all.wait();
            error
        };
        match communicator.rank() {
            0 => {
                assert_eq!((error.kind(), error.rank()), (CollectiveErrorKind::Deadline, Some(0)), "{error}")
            }
            _ => {
                assert_eq!((error.kind(), error.rank()), (CollectiveErrorKind::Reported, Some(0)), "{error}")
            }
        }
    });
}

/// Says when it is dropped, and with what.
#[derive(Debug)]
struct Told(Vec<f32>, Sender<f32>);

impl Deref for Told {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.0
    }
}

impl DerefMut for Told {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.0
    }
}

impl Drop for Told {
    fn drop(&mut self) {
        let _ = self.1.send(*self.0.last().unwrap());
    }
}

#[test]
fn operations_on_owned_memory_go_on_when_they_are_dropped() {
    // The first is of the short path; the others have one message, and many.
    for count in [4, 10_000, 300_000] {
        let all = Barrier::new(2);
        groups(2, &[ring(64 << 10), PlanChoice::Default], |communicators, _| {
            for communicator in &communicators {
                let (say, dropped) = channel();
                let memory = Owned(Told(vec![1.0; count], say));
                if communicator.rank() == 0 {
                    drop(communicator.all_reduce(memory, Reduction::Sum).start());
                    // Nothing polls here until the operation has ended.
                    assert_eq!(dropped.recv_timeout(LIMIT).unwrap(), 2.0);
                } else {
                    let Owned(sums) = communicator.all_reduce(memory, Reduction::Sum).wait().unwrap();
                    assert!(sums.iter().all(|sum| *sum == 2.0));
                }
                all.wait();
            }
        });
    }
}

#[test]
fn operations_on_owned_memory_end_before_they_are_awaited() {
    let all = Barrier::new(2);
    group(2, |communicator, runtime| {
        let under_way: Vec<_> = [3, 100_000, 0, 1000]
            .map(|count| communicator.all_reduce(Owned(vec![1.5_f64; count]), Reduction::Sum).start())
            .into();
        if communicator.rank() == 1 {
            for operation in under_way {
                operation.wait().unwrap();
            }
            all.wait();
        } else {
            // The other rank has ended all of them, so this one's thread has, too.
            all.wait();
            runtime.block_on(async {
                for operation in under_way.into_iter().rev() {
                    assert!(operation.await.unwrap().0.iter().all(|sum| *sum == 3.0));
                }
            });
        }
        communicator.barrier().wait().unwrap();
    });
}

#[test]
fn a_failure_gives_owned_memory_back() {
    let all = Barrier::new(2);
    groups(2, &[ring(64 << 10)], |communicators, _| {
        let communicator = &communicators[0];
        if communicator.rank() == 0 {
            for count in [4, 300_000] {
                let (say, dropped) = channel();
                let memory = (Owned(vec![1.0; count]), Owned(Told(vec![0.0; count], say.clone())));
                let limit = Duration::from_millis(200);
                let left =
                    communicator.all_reduce(Owned(Told(vec![0.0; count], say)), Reduction::Sum).start();
                let operation = communicator.all_reduce(memory, Reduction::Sum).deadline(limit);
                drop(left);
                let (error, memory) = operation.start().wait().unwrap_err().into_parts();
                let (Owned(input), Owned(output)) = memory.unwrap();
                assert_eq!((input, output.len()), (vec![1.0; count], count));
                match count {
                    4 => assert_eq!(
                        (error.kind(), error.rank()),
                        (CollectiveErrorKind::Deadline, Some(1)),
                        "{error}"
                    ),
                    _ => assert_eq!(error.kind(), CollectiveErrorKind::Revoked, "{error}"),
                }
                drop(output);
                // That of the dropped operation, which has failed too, and the one that came back.
                assert_eq!([LIMIT; 2].map(|limit| dropped.recv_timeout(limit)), [Ok(0.0); 2]);
            }
        }
        all.wait();
    });
}

/// Loses an element, or panics, once it is told to.
#[derive(Debug)]
struct Fickle {
    elements: Vec<f32>,
    told: Arc<AtomicBool>,
    panics: bool,
}

impl Deref for Fickle {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.elements
    }
}

impl DerefMut for Fickle {
    fn deref_mut(&mut self) -> &mut [f32] {
        let told = self.told.load(Ordering::SeqCst);
        assert!(!(told && self.panics), "as the test asked");
        &mut self.elements[usize::from(told)..]
    }
}

#[test]
fn owned_memory_that_changes_its_length_or_panics_fails_the_operation() {
    for panics in [false, true] {
        let all = Barrier::new(2);
        groups(2, &[ring(64 << 10)], |communicators, _| {
            let (communicator, elements) = (&communicators[0], vec![1.0_f32; 100_000]);
            let rank = communicator.rank();
            let error: CollectiveError = if rank == 0 {
                let told = Arc::new(AtomicBool::new(false));
                let memory = Owned(Fickle { elements, told: Arc::clone(&told), panics });
                let operation = communicator.all_reduce(memory, Reduction::Sum).start();
                told.store(true, Ordering::SeqCst);
                all.wait();
                operation.wait().unwrap_err().into()
            } else {
                all.wait();
                let pair = (Owned(Arc::<[f32]>::from(&elements[..])), Owned(elements));
                communicator.all_reduce(pair, Reduction::Sum).wait().unwrap_err().into()
            };
            all.wait();
            let kinds = [CollectiveErrorKind::InvalidArgument, CollectiveErrorKind::Reported];
            assert_eq!(error.kind(), kinds[rank], "{error}");
        });
    }
}
