//! Shared receive queues. A device without shared receive queues must report that it has none.

use std::sync::Arc;

use tonic_rdma_verbs::{
    CompletionOpcode, CompletionStatus, Operation, Payload, PostErrorKind, QueuePair, QueuePairNumber,
    QueuePairState, ReceiveRequest, SendRequest, SharedReceiveQueue, VerbsErrorKind, WorkCompletion,
};

use crate::fabric::{ALL, Fabric, Options, Side, connect_pairs, pattern, wait, wait_until};

/// Bytes of a buffer. Buffers lie one after the other.
const BUFFER: usize = 1024;

/// A side whose queue pairs share one receive queue, and a side that sends to all of them.
struct SharedReceives {
    receiver: Side,
    queue: Arc<dyn SharedReceiveQueue>,
    pairs: Vec<Arc<dyn QueuePair>>,
    sender: Side,
    senders: Vec<Arc<dyn QueuePair>>,
}

impl SharedReceives {
    /// Makes `connections` connections and a queue for `capacity` receives. Returns `None` if the device has
    /// no shared receive queues.
    fn new(fabric: &dyn Fabric, connections: usize, capacity: u32) -> Option<Self> {
        Self::with_memory(fabric, connections, capacity, Options::default().memory)
    }

    /// Like [`new`](Self::new), with `memory` bytes for each side.
    fn with_memory(fabric: &dyn Fabric, connections: usize, capacity: u32, memory: usize) -> Option<Self> {
        let options = Options { memory, ..Options::default() };
        let (receiver, sender) = (Side::new(fabric, &options), Side::new(fabric, &options));
        if receiver.context.attributes().max_shared_receive_queues == 0 {
            let error = receiver.domain.create_shared_receive_queue(capacity, 1).unwrap_err();
            assert_eq!(error.kind(), VerbsErrorKind::Unsupported, "{error}");
            return None;
        }
        let queue = receiver.domain.create_shared_receive_queue(capacity, 2).unwrap();
        let mut shared = Self { receiver, queue, pairs: Vec::new(), sender, senders: Vec::new() };
        for _ in 0..connections {
            let domain = Arc::clone(&shared.receiver.domain);
            shared.connect(&*domain);
        }
        Some(shared)
    }

    /// Adds a connection whose receiving queue pair belongs to `domain`.
    fn connect(&mut self, domain: &dyn tonic_rdma_verbs::ProtectionDomain) {
        let (options, queue) = (Options::default(), &self.receiver.queue);
        let pair = domain.create_sharing_queue_pair(queue, queue, &self.queue, &options.capacity).unwrap();
        pair.to_init(ALL).unwrap();
        let sender = self.sender.another_pair(&options);
        connect_pairs(&sender, &pair, &options.settings);
        self.pairs.push(pair);
        self.senders.push(sender);
    }

    /// Posts the buffer with this number. The number is also the identifier of the request.
    fn post(&self, buffer: u64) {
        let into = [self.receiver.segment(buffer as usize * BUFFER, BUFFER)];
        self.queue.post_receive(&[ReceiveRequest { wr_id: buffer, into: &into }]).unwrap();
    }

    /// Sends a message over connection `index`, and waits until it has arrived.
    fn send(&self, index: usize, message: &[u8]) {
        self.start(index, message);
        assert_eq!(wait(&*self.sender.queue).status, CompletionStatus::Success);
    }

    fn start(&self, index: usize, message: &[u8]) {
        self.sender.fill(0, message);
        let segment = [self.sender.segment(0, message.len())];
        let operation = Operation::Send { data: Payload::Registered(&segment), immediate: None };
        let request = SendRequest { wr_id: index as u64, operation, signaled: true };
        self.senders[index].post_send(&[request]).unwrap();
    }

    /// Waits for the next message, which must have come over connection `index`, and returns the number of
    /// its buffer.
    fn expect(&self, index: usize, message: &[u8]) -> u64 {
        let completion = self.receiver.wait();
        assert_eq!(completion.status, CompletionStatus::Success);
        assert_eq!(completion.opcode, CompletionOpcode::Receive);
        assert_eq!(completion.queue_pair, self.pairs[index].number());
        assert_eq!(completion.byte_len, message.len() as u64);
        let content = self.receiver.content(completion.wr_id as usize * BUFFER, message.len());
        assert!(content == message, "the content of buffer {}", completion.wr_id);
        completion.wr_id
    }
}

/// Each message uses the oldest buffer, whichever queue pair receives it.
pub fn shared_receives(fabric: &dyn Fabric) {
    let Some(shared) = SharedReceives::new(fabric, 3, 8) else { return };
    (0..8).for_each(|buffer| shared.post(buffer));
    for round in 0..40u64 {
        let index = (round * round % 3) as usize;
        let message = pattern(round, 1 + (round as usize * 97) % BUFFER);
        shared.send(index, &message);
        let buffer = shared.expect(index, &message);
        assert_eq!(buffer, round % 8, "taken in the order of posting");
        shared.post(buffer);
    }
}

/// Requests that can't be posted to a shared receive queue.
pub fn shared_receive_queue_full(fabric: &dyn Fabric) {
    let Some(shared) = SharedReceives::new(fabric, 1, 3) else { return };
    assert_eq!(shared.queue.capacity(), 3);
    let attributes = shared.receiver.context.attributes();
    let segment = shared.receiver.segment(0, 8);
    let post = |segments: &[_], count| {
        let request = ReceiveRequest { wr_id: 7, into: segments };
        shared.queue.post_receive(&vec![request; count])
    };
    let refused = post(&[segment; 3], 1).unwrap_err();
    assert_eq!((refused.index, refused.kind), (0, PostErrorKind::TooManySegments));
    let refused = post(&[segment; 2], 4).unwrap_err();
    assert_eq!((refused.index, refused.kind), (3, PostErrorKind::QueueFull));
    shared.send(0, &[1, 2, 3]);
    assert_eq!(post(&[segment], 1).unwrap_err().kind, PostErrorKind::QueueFull, "until it is polled");
    assert_eq!(shared.receiver.wait().wr_id, 7);
    post(&[segment], 1).unwrap();
    let own = shared.pairs[0].post_receive(&[ReceiveRequest { wr_id: 1, into: &[segment] }]);
    assert!(own.is_err(), "a queue pair that shares has no receive queue of its own");
    assert!(
        shared.receiver.domain.create_shared_receive_queue(attributes.max_shared_receives + 1, 1).is_err()
    );
    assert!(shared.receiver.domain.create_shared_receive_queue(1, attributes.max_segments + 1).is_err());
}

/// A message waits for a receive, and uses the next receive that is posted.
pub fn shared_receive_comes_late(fabric: &dyn Fabric) {
    let Some(shared) = SharedReceives::new(fabric, 2, 8) else { return };
    shared.start(1, b"early");
    shared.receiver.expect_nothing();
    shared.post(5);
    assert_eq!(shared.expect(1, b"early"), 5);
    assert_eq!(wait(&*shared.sender.queue).status, CompletionStatus::Success);
}

/// A write with immediate data uses a shared receive, too.
pub fn shared_receive_of_an_immediate(fabric: &dyn Fabric) {
    let Some(shared) = SharedReceives::new(fabric, 2, 8) else { return };
    shared.post(3);
    let from = [shared.sender.segment(0, 16)];
    let operation = Operation::Write {
        data: Payload::Registered(&from),
        remote: shared.receiver.remote(0),
        immediate: Some(0xfeed),
    };
    shared.senders[1].post_send(&[SendRequest { wr_id: 1, operation, signaled: true }]).unwrap();
    let completion = shared.receiver.wait();
    assert_eq!((completion.wr_id, completion.status), (3, CompletionStatus::Success));
    assert_eq!(completion.opcode, CompletionOpcode::ReceiveWriteWithImmediate);
    assert_eq!((completion.immediate, completion.queue_pair), (Some(0xfeed), shared.pairs[1].number()));
}

/// One queue pair fails or is destroyed. The others still work, and no buffer with a message is lost.
pub fn shared_receives_outlive_a_queue_pair(fabric: &dyn Fabric) {
    let Some(mut shared) = SharedReceives::new(fabric, 3, 8) else { return };
    (0..8).for_each(|buffer| shared.post(buffer));
    shared.send(0, b"of one that goes");
    let gone = shared.pairs.remove(0);
    gone.to_error();
    drop(gone);
    let completion = shared.receiver.wait();
    assert_eq!((completion.wr_id, completion.status), (0, CompletionStatus::Success));
    assert_eq!(
        completion.queue_pair,
        QueuePairNumber(0),
        "no queue pair that exists, because the number may be used again"
    );
    shared.post(0);
    shared.pairs[0].to_error();
    for round in 0..16u64 {
        let message = pattern(round, 100);
        shared.send(2, &message);
        let buffer = shared.expect(1, &message);
        shared.post(buffer);
    }
}

/// Queue pairs are destroyed while messages arrive. Each receive that they had taken completes, so its buffer
/// can be posted again.
pub fn shared_receives_of_destroyed_queue_pairs_complete(fabric: &dyn Fabric) {
    const LONG: usize = 4 << 20;
    const BUFFERS: u64 = 4;
    let Some(mut shared) = SharedReceives::with_memory(fabric, 1, BUFFERS as u32, LONG * BUFFERS as usize)
    else {
        return;
    };
    let post = |shared: &SharedReceives, buffer: u64| {
        let into = [shared.receiver.segment(buffer as usize * LONG, LONG)];
        shared.queue.post_receive(&[ReceiveRequest { wr_id: buffer, into: &into }]).unwrap();
    };
    let give_back = |shared: &SharedReceives| {
        let mut completions = [WorkCompletion::EMPTY; 8];
        let count = shared.receiver.queue.poll(&mut completions);
        for completion in &completions[..count] {
            assert_ne!(completion.queue_pair, shared.pairs[0].number(), "{completion:?}");
            post(shared, completion.wr_id);
        }
    };
    (0..BUFFERS).for_each(|buffer| post(&shared, buffer));
    let message = vec![1; LONG];
    for round in 0..10 {
        shared.receiver.fill(0, &vec![0; LONG * BUFFERS as usize]);
        let domain = Arc::clone(&shared.receiver.domain);
        shared.connect(&*domain);
        let receiver = shared.pairs.pop().unwrap();
        let begun = |buffer| shared.receiver.content(buffer as usize * LONG, 1) == [1];
        std::thread::scope(|scope| {
            // Some devices send within the call.
            scope.spawn(|| shared.start(1, &message));
            wait_until("the first bytes", || {
                give_back(&shared);
                (0..BUFFERS).any(begun)
            });
            if round % 2 == 0 {
                receiver.to_error();
            }
            drop(receiver);
        });
        shared.senders.pop();
        give_back(&shared);
    }
    // Without a receive, a message would wait for ever.
    for _ in 0..BUFFERS {
        shared.start(0, b"one of the others");
        let mut arrived = false;
        wait_until("a message over another connection", || {
            let mut completion = [WorkCompletion::EMPTY; 1];
            if shared.receiver.queue.poll(&mut completion) == 1 {
                if completion[0].queue_pair == shared.pairs[0].number() {
                    assert_eq!(completion[0].status, CompletionStatus::Success);
                    arrived = true;
                } else {
                    post(&shared, completion[0].wr_id);
                }
            }
            arrived
        });
        assert_eq!(wait(&*shared.sender.queue).wr_id, 0);
    }
}

/// A buffer that is too short fails the queue pair that used it, and no other.
pub fn shared_receive_too_short(fabric: &dyn Fabric) {
    let Some(shared) = SharedReceives::new(fabric, 2, 8) else { return };
    shared.post(0);
    shared.post(1);
    shared.start(0, &[7; BUFFER + 1]);
    assert_ne!(wait(&*shared.sender.queue).status, CompletionStatus::Success);
    let completion = shared.receiver.wait();
    assert_eq!((completion.wr_id, completion.queue_pair), (0, shared.pairs[0].number()));
    assert_ne!(completion.status, CompletionStatus::Success);
    assert_eq!(shared.pairs[0].state(), QueuePairState::Error);
    shared.send(1, b"fits");
    assert_eq!(shared.expect(1, b"fits"), 1);
}

/// With buffers of a domain other than the queue pair's, the message arrives, or both ends fail, as
/// [`create_sharing_queue_pair`](tonic_rdma_verbs::ProtectionDomain::create_sharing_queue_pair) describes.
pub fn shared_receive_of_another_domain(fabric: &dyn Fabric) {
    let Some(mut shared) = SharedReceives::new(fabric, 0, 8) else { return };
    let other = shared.receiver.context.alloc_protection_domain().unwrap();
    shared.connect(&*other);
    shared.post(2);
    shared.start(0, b"across");
    let sent = wait(&*shared.sender.queue).status;
    if sent == CompletionStatus::Success {
        assert_eq!(shared.expect(0, b"across"), 2);
        return;
    }
    let mut completion = [WorkCompletion::EMPTY; 1];
    wait_until("the Error state", || {
        shared.receiver.queue.poll(&mut completion);
        shared.receiver.context.handle_events();
        shared.pairs[0].state() == QueuePairState::Error
    });
    assert_eq!(shared.receiver.content(2 * BUFFER, 6), [0; 6], "nothing was written");
}

/// A shared receive queue of another device is refused.
pub fn shared_receive_queue_of_another_device(fabric: &dyn Fabric) {
    let Some(shared) = SharedReceives::new(fabric, 0, 8) else { return };
    let soft = tonic_rdma_verbs::soft::open().unwrap();
    let domain = soft.alloc_protection_domain().unwrap();
    let queue = soft.create_completion_queue(8).unwrap();
    let capacity = Options::default().capacity;
    assert!(domain.create_sharing_queue_pair(&queue, &queue, &shared.queue, &capacity).is_err());
    let own = &shared.receiver.queue;
    assert!(shared.receiver.domain.create_sharing_queue_pair(&queue, own, &shared.queue, &capacity).is_err());
}
