use std::future::{Future, poll_fn};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use crate::fusion::overlap::{Overlap, Timed, covered};

const fn ms(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds)
}

#[test]
fn time_that_two_operations_share_counts_once() {
    let zero = Instant::now();
    let sum = |intervals: &[(u64, u64)]| {
        covered(intervals.iter().map(|&(begin, end)| (zero + ms(begin), zero + ms(end))))
    };
    assert_eq!(sum(&[]), ms(0));
    assert_eq!(sum(&[(5, 9)]), ms(4));
    assert_eq!(sum(&[(0, 10), (5, 20), (30, 40)]), ms(30));
    // One within another.
    assert_eq!(sum(&[(0, 10), (2, 3), (4, 12)]), ms(12));
    assert_eq!(sum(&[(0, 10), (10, 11)]), ms(11));
}

#[test]
fn what_finish_did_not_wait_for_was_hidden() {
    let mut overlap = Overlap { step: ms(100), communication: ms(40), waited: ms(10), ..Overlap::default() };
    assert_eq!(overlap.hidden(), ms(30));
    assert!((overlap.hidden_fraction() - 0.75).abs() < 1e-9);
    assert!((overlap.communication_fraction() - 0.4).abs() < 1e-9);
    assert_eq!(overlap.to_string(), "communication 40.0ms of 100.0ms (40 %), waited 10.0ms: 75 % hidden");
    overlap += Overlap { step: ms(100), communication: ms(40), waited: ms(50), ..Overlap::default() };
    assert_eq!(overlap.hidden(), ms(20));
    // No communication, nothing hidden, and no division by zero.
    assert_eq!(Overlap::default().hidden_fraction(), 0.0);
    // Waiting for more than the communication hides nothing.
    let waited = Overlap { communication: ms(1), waited: ms(5), ..Overlap::default() };
    assert_eq!(waited.hidden(), ms(0));
}

/// A future that ends when the test says so.
fn controlled() -> (impl Future<Output = u32> + Unpin, impl Fn()) {
    let state = Arc::new((AtomicBool::new(false), Mutex::new(None::<Waker>)));
    let ours = Arc::clone(&state);
    let future = poll_fn(move |context| {
        *state.1.lock().unwrap() = Some(context.waker().clone());
        if state.0.load(Ordering::Acquire) { Poll::Ready(7) } else { Poll::Pending }
    });
    let end = move || {
        ours.0.store(true, Ordering::Release);
        if let Some(waker) = ours.1.lock().unwrap().take() {
            waker.wake();
        }
    };
    (future, end)
}

#[test]
fn an_operation_ends_when_it_wakes_and_not_when_the_caller_looks() {
    let (future, end) = controlled();
    let begun = Instant::now();
    let mut timed = Timed::new(future, begun);
    assert!(timed.poll(None).is_pending());
    end();
    let woken = Instant::now();
    std::thread::sleep(ms(2));
    let Poll::Ready((output, (start, ended))) = timed.poll(None) else { panic!("it has ended") };
    assert_eq!((output, start), (7, begun));
    assert!(begun <= ended && ended <= woken);
}

#[test]
fn an_end_without_a_wake_is_the_time_of_the_look() {
    let (future, end) = controlled();
    end();
    let begun = Instant::now();
    let Poll::Ready((_, (_, ended))) = Timed::new(future, begun).poll(None) else { panic!("it has ended") };
    assert!(ended >= begun);
}

#[test]
fn the_task_that_waits_is_woken() {
    let (future, end) = controlled();
    let mut timed = Timed::new(future, Instant::now());
    let thread = std::thread::spawn(move || {
        crate::fusion::block_on(poll_fn(|context| {
            timed.poll(Some(context.waker())).map(|(output, _)| output)
        }))
    });
    std::thread::sleep(ms(1));
    end();
    assert_eq!(thread.join().unwrap(), 7);
}
