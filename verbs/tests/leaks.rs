//! The software device must not leak descriptors, mappings or threads. This test is a separate binary,
//! because it counts those of the whole process.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use tonic_rdma_verbs::{
    Access, CompletionQueue, Context, HostMemory, LocalSegment, Operation, PathSettings, Payload,
    ProtectionDomain, QueuePair, QueuePairCapacity, ReceiveRequest, SendRequest, VerbsErrorKind,
    WorkCompletion, soft,
};

const ROUNDS: usize = 2000;

#[derive(Debug, PartialEq, Eq)]
struct Counts {
    descriptors: usize,
    mappings: usize,
    threads: usize,
}

impl Counts {
    fn now() -> Self {
        let entries = |path| std::fs::read_dir(path).unwrap().count();
        // Anonymous mappings are not counted, because they belong to the allocator.
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let mappings = maps.lines().filter(|line| line.contains("memfd:")).count();
        Self { descriptors: entries("/proc/self/fd"), mappings, threads: entries("/proc/self/task") }
    }

    /// Waits until the process has these counts. Some resources are freed a little later, such as the
    /// service's end of a closed socket.
    fn expect(&self) {
        let deadline = Instant::now() + Duration::from_secs(120);
        while Self::now() != *self {
            assert!(Instant::now() < deadline, "{:?}, not {self:?}", Self::now());
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

fn pair(domain: &Arc<dyn ProtectionDomain>, queue: &Arc<dyn CompletionQueue>) -> Arc<dyn QueuePair> {
    let capacity = QueuePairCapacity {
        send_requests: 16,
        receive_requests: 16,
        send_segments: 1,
        receive_segments: 1,
        inline: 64,
    };
    let pair = domain.create_queue_pair(queue, queue, &capacity).unwrap();
    pair.to_init(Access::from_bits_truncate(7)).unwrap();
    pair
}

/// Makes two queue pairs that are connected. On a busy machine the answer of the device may come too late;
/// then two others take their place.
fn connected(
    domain: &Arc<dyn ProtectionDomain>,
    queue: &Arc<dyn CompletionQueue>,
) -> [Arc<dyn QueuePair>; 2] {
    let (settings, mut tries) = (PathSettings::default(), 10);
    loop {
        let (a, b) = (pair(domain, queue), pair(domain, queue));
        let connect = |one: &Arc<dyn QueuePair>, other: &Arc<dyn QueuePair>| {
            one.to_rtr(&other.local_address(), &settings)?;
            one.to_rts(&settings)
        };
        match connect(&a, &b).and_then(|()| connect(&b, &a)) {
            Err(error) if tries > 1 && error.kind() == VerbsErrorKind::System => tries -= 1,
            connected => {
                connected.unwrap();
                return [a, b];
            }
        }
    }
}

fn connect_use_and_drop(context: &Arc<dyn Context>, queue: &Arc<dyn CompletionQueue>, round: usize) {
    let domain = context.alloc_protection_domain().unwrap();
    let memory = Arc::new(HostMemory::shared(8192, 4096).unwrap());
    let region = domain.register(memory, Access::from_bits_truncate(7)).unwrap();
    let [a, b] = connected(&domain, queue);
    // SAFETY: there is no reference to the memory.
    let segments = unsafe { [LocalSegment::new(&*region, 0..64), LocalSegment::new(&*region, 4096..4160)] };
    b.post_receive(&[ReceiveRequest { wr_id: 1, into: &segments[..1] }]).unwrap();
    let data = Payload::Registered(&segments[1..]);
    let send = SendRequest { wr_id: 2, operation: Operation::Send { data, immediate: None }, signaled: true };
    // At the end of some rounds a request still waits, a completion is not polled, or the queue pair is in
    // Error.
    let posted = [send; 3];
    a.post_send(&posted[..1 + round % 3]).unwrap();
    if round.is_multiple_of(4) {
        a.to_error();
    }
    if !round.is_multiple_of(5) {
        queue.poll(&mut [WorkCompletion::EMPTY; 8]);
    }
}

#[test]
fn connections_leak_nothing() {
    let before_all = Counts::now();
    let context = soft::open().unwrap();
    let queue = context.create_completion_queue(64).unwrap();
    // The thread that frees memory of peers begins with the first connection, and stays.
    let before = Counts::now();
    let before = Counts { threads: before.threads + 1, ..before };
    for round in 0..ROUNDS {
        connect_use_and_drop(&context, &queue, round);
    }
    before.expect();

    // An open connection costs mappings, and no descriptor.
    let domain = context.alloc_protection_domain().unwrap();
    let first = connected(&domain, &queue);
    // The first one connects the device with itself, by four sockets. The device's thread may still close
    // what it received.
    let with_one = Counts { descriptors: before.descriptors + 4, ..Counts::now() };
    with_one.expect();
    let many: Vec<_> = (0..512).map(|_| connected(&domain, &queue)).collect();
    Counts { mappings: with_one.mappings + 4 * 512, ..with_one }.expect();
    drop((first, many, domain));
    before.expect();
    assert_eq!(queue.poll(&mut [WorkCompletion::EMPTY; 8]), 0);
    drop(queue);
    drop(context);
    // So does the one that closes what may block, such as the device's socket.
    Counts { threads: before_all.threads + 2, ..before_all }.expect();
}
