//! States of queue pairs, connecting, and destruction.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tonic_rdma_verbs::{
    CompletionOpcode, CompletionStatus, HostMemory, Operation, Payload, PostErrorKind, QueuePairAddress,
    QueuePairState, VerbsErrorKind, WorkCompletion,
};

use crate::fabric::{ALL, Fabric, Options, Side, default_pair, is_end, remote, wait_until};

pub fn state_machine(fabric: &dyn Fabric) {
    let options = Options::default();
    let (a, b) = (Side::new(fabric, &options), Side::new(fabric, &options));
    let fresh = a.domain.create_queue_pair(&a.queue, &a.queue, &options.capacity).unwrap();
    let settings = &options.settings;
    assert_eq!(fresh.state(), QueuePairState::Reset);
    assert_eq!(fresh.to_rts(settings).unwrap_err().kind(), VerbsErrorKind::InvalidState);
    assert_eq!(
        fresh.to_rtr(&b.pair.local_address(), settings).unwrap_err().kind(),
        VerbsErrorKind::InvalidState
    );
    assert!(fresh.post_receive(&[tonic_rdma_verbs::ReceiveRequest { wr_id: 0, into: &[] }]).is_err());

    assert_eq!(a.pair.state(), QueuePairState::Init);
    assert_eq!(a.pair.to_init(ALL).unwrap_err().kind(), VerbsErrorKind::InvalidState);
    assert_eq!(a.pair.to_rts(settings).unwrap_err().kind(), VerbsErrorKind::InvalidState);
    a.post_receive(1, 0, 8);
    let send = Operation::Send { data: Payload::Inline(&[]), immediate: None };
    let refused = |state| PostErrorKind::State(state);
    assert_eq!(a.try_post(1, send).unwrap_err().kind, refused(QueuePairState::Init));

    a.pair.to_rtr(&b.pair.local_address(), settings).unwrap();
    assert_eq!(a.pair.state(), QueuePairState::Rtr);
    assert!(a.pair.to_rtr(&b.pair.local_address(), settings).is_err());
    assert_eq!(a.try_post(1, send).unwrap_err().kind, refused(QueuePairState::Rtr));
    a.pair.to_rts(settings).unwrap();
    assert_eq!(a.pair.state(), QueuePairState::Rts);
    a.pair.to_error();
    assert_eq!(a.pair.state(), QueuePairState::Error);
    a.pair.to_error();
    assert!(a.pair.to_rts(settings).is_err());
    a.expect_failure(1, CompletionStatus::WorkRequestFlushed);
}

pub fn error_before_connecting(fabric: &dyn Fabric) {
    let side = Side::new(fabric, &Options::default());
    side.post_receive(1, 0, 8);
    side.pair.to_error();
    side.expect_failure(1, CompletionStatus::WorkRequestFlushed);
    side.post_receive(2, 0, 8);
    side.expect_failure(2, CompletionStatus::WorkRequestFlushed);
}

pub fn nonsense_addresses_are_refused(fabric: &dyn Fabric) {
    let options = Options::default();
    let side = Side::new(fabric, &options);
    let own = side.pair.local_address().as_bytes().to_vec();
    for bytes in [vec![], vec![0; 256], own[1..].to_vec(), [&own[..], &[0]].concat()] {
        let address = QueuePairAddress::new(bytes).unwrap();
        let error = side.pair.to_rtr(&address, &options.settings).unwrap_err();
        assert_eq!(error.kind(), VerbsErrorKind::InvalidAddress, "{error}");
        assert_eq!(side.pair.state(), QueuePairState::Init);
    }
    let (a, b) = default_pair(fabric);
    let [a, b] = [a, b].map(|side| side.pair.local().map(|local| local.probe()).unwrap_or_default());
    assert!(a.ours == b.peers && b.ours == a.peers);
}

/// Requests beyond a limit are refused, and the error names the limit.
pub fn limits(fabric: &dyn Fabric) {
    let options = Options::default();
    let side = Side::new(fabric, &options);
    let attributes = side.context.attributes();
    let mut capacity = options.capacity.clone();
    capacity.send_requests = attributes.max_work_requests + 1;
    assert!(side.domain.create_queue_pair(&side.queue, &side.queue, &capacity).is_err());
    assert!(side.context.create_completion_queue(u32::MAX).is_err());
    assert_eq!(attributes.provider, fabric.name());
}

/// Regions are registered and deregistered while the peer uses them. Every request succeeds or is refused.
pub fn deregistration_during_traffic(fabric: &dyn Fabric) {
    let mut refused = 0;
    for round in 0..40 {
        let (a, b) = default_pair(fabric);
        let memory = match round % 2 {
            0 => HostMemory::shared(1 << 18, 4096).unwrap(),
            _ => HostMemory::from_vec(vec![0; 1 << 18]),
        };
        let region = b.domain.register(Arc::new(memory), ALL).unwrap();
        let target = remote(&region, 0);
        let started = AtomicBool::new(false);
        let status = std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                for wr_id in 0u64.. {
                    a.write(wr_id, a.segment(0, 1 << 18), target);
                    let completion = a.wait();
                    started.store(true, Ordering::Relaxed);
                    if completion.status != CompletionStatus::Success {
                        return completion.status;
                    }
                }
                CompletionStatus::Success
            });
            wait_until("traffic", || started.load(Ordering::Relaxed));
            drop(region);
            writer.join().unwrap()
        });
        assert!(
            status == CompletionStatus::RemoteAccess || !fabric.completes_at_the_peer() && is_end(status)
        );
        refused += 1;
    }
    assert_eq!(refused, 40);
}

/// Queue pairs are destroyed while their peers send to them.
pub fn destruction_during_traffic(fabric: &dyn Fabric) {
    for _ in 0..40 {
        let (a, b) = default_pair(fabric);
        let target = b.remote(0);
        let region = b.region.clone();
        let started = AtomicBool::new(false);
        let status = std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                for wr_id in 0u64.. {
                    a.write(wr_id, a.segment(0, 4096), target);
                    let completion = a.wait();
                    started.store(true, Ordering::Relaxed);
                    if completion.status != CompletionStatus::Success {
                        return completion.status;
                    }
                }
                CompletionStatus::Success
            });
            wait_until("traffic", || started.load(Ordering::Relaxed));
            drop(b);
            writer.join().unwrap()
        });
        assert!(
            status == CompletionStatus::RetryExceeded || !fabric.completes_at_the_peer() && is_end(status)
        );
        drop(region);
    }
}

/// Completions that were not polled are dropped with their queue pair. The completion queue still serves
/// other queue pairs.
pub fn destroyed_with_completions_unpolled(fabric: &dyn Fabric) {
    let options = Options::default();
    let (mut a, b) = default_pair(fabric);
    for wr_id in 0..10 {
        b.post_receive(wr_id, 0, 8);
        a.send(wr_id, 0, 8);
    }
    let (one, two) = (a.another_pair(&options), b.another_pair(&options));
    a.pair = one;
    let mut completions = [WorkCompletion::EMPTY; 16];
    let count = a.queue.poll(&mut completions);
    assert!(completions[..count].iter().all(|completion| completion.queue_pair != a.pair.number()));
    crate::fabric::connect_pairs(&a.pair, &two, &options.settings);
    a.write(77, a.segment(0, 8), b.remote(0));
    a.expect(77, CompletionOpcode::Write);
}
