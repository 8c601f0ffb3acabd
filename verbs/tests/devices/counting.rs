//! The provider that counts: it behaves like the device behind it (the suite runs on it), and counts right.

use std::io::IoSlice;
use std::sync::Arc;

use tonic_rdma_verbs::counting::{Counter, Counts, Limits, wrap};
use tonic_rdma_verbs::{
    Access, Context, Operation, Payload, PostErrorKind, SendRequest, VerbsError, VerbsErrorKind, soft,
};

use crate::fabric::{Fabric, Options, Side, connect_pairs, default_pair, wait_until};

/// The software device, counted.
#[derive(Default)]
pub struct Counted(Counter);

impl Fabric for Counted {
    /// The name of the device behind it. So child processes use that device itself.
    fn name(&self) -> &'static str {
        "soft"
    }

    fn open(&self) -> Result<Arc<dyn Context>, VerbsError> {
        Ok(wrap(soft::open()?, &self.0))
    }
}

/// Connects two sides, runs `test`, and returns what was counted meanwhile.
fn counted(test: impl FnOnce(&Side, &Side)) -> Counts {
    let fabric = Counted::default();
    let (a, b) = default_pair(&fabric);
    let before = fabric.0.counts();
    test(&a, &b);
    fabric.0.counts().since(&before)
}

#[test]
fn requests_are_counted_by_opcode() {
    let counts = counted(|a, b| {
        (0..3).for_each(|wr_id| b.post_receive(wr_id, 0, 100));
        let data = Payload::Inline(&[IoSlice::new(b"one"), IoSlice::new(b"two")]);
        a.post_unsignaled(0, Operation::Send { data, immediate: None });
        a.post(1, Operation::Send { data, immediate: Some(1) });
        a.post(2, Operation::Write { data, remote: b.remote(0), immediate: Some(2) });
        a.write(3, a.segment(0, 4096), b.remote(0));
        a.read(4, a.segment(0, 9000), b.remote(0));
        (1..5).for_each(|wr_id| assert_eq!(a.wait().wr_id, wr_id));
        (0..3).for_each(|wr_id| assert_eq!(b.wait().wr_id, wr_id));
    });
    let kinds = [counts.sends, counts.sends_with_immediate, counts.writes, counts.writes_with_immediate];
    assert_eq!(kinds.map(|posts| (posts.requests, posts.bytes)), [(1, 6), (1, 6), (1, 4096), (1, 6)]);
    let kinds = [counts.reads, counts.receives, counts.reads_at_once];
    assert_eq!(kinds.map(|posts| (posts.requests, posts.bytes)), [(1, 9000), (3, 300), (0, 0)]);
    assert_eq!((counts.signaled, counts.unsignaled, counts.posts()), (4, 1, 8));
    assert_eq!((counts.completions, counts.failures), (7, 0));
    assert_eq!((counts.regions.created, counts.queue_pairs.created), (0, 0));
}

#[test]
fn only_requests_that_were_posted_are_counted() {
    let counts = counted(|a, b| {
        let request = |wr_id, data| {
            let operation = Operation::Write { data, remote: b.remote(0), immediate: None };
            SendRequest { wr_id, operation, signaled: true }
        };
        let long = vec![0; a.pair.capacity().inline as usize + 1];
        let (short, long) = ([IoSlice::new(b"short")], [IoSlice::new(&long)]);
        let requests = [&short, &long, &short].map(|slices| request(1, Payload::Inline(slices)));
        let error = a.pair.post_send(&requests).unwrap_err();
        assert_eq!((error.index, error.kind), (1, PostErrorKind::InlineTooLong));
        assert_eq!(a.wait().wr_id, 1);
        a.pair.to_error();
        a.try_post_receive(2, &[a.segment(0, 8)]).unwrap();
        a.expect_failure(2, tonic_rdma_verbs::CompletionStatus::WorkRequestFlushed);
    });
    assert_eq!((counts.writes.requests, counts.writes.bytes, counts.posts()), (1, 5, 2));
    assert_eq!((counts.completions, counts.failures), (2, 1));
}

#[test]
fn objects_are_counted_while_they_live() {
    let fabric = Counted::default();
    let side = Side::new(&fabric, &Options::default());
    let private = side.private_region(5000);
    let counts = fabric.0.counts();
    assert_eq!((counts.regions.created, counts.regions.destroyed, counts.regions.alive()), (2, 0, 2));
    assert_eq!(counts.registered_bytes, 5000 + (1 << 20));
    let others = |counts: Counts| {
        [counts.domains, counts.completion_queues, counts.queue_pairs].map(|of| (of.created, of.destroyed))
    };
    assert_eq!(others(counts), [(1, 0); 3]);
    drop(private);
    assert_eq!(fabric.0.counts().since(&counts).regions.destroyed, 1);
    drop(side);
    assert_eq!(others(fabric.0.counts()), [(1, 1); 3]);
    assert_eq!(fabric.0.counts().regions.alive(), 0);
}

#[test]
fn work_without_a_request_is_counted() {
    let counts = counted(|a, b| {
        let local = a.pair.local().unwrap();
        // The first READ makes the peer offer its memory, which is mapped some milliseconds later.
        wait_until("the peer's memory", || {
            a.read(1, a.segment(0, 8), b.remote(0));
            a.wait();
            local.view(b.remote(0), 8).is_ok()
        });
        assert!(local.read_at_once(&[a.segment(0, 300)], b.remote(0)));
    });
    assert_eq!((counts.views, counts.reads_at_once.requests, counts.reads_at_once.bytes), (1, 1, 300));
}

/// A device whose objects are counted one by one, with limits that one side reaches.
#[test]
fn a_device_with_limits_states_them_and_refuses_more() {
    let fabric = Counted::default();
    let mut limits = Limits::CARD;
    (limits.domains, limits.completion_queues, limits.queue_pairs, limits.regions) = (1, 1, 1, 2);
    (limits.windows, limits.completions, limits.work_requests) = (1, 1024, 256);
    fabric.0.limit(limits);
    let options = Options::default();
    let side = Side::new(&fabric, &options);
    let device = side.context.attributes();
    let stated = (device.max_memory_regions, device.max_completions, device.max_work_requests);
    assert_eq!((stated, device.window_requests), ((2, 1024, 256), 128));
    let _region = side.private_region(8);
    let before = fabric.0.counts();
    fn refused<T>(made: Result<T, VerbsError>) -> String {
        let error = made.err().expect("it is beyond the limit");
        assert_eq!(error.kind(), VerbsErrorKind::Limit);
        error.to_string()
    }
    let memory = side.region.memory();
    let (context, queue) = (&side.context, &side.queue);
    assert_eq!(
        [
            refused(context.alloc_protection_domain()),
            refused(context.create_completion_queue(1)),
            refused(context.create_completion_queue(1025)),
            refused(queue.resize(1025)),
            refused(side.domain.create_queue_pair(queue, queue, &options.capacity)),
            refused(side.domain.register(Arc::clone(memory), Access::LOCAL_WRITE)),
        ],
        [
            "protection domains: asked for 2, the device has 1",
            "completion queues: asked for 2, the device has 1",
            "completion queue depth: asked for 1025, the device has 1024",
            "completion queue depth: asked for 1025, the device has 1024",
            "queue pairs: asked for 2, the device has 1",
            "memory regions: asked for 3, the device has 2",
        ]
    );
    assert_eq!(fabric.0.counts(), before, "what is refused does not count");
    // A card keeps places of the send queue for windows.
    let Side { context, domain, queue, pair, .. } = side;
    drop(pair);
    let mut capacity = options.capacity;
    capacity.send_requests = 129;
    let refusal = refused(domain.create_queue_pair(&queue, &queue, &capacity));
    assert_eq!(refusal, "send queue depth: asked for 257, the device has 256");
    capacity.send_requests = 128;
    domain.create_queue_pair(&queue, &queue, &capacity).unwrap();
    drop((queue, domain));
    context.create_completion_queue(1024).unwrap();
}

#[test]
fn a_device_without_room_for_windows_opens_none() {
    let fabric = Counted::default();
    let mut limits = Limits::CARD;
    limits.windows = 1;
    fabric.0.limit(limits);
    let (a, _b) = default_pair(&fabric);
    let open = || a.pair.open_window(&a.region, 0..8, Access::REMOTE_READ).unwrap();
    let first = open();
    assert!(first.is_some() && open().is_none());
    drop(first);
    assert!(open().is_some());
}

#[test]
fn requests_are_counted_by_queue_pair() {
    let fabric = Counted::default();
    let (a, b) = default_pair(&fabric);
    let (one, two) = (a.another_pair(&Options::default()), b.another_pair(&Options::default()));
    connect_pairs(&one, &two, &a.settings);
    a.write(1, a.segment(0, 100), b.remote(0));
    a.read(2, a.segment(0, 20), b.remote(0));
    let data = Payload::Inline(&[IoSlice::new(b"five!")]);
    let operation = Operation::Write { data, remote: b.remote(0), immediate: None };
    one.post_send(&[SendRequest { wr_id: 3, operation, signaled: true }]).unwrap();
    (0..3).for_each(|_| _ = a.wait());
    let found: Vec<_> = [&a.pair, &one, &two]
        .map(|pair| fabric.0.queue_pairs()[&pair.number()])
        .map(|posts| (posts.requests, posts.bytes))
        .into();
    assert_eq!(found, [(2, 120), (1, 5), (0, 0)]);
    let number = one.number();
    drop(one);
    assert!(!fabric.0.queue_pairs().contains_key(&number));
}
