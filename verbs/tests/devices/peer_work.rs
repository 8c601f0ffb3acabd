//! The work of peers on a device whose work the CPU does ([`QueuePair::local`]), and the events of their
//! WRITEs.

use std::io::IoSlice;
use std::sync::Arc;

use tonic_rdma_verbs::{
    CompletionOpcode, CompletionStatus, LocalQueuePair, Operation, Payload, SendRequest, WorkCompletion,
};

use crate::fabric::{Fabric, Options, Side, connect_pairs, connected, default_pair, pattern, wait_until};
use crate::flow::{event_comes, has_event};

/// Returns the work of the side's peer. `None` on a device that works without the CPU.
fn work(fabric: &dyn Fabric, side: &Side) -> Option<Arc<dyn LocalQueuePair>> {
    let work = side.pair.local().cloned();
    assert_eq!(work.is_some(), fabric.name() == "soft", "the software device works by the CPU");
    assert!(work.as_ref().is_none_or(|work| work.reads_by_copy()), "one process maps its own memory");
    work
}

/// Writes 8 bytes to the other side, and returns them.
fn write(from: &Side, to: &Side, seed: u64) -> Vec<u8> {
    let bytes = pattern(seed, 8);
    from.fill(0, &bytes);
    from.write(seed, from.segment(0, 8), to.remote(64));
    bytes
}

fn poll_nothing(side: &Side) {
    assert_eq!(side.queue.poll(&mut [WorkCompletion::EMPTY; 4]), 0);
}

/// Each WRITE wakes a thread that sleeps in the completion queue of receives. A poll then carries out the
/// WRITE.
pub fn writes_make_events(fabric: &dyn Fabric) {
    let (a, b) = default_pair(fabric);
    if work(fabric, &b).is_none() {
        return;
    }
    poll_nothing(&b);
    for round in 1..4 {
        b.queue.arm().unwrap();
        poll_nothing(&b);
        let bytes = write(&a, &b, round);
        assert!(event_comes(&*b.queue), "a WRITE made no event");
        b.queue.acknowledge_events();
        poll_nothing(&b);
        assert_eq!(b.content(64, 8), bytes);
        a.expect(round, CompletionOpcode::Write);
    }
}

/// A thread that checks for work carries out WRITEs, and switches their events off. Messages still make
/// events.
pub fn threads_that_look_need_no_events(fabric: &dyn Fabric) {
    // On a slow machine the device's thread may be first, and it makes events.
    assert!((0..50).any(|_| looks_carry_out_writes(fabric)), "no look carried out a WRITE");
}

/// Returns false if another thread was first.
fn looks_carry_out_writes(fabric: &dyn Fabric) -> bool {
    let (a, b) = default_pair(fabric);
    let Some(work) = work(fabric, &b) else { return true };
    b.queue.arm().unwrap();
    assert!(!work.progress(), "there is no work yet");
    assert!(work.need_no_events(), "WRITEs made events");
    assert!(!work.need_no_events());
    let bytes = write(&a, &b, 1);
    if !work.progress() {
        return false;
    }
    assert_eq!(b.content(64, 8), bytes);
    a.expect(1, CompletionOpcode::Write);
    assert!(!work.progress());
    assert!(!has_event(&*b.queue), "a WRITE made an event that no thread needs");
    // Queues that are armed again do not ask for these events, either.
    b.queue.disarm();
    b.queue.arm().unwrap();
    let bytes = write(&a, &b, 2);
    if !work.progress() {
        return false;
    }
    assert_eq!(b.content(64, 8), bytes);
    a.expect(2, CompletionOpcode::Write);
    assert!(!has_event(&*b.queue));
    // A message makes an event, even if a thread that checks for work finds the message first.
    b.post_receive(3, 0, 8);
    a.send(3, 0, 8);
    work.progress();
    assert!(event_comes(&*b.queue), "a message made no event");
    b.queue.acknowledge_events();
    b.expect(3, CompletionOpcode::Receive);
    a.expect(3, CompletionOpcode::Send);
    b.queue.arm().unwrap();
    work.need_events();
    poll_nothing(&b);
    write(&a, &b, 4);
    assert!(event_comes(&*b.queue), "a WRITE made no event");
    poll_nothing(&b);
    a.expect(4, CompletionOpcode::Write);
    true
}

/// A poll carries out a part of a long WRITE only. A thread that arms the queue, polls and then sleeps is
/// woken for the rest.
pub fn a_long_write_leaves_an_event_for_the_rest(fabric: &dyn Fabric) {
    const LENGTH: usize = 4 << 20;
    let (a, b) = connected(fabric, &Options { memory: LENGTH, ..Options::default() });
    if work(fabric, &b).is_none() {
        return;
    }
    let mut completion = [WorkCompletion::EMPTY; 1];
    let mut carried_out_in_parts = false;
    // The first WRITEs come through the ring, which takes many polls of both ends, until b has mapped the
    // memory.
    for round in 0..50 {
        let bytes = pattern(round, LENGTH);
        a.fill(0, &bytes);
        a.write(round, a.segment(0, LENGTH), b.remote(0));
        let (mut polls, mut without_event) = (0, 0);
        wait_until("the WRITE", || {
            b.queue.arm().unwrap();
            poll_nothing(&b);
            polls += 1;
            let done = a.queue.poll(&mut completion) == 1;
            without_event += u32::from(!done && !has_event(&*b.queue));
            b.queue.acknowledge_events();
            done
        });
        if polls < 20 {
            assert_eq!(without_event, 0, "round {round}: polls left work and made no event");
            carried_out_in_parts |= polls > 2;
        }
        assert!(b.content(0, LENGTH) == bytes, "round {round}");
    }
    assert!(carried_out_in_parts);
}

/// The last records of a peer that has ended are still taken, but not for a queue pair that is destroyed.
pub fn work_of_an_ended_peer_and_a_destroyed_queue_pair(fabric: &dyn Fabric) {
    let (a, b) = default_pair(fabric);
    if work(fabric, &b).is_none() {
        return;
    }
    // On a slow machine the device's thread may carry out the WRITE before the queue pair is destroyed.
    let destroyed_first = || {
        b.fill(64, &[0; 8]);
        records_of_a_destroyed_queue_pair_are_left(&a, &b)
    };
    assert!((0..50).any(|_| destroyed_first()), "each WRITE was carried out before the test");
}

/// Destroys a queue pair before the last WRITE of its peer, which has ended, is carried out. Returns false if
/// the WRITE was first.
fn records_of_a_destroyed_queue_pair_are_left(a: &Side, b: &Side) -> bool {
    let options = Options::default();
    let receives = b.context.create_completion_queue(16).unwrap();
    let from = a.another_pair(&options);
    let to = b.domain.create_queue_pair(&b.queue, &receives, &options.capacity).unwrap();
    to.to_init(options.access).unwrap();
    connect_pairs(&from, &to, &options.settings);
    let bytes = [7; 8];
    let data = [IoSlice::new(&bytes)];
    let write = |wr_id, remote| {
        let operation = Operation::Write { data: Payload::Inline(&data), remote, immediate: None };
        SendRequest { wr_id, operation, signaled: true }
    };
    // The WRITE wakes no thread that would carry it out.
    let work = Arc::clone(to.local().unwrap());
    receives.arm().unwrap();
    work.need_no_events();
    from.post_send(&[write(1, b.remote(64))]).unwrap();
    drop(from);
    // The poll of the requests fails the queue pair. The records wait for a poll of the receives.
    to.post_send(&[write(2, a.remote(64))]).unwrap();
    assert_ne!(b.wait().status, CompletionStatus::Success);
    drop(to);
    let before = b.content(64, 8);
    work.progress();
    assert_eq!(b.content(64, 8), before, "a destroyed queue pair wrote to memory");
    before == [0; 8]
}

/// The work of a queue pair may outlive the queue pair. It then touches no memory.
pub fn work_of_a_destroyed_queue_pair(fabric: &dyn Fabric) {
    let (a, b) = default_pair(fabric);
    let Some(work) = work(fabric, &b) else { return };
    let region = Arc::clone(&b.region);
    let Side { pair, .. } = b;
    drop(pair);
    a.fill(0, &[7; 8]);
    a.write(1, a.segment(0, 8), crate::fabric::remote(&region, 64));
    for _ in 0..10 {
        work.progress();
        work.need_events();
        work.need_no_events();
    }
    assert_eq!(crate::fabric::content(&region, 64, 8), [0; 8]);
}
