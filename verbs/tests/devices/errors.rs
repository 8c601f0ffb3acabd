//! Requests that must fail, and the state after the failure.

use std::io::IoSlice;
use std::sync::Arc;

use tonic_rdma_verbs::{
    Access, CompletionOpcode, CompletionStatus, HostMemory, MemoryRegion, Operation, Payload, QueuePairState,
    RemoteSegment, Rkey,
};

use crate::fabric::{
    ALL, Fabric, Options, Side, connected, default_pair, pattern, remote, segment, until_placed, wait_until,
};

/// Checks that both ends are in Error after a fault that the target reports: receive 50 of `b` is flushed,
/// and all later requests of `a` and `b` are flushed.
fn expect_both_ended(a: &Side, b: &Side) {
    a.expect_end();
    b.expect_failure(50, CompletionStatus::WorkRequestFlushed);
    assert_eq!(b.pair.state(), QueuePairState::Error);
    a.post(60, Operation::Send { data: Payload::Inline(&[]), immediate: None });
    a.expect_failure(60, CompletionStatus::WorkRequestFlushed);
    b.post_receive(51, 0, 8);
    b.expect_failure(51, CompletionStatus::WorkRequestFlushed);
}

fn expect_remote_access(fabric: &dyn Fabric, post: impl FnOnce(&Side, &Side)) {
    let (a, b) = default_pair(fabric);
    b.fill(0, &pattern(1, 4096));
    b.post_receive(50, 0, 8);
    post(&a, &b);
    a.expect_refusal(fabric, 1, CompletionStatus::RemoteAccess);
    expect_both_ended(&a, &b);
    assert_eq!(b.content(0, 4096), pattern(1, 4096), "a refused request may not change anything");
}

pub fn wrong_rkey(fabric: &dyn Fabric) {
    for flipped in [1, 1 << 17, 1 << 31] {
        let wrong = move |b: &Side| {
            let good = b.remote(0);
            RemoteSegment { rkey: Rkey(good.rkey.0 ^ flipped), ..good }
        };
        expect_remote_access(fabric, |a, b| a.write(1, a.segment(0, 64), wrong(b)));
        expect_remote_access(fabric, |a, b| a.read(1, a.segment(0, 64), wrong(b)));
    }
}

pub fn out_of_bounds(fabric: &dyn Fabric) {
    let length = Options::default().memory;
    expect_remote_access(fabric, |a, b| a.write(1, a.segment(0, 64), b.remote(length - 63)));
    expect_remote_access(fabric, |a, b| a.read(1, a.segment(0, 64), b.remote(length - 63)));
    let before = |b: &Side| RemoteSegment { address: b.remote(0).address - 1, ..b.remote(0) };
    expect_remote_access(fabric, |a, b| a.write(1, a.segment(0, 64), before(b)));
    let wrapping = |b: &Side| RemoteSegment { address: u64::MAX - 8, ..b.remote(0) };
    expect_remote_access(fabric, |a, b| a.read(1, a.segment(0, 64), wrapping(b)));
}

/// A write to memory that peers may only read.
pub fn missing_region_right(fabric: &dyn Fabric) {
    let readable = match fabric.sinks_are_open() {
        false => Access::LOCAL_WRITE | Access::REMOTE_READ,
        true => Access::REMOTE_READ,
    };
    let mut kept = None;
    expect_remote_access(fabric, |a, b| {
        let region = kept.insert(register(b, readable));
        a.write(1, a.segment(0, 64), remote(region, 0));
    });
}

/// A READ of memory that peers may only write.
pub fn missing_region_right_of_a_read(fabric: &dyn Fabric) {
    let mut kept = None;
    expect_remote_access(fabric, |a, b| {
        let region = kept.insert(register(b, Access::LOCAL_WRITE | Access::REMOTE_WRITE));
        a.read(1, a.segment(0, 64), remote(region, 0));
    });
}

fn register(side: &Side, access: Access) -> Arc<dyn MemoryRegion> {
    side.domain.register(Arc::new(HostMemory::shared(4096, 4096).unwrap()), access).unwrap()
}

pub fn missing_queue_pair_right(fabric: &dyn Fabric) {
    for access in [Access::LOCAL_WRITE | Access::REMOTE_READ, Access::LOCAL_WRITE | Access::REMOTE_WRITE] {
        let (a, b) = connected(fabric, &Options { access, ..Options::default() });
        b.post_receive(50, 0, 8);
        if access.contains(Access::REMOTE_READ) {
            a.write(1, a.segment(0, 64), b.remote(0));
        } else {
            a.read(1, a.segment(0, 64), b.remote(0));
        }
        let status = fabric.reports("missing_queue_pair_right", CompletionStatus::RemoteAccess);
        a.expect_refusal(fabric, 1, status);
        expect_both_ended(&a, &b);
    }
}

pub fn foreign_domain(fabric: &dyn Fabric) {
    expect_remote_access(fabric, |a, b| {
        let other = b.context.alloc_protection_domain().unwrap();
        let region = other.register(Arc::new(HostMemory::shared(4096, 4096).unwrap()), ALL).unwrap();
        a.write(1, a.segment(0, 64), remote(&region, 0));
    });
}

pub fn deregistered_key(fabric: &dyn Fabric) {
    expect_remote_access(fabric, |a, b| {
        let region = b.private_region(4096);
        let gone = remote(&region, 0);
        a.write(0, a.segment(0, 64), gone);
        a.expect(0, CompletionOpcode::Write);
        until_placed(fabric, a, b);
        drop(region);
        a.write(1, a.segment(0, 64), gone);
    });
}

pub fn message_too_long_for_the_receive(fabric: &dyn Fabric) {
    let (a, b) = default_pair(fabric);
    b.post_receive(1, 0, 63);
    b.post_receive(50, 0, 64);
    a.fill(0, &[1; 64]);
    a.send(2, 0, 64);
    let reports = |status| fabric.reports("message_too_long_for_the_receive", status);
    a.expect_refusal(fabric, 2, reports(CompletionStatus::RemoteInvalidRequest));
    b.expect_failure(1, reports(CompletionStatus::LocalLength));
    expect_both_ended(&a, &b);
    assert_eq!(b.content(63, 1), [0], "nothing beyond the receive may be touched");
}

pub fn bad_local_key(fabric: &dyn Fabric) {
    let (a, b) = default_pair(fabric);
    let region = a.private_region(4096);
    let gone = segment(&region, 0, 64);
    drop(region);
    a.write(1, gone, b.remote(0));
    a.expect_failure(1, fabric.reports("bad_local_key", CompletionStatus::LocalProtection));
    assert_eq!(a.pair.state(), QueuePairState::Error);
}

pub fn local_range_out_of_bounds(fabric: &dyn Fabric) {
    let length = Options::default().memory;
    let (a, b) = default_pair(fabric);
    a.write(1, a.segment(length - 63, 64), b.remote(0));
    a.expect_failure(1, fabric.reports("local_range_out_of_bounds", CompletionStatus::LocalProtection));
    assert_eq!(b.content(0, 64), [0; 64]);
}

/// A READ into memory that the device may not write.
pub fn read_into_read_only_memory(fabric: &dyn Fabric) {
    let (a, b) = default_pair(fabric);
    let memory = Arc::new(HostMemory::shared(4096, 4096).unwrap());
    let region = a.domain.register(memory, Access::LOCAL_READ).unwrap();
    a.read(1, segment(&region, 0, 64), b.remote(0));
    a.expect_failure(1, CompletionStatus::LocalProtection);
}

/// A receive into deregistered memory fails at both ends.
pub fn receive_into_deregistered_memory(fabric: &dyn Fabric) {
    let (a, b) = default_pair(fabric);
    let region = b.private_region(4096);
    b.try_post_receive(1, &[segment(&region, 0, 64)]).unwrap();
    b.post_receive(50, 0, 8);
    drop(region);
    a.send(2, 0, 64);
    let reports = |status| fabric.reports("receive_into_deregistered_memory", status);
    a.expect_refusal(fabric, 2, reports(CompletionStatus::RemoteOperation));
    b.expect_failure(1, reports(CompletionStatus::LocalProtection));
    expect_both_ended(&a, &b);
}

/// Outstanding requests are flushed in order, and messages that had arrived before are not lost.
pub fn flush_order(fabric: &dyn Fabric) {
    let (a, b) = default_pair(fabric);
    b.post_receive(1, 0, 64);
    a.send(1, 0, 10);
    if !fabric.sends_wait_for_receives() {
        // No receive is outstanding at the flush.
        b.expect(1, CompletionOpcode::Receive);
        a.pair.to_error();
    }
    for wr_id in 2..10 {
        a.post(wr_id, Operation::Send { data: Payload::Inline(&[IoSlice::new(b"x")]), immediate: None });
        a.post_receive(100 + wr_id, 0, 10);
    }
    a.pair.to_error();
    let mut sends = Vec::new();
    let mut receives = Vec::new();
    for _ in 0..17 {
        let completion = a.wait();
        let list = if completion.wr_id > 100 { &mut receives } else { &mut sends };
        list.push((completion.wr_id, completion.status));
    }
    let flushed = CompletionStatus::WorkRequestFlushed;
    assert_eq!(sends[0], (1, CompletionStatus::Success));
    assert_eq!(sends[1..], (2..10).map(|wr_id| (wr_id, flushed)).collect::<Vec<_>>());
    assert_eq!(receives, (102..110).map(|wr_id| (wr_id, flushed)).collect::<Vec<_>>());
    a.expect_nothing();
    if fabric.sends_wait_for_receives() {
        b.expect(1, CompletionOpcode::Receive);
    }
}

/// Unsignalled requests report their failure too, and the requests after them have no effect.
pub fn unsignalled_failure(fabric: &dyn Fabric) {
    let (a, b) = default_pair(fabric);
    a.fill(0, &[7; 8]);
    let segments = [a.segment(0, 8)];
    let data = Payload::Registered(&segments);
    a.post_unsignaled(1, Operation::Write { data, remote: b.remote(0), immediate: None });
    a.post_unsignaled(2, Operation::Write { data, remote: b.remote(1 << 20), immediate: None });
    a.post_unsignaled(3, Operation::Write { data, remote: b.remote(8), immediate: None });
    if fabric.completes_at_the_peer() {
        a.expect_failure(2, CompletionStatus::RemoteAccess);
        a.expect_failure(3, CompletionStatus::WorkRequestFlushed);
    } else {
        a.expect_end();
        a.send(4, 0, 8);
        wait_until("the flush", || {
            let completion = a.wait();
            assert_eq!(completion.status, CompletionStatus::WorkRequestFlushed);
            completion.wr_id == 4
        });
    }
    assert_eq!(b.content(0, 16), [[7; 8], [0; 8]].concat());
}

/// A peer that has destroyed its queue pair does not answer any more.
pub fn peer_destroyed(fabric: &dyn Fabric) {
    let (a, b) = default_pair(fabric);
    let (target, region) = (b.remote(0), b.region.clone());
    drop(b);
    a.write(1, a.segment(0, 8), target);
    a.expect_refusal(fabric, 1, CompletionStatus::RetryExceeded);
    a.send(2, 0, 8);
    a.expect_failure(2, CompletionStatus::WorkRequestFlushed);
    drop(region);
}

/// A request to a peer that never connects fails after a finite time.
pub fn peer_never_connects(fabric: &dyn Fabric) {
    let options = Options::default();
    // Several attempts, because on iWARP chance decides which end connects to the other.
    let pairs: Vec<_> = (0..4).map(|_| (Side::new(fabric, &options), Side::new(fabric, &options))).collect();
    for (a, b) in &pairs {
        a.pair.to_rtr(&b.pair.local_address(), &options.settings).unwrap();
        a.pair.to_rts(&options.settings).unwrap();
    }
    let left: Vec<_> = pairs.into_iter().map(|(a, _)| a).collect();
    for a in &left {
        a.post(1, Operation::Send { data: Payload::Inline(&[]), immediate: None });
    }
    let status = if fabric.completes_at_the_peer() {
        CompletionStatus::RetryExceeded
    } else {
        CompletionStatus::WorkRequestFlushed
    };
    for a in &left {
        a.expect_failure(1, status);
        assert_eq!(a.pair.state(), QueuePairState::Error);
    }
}

/// A send that waits for a receive fails when the peer goes to Error. On iWARP a queue pair that only
/// receives fails, too.
pub fn peer_fails_while_a_send_waits(fabric: &dyn Fabric) {
    let (a, b) = default_pair(fabric);
    if !fabric.sends_wait_for_receives() {
        a.post_receive(1, 0, 8);
        until_placed(fabric, &a, &b);
        b.pair.to_error();
        return a.expect_failure(1, CompletionStatus::WorkRequestFlushed);
    }
    a.send(1, 0, 8);
    a.send(2, 0, 8);
    a.expect_nothing();
    b.pair.to_error();
    a.expect_failure(1, CompletionStatus::RetryExceeded);
    a.expect_failure(2, CompletionStatus::WorkRequestFlushed);
}
