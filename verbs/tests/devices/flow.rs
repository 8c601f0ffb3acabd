//! Full and empty queues, receivers that are not ready, and threads that sleep until a completion comes.

use std::io::IoSlice;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::event::{PollFd, PollFlags, Timespec};
use tonic_rdma_verbs::{
    CompletionOpcode, CompletionQueue, CompletionStatus, Operation, PathSettings, Payload, PostErrorKind,
    QueuePairState, ReceiveRequest, SendRequest, VerbsErrorKind, WorkCompletion,
};

use crate::fabric::{
    Fabric, Options, Side, TIMEOUT, connect_pairs, connected, default_pair, pattern, until_placed,
};

fn with_retries(rnr_retry: u8, min_rnr_timer: u8) -> Options {
    let settings = PathSettings { rnr_retry, min_rnr_timer, ..PathSettings::default() };
    Options { settings, ..Options::default() }
}

/// Returns whether the event descriptor is readable by now.
pub fn has_event(queue: &dyn CompletionQueue) -> bool {
    is_readable(queue, 0)
}

/// Returns whether the event descriptor becomes readable within [`TIMEOUT`].
pub fn event_comes(queue: &dyn CompletionQueue) -> bool {
    is_readable(queue, TIMEOUT.as_secs() as i64)
}

fn is_readable(queue: &dyn CompletionQueue, seconds: i64) -> bool {
    let fd = queue.event_fd();
    let timeout = Timespec { tv_sec: seconds, tv_nsec: 0 };
    rustix::event::poll(&mut [PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN)], Some(&timeout)).unwrap()
        == 1
}

/// Sleeps until a completion comes: arms the queue, polls again, then waits.
pub fn sleep_for(queue: &dyn CompletionQueue) -> WorkCompletion {
    let mut completions = [WorkCompletion::EMPTY; 1];
    loop {
        queue.arm().unwrap();
        if queue.poll(&mut completions) == 1 {
            return completions[0];
        }
        assert!(event_comes(queue), "a wake-up was lost");
        queue.acknowledge_events();
    }
}

/// A send waits for a receive without a limit, and all later requests wait too.
pub fn receiver_not_ready_for_ever(fabric: &dyn Fabric) {
    let (a, b) = connected(fabric, &with_retries(7, 1));
    a.fill(0, &pattern(1, 100));
    a.send(1, 0, 50);
    a.send(2, 50, 50);
    a.write(3, a.segment(0, 100), b.remote(1000));
    std::thread::sleep(std::time::Duration::from_millis(30));
    a.expect_nothing();
    assert_eq!(b.content(1000, 100), [0; 100], "a write may not overtake the sends before it");
    b.post_receive(1, 0, 50);
    a.expect(1, CompletionOpcode::Send);
    b.post_receive(2, 50, 50);
    a.expect(2, CompletionOpcode::Send);
    a.expect(3, CompletionOpcode::Write);
    b.expect(1, CompletionOpcode::Receive);
    b.expect(2, CompletionOpcode::Receive);
    assert_eq!(b.content(0, 100), pattern(1, 100));
    assert_eq!(b.content(1000, 100), pattern(1, 100));
}

/// On a device whose sends do not wait, a send without a receive fails both ends, and wakes the sleeping
/// sender.
fn expect_no_receiver_not_ready(fabric: &dyn Fabric) {
    let (a, b) = default_pair(fabric);
    b.post_receive(1, 0, 8);
    a.post_receive(50, 0, 8);
    for wr_id in 1..=2 {
        a.post_unsignaled(wr_id, Operation::Send { data: Payload::Inline(&[]), immediate: None });
    }
    let first = sleep_for(&*a.queue);
    assert_eq!(first.status, CompletionStatus::WorkRequestFlushed);
    b.expect(1, CompletionOpcode::Receive);
    for side in [&a, &b] {
        side.expect_end();
        side.post_receive(3, 0, 8);
    }
    b.expect_failure(3, CompletionStatus::WorkRequestFlushed);
}

/// With finite retries a send fails after some time, and wakes the sleeping sender.
pub fn receiver_not_ready_expires(fabric: &dyn Fabric) {
    if !fabric.sends_wait_for_receives() {
        return expect_no_receiver_not_ready(fabric);
    }
    for (retries, timer) in [(0, 1), (2, 14), (3, 12)] {
        let (a, b) = connected(fabric, &with_retries(retries, timer));
        a.send(1, 0, 8);
        a.send(2, 0, 8);
        let first = sleep_for(&*a.queue);
        assert_eq!((first.wr_id, first.status), (1, CompletionStatus::RnrRetryExceeded));
        a.expect_failure(2, CompletionStatus::WorkRequestFlushed);
        assert_eq!(a.pair.state(), QueuePairState::Error);
        b.post_receive(3, 0, 8);
        b.expect_nothing();
    }
}

/// A send succeeds if a receive is posted in time, although the sender sleeps and does not poll meanwhile.
pub fn receiver_not_ready_recovers(fabric: &dyn Fabric) {
    // The longest time that is finite: 6 times 655 ms. The other thread may have to wait for its turn.
    let (a, b) = connected(fabric, &with_retries(6, 0));
    for round in 0..50u64 {
        a.send(round, 0, 8);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                if round % 3 == 0 {
                    std::thread::sleep(std::time::Duration::from_millis(1));
                }
                b.post_receive(round, 0, 8);
            });
            let sent = sleep_for(&*a.queue);
            assert_eq!((sent.wr_id, sent.status), (round, CompletionStatus::Success));
        });
        b.expect(round, CompletionOpcode::Receive);
    }
}

/// WRITE with immediate data needs a receive too.
pub fn write_with_immediate_waits_for_a_receive(fabric: &dyn Fabric) {
    let (a, b) = default_pair(fabric);
    let data = Payload::Inline(&[IoSlice::new(b"late")]);
    a.post(1, Operation::Write { data, remote: b.remote(0), immediate: Some(3) });
    a.expect_nothing();
    b.try_post_receive(2, &[]).unwrap();
    a.expect(1, CompletionOpcode::Write);
    assert_eq!(b.expect(2, CompletionOpcode::ReceiveWriteWithImmediate).immediate, Some(3));
    assert_eq!(b.content(0, 4), b"late");
}

/// A request to a peer that is not connected yet waits for the peer.
pub fn peer_not_connected_yet(fabric: &dyn Fabric) {
    // The request waits for 8 times 1 s, and so for longer than the software device may take to connect the
    // peer.
    let settings = PathSettings { timeout: 18, ..PathSettings::default() };
    let options = Options { settings, ..Options::default() };
    let (a, b) = (Side::new(fabric, &options), Side::new(fabric, &options));
    a.pair.to_rtr(&b.pair.local_address(), &options.settings).unwrap();
    a.pair.to_rts(&options.settings).unwrap();
    b.post_receive(1, 0, 8);
    a.send(1, 0, 8);
    a.expect_nothing();
    b.pair.to_rtr(&a.pair.local_address(), &options.settings).unwrap();
    a.expect(1, CompletionOpcode::Send);
    b.expect(1, CompletionOpcode::Receive);
}

pub fn send_queue_full(fabric: &dyn Fabric) {
    let mut options = Options::default();
    options.capacity.send_requests = 4;
    let (a, b) = connected(fabric, &options);
    let send = |wr_id| {
        a.try_post(wr_id, Operation::Send { data: Payload::Inline(&[IoSlice::new(b"x")]), immediate: None })
    };
    const EARLY: u64 = 100;
    let waits = fabric.sends_wait_for_receives();
    for wr_id in (0..EARLY).take_while(|_| !waits) {
        b.post_receive(wr_id, 0, 8);
    }
    // A completed request holds its slot until its completion is polled.
    let room = (0..1000).take_while(|wr_id| send(*wr_id).is_ok()).count() as u64;
    assert!((4..if waits { 1000 } else { EARLY }).contains(&room), "{room}");
    assert_eq!(send(room).unwrap_err().kind, PostErrorKind::QueueFull);
    for wr_id in (0..room + 1).take_while(|_| waits) {
        b.post_receive(wr_id, 0, 8);
    }
    a.expect(0, CompletionOpcode::Send);
    send(room).unwrap();
    for wr_id in 1..room + 1 {
        a.expect(wr_id, CompletionOpcode::Send);
    }
    for wr_id in 0..room + 1 {
        b.expect(wr_id, CompletionOpcode::Receive);
    }
}

/// Unsignalled requests hold their slots until a later signalled request is polled.
pub fn unsignalled_requests_hold_places(fabric: &dyn Fabric) {
    let mut options = Options::default();
    options.capacity.send_requests = 8;
    let (a, b) = connected(fabric, &options);
    let segments = [a.segment(0, 8)];
    let write =
        Operation::Write { data: Payload::Registered(&segments), remote: b.remote(0), immediate: None };
    for round in 0..20 {
        for wr_id in 0..7 {
            a.post_unsignaled(wr_id, write);
        }
        a.post(round, write);
        a.expect(round, CompletionOpcode::Write);
    }
}

/// A READ completes when its bytes are here. Its completion frees the slots of all requests before it, whatever
/// the device knows of their ends.
pub fn a_read_frees_the_places_before_it(fabric: &dyn Fabric) {
    let mut options = Options::default();
    options.capacity.send_requests = 64;
    let (a, b) = connected(fabric, &options);
    let slices = [IoSlice::new(&[7; 8])];
    let data = Payload::Inline(&slices);
    let write = |at| Operation::Write { data, remote: b.remote(at), immediate: None };
    for round in 0..20 {
        for wr_id in 0..10 {
            a.post_unsignaled(wr_id, write(0));
        }
        let is_signalled_between = round % 2 == 1;
        if is_signalled_between {
            a.post(100, write(0));
            a.post_unsignaled(101, write(0));
        }
        a.read(102, a.segment(64, 8), b.remote(0));
        if is_signalled_between {
            a.expect(100, CompletionOpcode::Write);
        }
        a.expect(102, CompletionOpcode::Read);
        for wr_id in 0..63 {
            a.post_unsignaled(wr_id, write(8));
        }
        a.post(103, write(8));
        a.expect(103, CompletionOpcode::Write);
        a.expect_nothing();
    }
}

pub fn receive_queue_full(fabric: &dyn Fabric) {
    let mut options = Options::default();
    options.capacity.receive_requests = 5;
    let (a, b) = connected(fabric, &options);
    let post = |wr_id| b.try_post_receive(wr_id, &[b.segment(0, 8)]);
    let room = (0..1000).take_while(|wr_id| post(*wr_id).is_ok()).count() as u64;
    assert!((5..1000).contains(&room), "{room}");
    assert_eq!(post(room).unwrap_err().kind, PostErrorKind::QueueFull);
    for wr_id in 0..100 {
        a.send(wr_id, 0, 8);
        a.expect(wr_id, CompletionOpcode::Send);
        b.expect(wr_id, CompletionOpcode::Receive);
        post(room + wr_id).unwrap();
    }
}

pub fn too_many_segments_or_bytes(fabric: &dyn Fabric) {
    let (a, b) = default_pair(fabric);
    let segments = [a.segment(0, 8); 64];
    let data = Payload::Registered(&segments);
    let error = a.try_post(1, Operation::Send { data, immediate: None }).unwrap_err();
    assert_eq!(error.kind, PostErrorKind::TooManySegments);
    assert_eq!(b.try_post_receive(1, &segments).unwrap_err().kind, PostErrorKind::TooManySegments);
    let long = vec![0; 4 << 20];
    let data = Payload::Inline(&[IoSlice::new(&long)]);
    let error = a.try_post(1, Operation::Send { data, immediate: None }).unwrap_err();
    assert_eq!(error.kind, PostErrorKind::InlineTooLong);
    a.expect_nothing();
}

pub fn completion_queue_overrun(fabric: &dyn Fabric) {
    if !fabric.overruns_exactly() {
        return;
    }
    let (a, b) = connected(fabric, &Options { completions: 4, ..Options::default() });
    for wr_id in 0..4 {
        a.write(wr_id, a.segment(0, 8), b.remote(0));
    }
    assert_eq!(a.pair.state(), QueuePairState::Rts);
    a.write(4, a.segment(0, 8), b.remote(0));
    assert_eq!(a.pair.state(), QueuePairState::Error);
    for wr_id in 0..4 {
        a.expect(wr_id, CompletionOpcode::Write);
    }
}

/// Both sides wait for each other in thousands of rounds, with various delays before they sleep.
pub fn arming_loses_no_wake_up(fabric: &dyn Fabric) {
    const ROUNDS: u64 = 3000;
    let (a, b) = default_pair(fabric);
    let play = |side: &Side, first: bool| {
        let send = |round: u64| {
            let bytes = round.to_le_bytes();
            let slices = [IoSlice::new(&bytes)];
            side.post(round, Operation::Send { data: Payload::Inline(&slices), immediate: None });
        };
        for round in 0..ROUNDS {
            if first {
                send(round);
            }
            loop {
                for _ in 0..round % 7 * 40 {
                    std::hint::spin_loop();
                }
                let completion = sleep_for(&*side.queue);
                assert_eq!(completion.status, CompletionStatus::Success);
                if completion.opcode == CompletionOpcode::Receive {
                    assert_eq!(side.content(8 * completion.wr_id as usize, 8), round.to_le_bytes());
                    side.post_receive(completion.wr_id, 8 * completion.wr_id as usize, 8);
                    break;
                }
            }
            if !first {
                send(round);
            }
        }
    };
    for side in [&a, &b] {
        for wr_id in 0..4 {
            side.post_receive(wr_id, 8 * wr_id as usize, 8);
        }
    }
    std::thread::scope(|scope| {
        scope.spawn(|| play(&a, true));
        scope.spawn(|| play(&b, false));
    });
}

/// One event comes for each arming, for a receive or for a send. No event comes without arming.
pub fn events_come_when_armed(fabric: &dyn Fabric) {
    let (a, b) = default_pair(fabric);
    b.post_receive(1, 0, 8);
    b.post_receive(2, 0, 8);
    a.send(1, 0, 8);
    assert!(!has_event(&*a.queue) && !has_event(&*b.queue), "not armed");
    a.expect(1, CompletionOpcode::Send);
    b.expect(1, CompletionOpcode::Receive);
    a.queue.arm().unwrap();
    b.queue.arm().unwrap();
    a.send(2, 0, 8);
    assert!(event_comes(&*a.queue) && event_comes(&*b.queue));
    b.queue.acknowledge_events();
    assert!(!has_event(&*b.queue), "acknowledged");
    a.expect(2, CompletionOpcode::Send);
    b.expect(2, CompletionOpcode::Receive);
}

/// A completion queue gets longer while completions are in it.
pub fn a_completion_queue_grows(fabric: &dyn Fabric) {
    const FIRST: u32 = 64;
    let mut options = Options { completions: FIRST, ..Options::default() };
    options.capacity.send_requests = 256;
    let (a, b) = connected(fabric, &options);
    let write = |range: std::ops::Range<u64>| {
        range
            .for_each(|wr_id| a.write(wr_id, a.segment(8 * wr_id as usize, 8), b.remote(8 * wr_id as usize)));
    };
    a.fill(0, &pattern(7, 8 * 200));
    write(0..u64::from(FIRST));
    let most = a.context.attributes().max_completions;
    if let Some(more) = most.checked_add(1) {
        assert_eq!(a.queue.resize(more).unwrap_err().kind(), VerbsErrorKind::Limit);
    }
    match a.queue.resize(256) {
        Err(error) if error.kind() == VerbsErrorKind::Unsupported => {
            assert!(!fabric.completes_at_the_peer(), "{error}");
            return;
        }
        resized => resized.unwrap(),
    }
    write(FIRST.into()..200);
    // It stays as long as it is.
    a.queue.resize(1).unwrap();
    (0..200).for_each(|wr_id| _ = a.expect(wr_id, CompletionOpcode::Write));
    a.expect_nothing();
    until_placed(fabric, &a, &b);
    assert!(b.content(0, 8 * 200) == pattern(7, 8 * 200));
}

/// A poll that finds an earlier completion does not cancel the event that the queue is armed for.
pub fn an_armed_queue_stays_armed(fabric: &dyn Fabric) {
    let (a, b) = default_pair(fabric);
    for wr_id in 1..=2 {
        b.post_receive(wr_id, 0, 8);
    }
    a.send(1, 0, 8);
    a.expect(1, CompletionOpcode::Send);
    b.queue.arm().unwrap();
    b.expect(1, CompletionOpcode::Receive);
    a.send(2, 0, 8);
    assert!(event_comes(&*b.queue), "the event of an armed queue was lost");
    b.expect(2, CompletionOpcode::Receive);
    a.expect(2, CompletionOpcode::Send);
}

/// Hundreds of queue pairs share one completion queue, and few of them have completions at a time.
pub fn many_queue_pairs_on_one_queue(fabric: &dyn Fabric) {
    const PAIRS: usize = 300;
    let mut options = Options { completions: 4096, ..Options::default() };
    options.capacity.receive_requests = 4;
    options.capacity.send_requests = 4;
    let (a, b) = connected(fabric, &options);
    let pairs: Vec<_> = (0..PAIRS)
        .map(|_| {
            let (one, two) = (a.another_pair(&options), b.another_pair(&options));
            connect_pairs(&one, &two, &options.settings);
            (one, two)
        })
        .collect();
    let received = AtomicU64::new(0);
    for round in 0..5 {
        for (index, (one, two)) in pairs.iter().enumerate() {
            let wr_id = index as u64;
            let into = [b.segment(64 * index, 64)];
            two.post_receive(&[ReceiveRequest { wr_id, into: &into }]).unwrap();
            let bytes = pattern(wr_id + round, 64);
            let data = Payload::Inline(&[IoSlice::new(&bytes)]);
            let operation = Operation::Send { data, immediate: None };
            one.post_send(&[SendRequest { wr_id, operation, signaled: true }]).unwrap();
        }
        let mut seen = vec![false; PAIRS];
        for _ in 0..PAIRS {
            assert_eq!(a.wait().status, CompletionStatus::Success);
            let completion = b.wait();
            let index = completion.wr_id as usize;
            assert_eq!(completion.queue_pair, pairs[index].1.number());
            assert!(!std::mem::replace(&mut seen[index], true), "twice");
            assert_eq!(b.content(64 * index, 64), pattern(completion.wr_id + round, 64));
            received.fetch_add(1, Ordering::Relaxed);
        }
        a.expect_nothing();
        b.expect_nothing();
    }
    assert_eq!(received.into_inner(), 5 * PAIRS as u64);
}

/// Separate completion queues for sends and receives.
pub fn separate_queues(fabric: &dyn Fabric) {
    let options = Options::default();
    let (mut a, b) = (Side::new(fabric, &options), Side::new(fabric, &options));
    let sends = a.context.create_completion_queue(64).unwrap();
    a.pair = a.domain.create_queue_pair(&sends, &a.queue, &options.capacity).unwrap();
    a.pair.to_init(options.access).unwrap();
    a.connect(&b);
    let waits = fabric.sends_wait_for_receives();
    let send = || [1, 2].into_iter().for_each(|wr_id| a.send(wr_id, 0, 8));
    if waits {
        send();
    }
    b.post_receive(1, 0, 8);
    b.post_receive(2, 0, 8);
    if !waits {
        send();
    }
    for wr_id in [1, 2] {
        assert_eq!(crate::fabric::wait(&*sends).wr_id, wr_id);
        b.expect(wr_id, CompletionOpcode::Receive);
    }
    a.post_receive(3, 0, 8);
    b.send(3, 0, 8);
    a.expect(3, CompletionOpcode::Receive);
    a.post_receive(4, 0, 8);
    if waits {
        a.send(5, 0, 8);
        a.pair.to_error();
    } else {
        a.pair.to_error();
        a.send(5, 0, 8);
    }
    a.expect_failure(4, CompletionStatus::WorkRequestFlushed);
    let flushed = crate::fabric::wait(&*sends);
    assert_eq!((flushed.wr_id, flushed.status), (5, CompletionStatus::WorkRequestFlushed));
}

/// A queue pair that always has completions does not delay those of another, or those of sends.
pub fn no_queue_pair_starves(fabric: &dyn Fabric) {
    let options = Options::default();
    let (a, b) = default_pair(fabric);
    let (one, two) = (a.another_pair(&options), b.another_pair(&options));
    connect_pairs(&one, &two, &options.settings);
    let into = [b.segment(8, 8)];
    two.post_receive(&[ReceiveRequest { wr_id: 2, into: &into }]).unwrap();
    let feed = |wr_id| {
        b.post_receive(wr_id, 0, 8);
        a.send(wr_id, 0, 8);
        a.expect(wr_id, CompletionOpcode::Send);
    };
    (0..16).for_each(|_| feed(1));
    let operation = Operation::Send { data: Payload::Inline(&[]), immediate: None };
    one.post_send(&[SendRequest { wr_id: 3, operation, signaled: false }]).unwrap();
    b.write(4, b.segment(0, 8), a.remote(0));
    let mut awaited = vec![2, 4];
    for _ in 0..500 {
        let completion = b.wait();
        awaited.retain(|wr_id| *wr_id != completion.wr_id);
        if completion.wr_id == 1 {
            feed(1);
        }
        if awaited.is_empty() {
            return;
        }
    }
    panic!("not polled: {awaited:?}");
}
