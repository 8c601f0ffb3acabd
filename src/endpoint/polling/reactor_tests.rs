#![allow(clippy::unwrap_used, reason = "tests")]

#[path = "own_tests.rs"]
mod own_tests;

use super::*;
use crate::endpoint::polling::CallInFlight;
use crate::endpoint::polling::queue::tests::Silent;
use std::io::IoSlice;
use tonic_rdma_verbs::{
    Access, CompletionQueue, HostMemory, Operation, PathSettings, Payload, ProtectionDomain, QueuePair,
    QueuePairCapacity, QueuePairNumber, RemoteSegment, SendRequest, WorkCompletion, soft,
};

#[tokio::test]
async fn a_call_of_another_thread_looks_once() {
    let context = tonic_rdma_verbs::soft::open().unwrap();
    let reactor = Reactor::current(&context, &Config::default()).unwrap();
    let polls = || {
        let queue = reactor.assign();
        let before = queue.polling.polls.value();
        reactor.wait_as_caller(queue, Some(Instant::now()), || false);
        queue.polling.polls.value() - before
    };
    let call = CallInFlight::begin(&reactor);
    assert_eq!(polls(), 1, "the runtime does not poll when it is idle");
    reactor.idle();
    // A caller that other work keeps from its thread polls once, and so do those after a wait that brought
    // nothing.
    assert!((0..10_000).any(|_| polls() > 1));
    lock(&reactor.callers.pace).resume();
    let queue = reactor.assign();
    let before = queue.polling.polls.value();
    reactor.wait_as_caller(queue, Some(Instant::now() - 2 * waits::ALONE), || false);
    assert_eq!(queue.polling.polls.value() - before, 1, "the call has let other tasks run");
    let elsewhere = std::thread::scope(|scope| scope.spawn(polls).join().unwrap());
    assert_eq!(elsewhere, 1, "that thread may have tasks of another runtime");
    drop(call);
}

#[tokio::test]
async fn a_caller_asks_now_and_then_whether_another_thread_has_found_its_answer() {
    let context = tonic_rdma_verbs::soft::open().unwrap();
    let reactor = Reactor::current(&context, &Config::default()).unwrap();
    let mut done = false;
    let mut poll = poll_for(reactor.assign(), || true, &mut done);
    for _ in 1..waits::POLLS_PER_CLOCK_READ {
        assert_eq!(poll(), Observation::Nothing);
    }
    assert_eq!(poll(), Observation::Wanted);
    drop(poll);
    assert!(done);
}

#[tokio::test]
async fn a_poll_task_that_does_not_spin_learns_from_its_waits() {
    const HOUR: Duration = Duration::from_secs(3600);
    let context = tonic_rdma_verbs::soft::open().unwrap();
    let reactor = Reactor::current(&context, &Config::default()).unwrap();
    let (mut pace, mut now) = (Pace::new(HOUR), Instant::now());
    for _ in 0..9 {
        pace.begin(now);
        now += 2 * HOUR;
        pace.arrived(now);
    }
    lock(&reactor.spinner).pace = pace;
    assert_eq!(reactor.step(false), Step::Sleep, "all waits were long");
    let mut spinner = lock(&reactor.spinner);
    spinner.pace.arrived(Instant::now());
    assert!(!spinner.pace.budget(Instant::now()).is_zero(), "the last wait was short");
}

/// Counts its runs, and panics.
#[derive(Debug, Default)]
struct Panics(AtomicUsize);

impl Run for Panics {
    fn run(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
        std::panic::panic_any("as the test asked");
    }
}

#[tokio::test]
async fn work_that_panics_keeps_no_other_from_being_carried_out() {
    let context = soft::open().unwrap();
    let reactor = Reactor::current(&context, &Config::default()).unwrap();
    let works = [(); 3].map(|()| Arc::new(Panics::default()));
    works.iter().for_each(|work| reactor.leave(Arc::downgrade(work) as Weak<dyn Run>));
    reactor.step(false);
    assert_eq!(works.map(|work| work.0.load(Ordering::Relaxed)), [1; 3]);
}

#[tokio::test]
async fn connections_are_spread_over_the_queues_in_turn() {
    let context = tonic_rdma_verbs::soft::open().unwrap();
    let reactor = Reactor::current(&context, &Config::default().completion_queues(3)).unwrap();
    let assigned: Vec<&Arc<Queue>> = (0..6).map(|_| reactor.assign()).collect();
    for turn in 0..3 {
        assert!(Arc::ptr_eq(assigned[turn], assigned[turn + 3]));
        assert!(!Arc::ptr_eq(assigned[turn], assigned[(turn + 1) % 3]));
    }
}

#[tokio::test]
async fn a_queue_pair_gets_the_queue_with_the_most_room() {
    let context = tonic_rdma_verbs::soft::open().unwrap();
    let reactor = Reactor::current(&context, &Config::default().completion_queues(4)).unwrap();
    // As the calls of tensor links come between the links.
    for turn in 0..32 {
        let completions = if turn % 2 == 0 { 300 } else { 1400 };
        let make = |_| Ok::<_, VerbsError>(Arc::new(Silent(QueuePairNumber(turn))));
        reactor.assign().add(completions, make).unwrap().unwrap();
    }
    let expected: Vec<_> = reactor.queues.iter().map(|queue| queue.expected_completions()).collect();
    let (least, most) = (expected.iter().min().unwrap(), expected.iter().max().unwrap());
    assert!(most - least <= 1400, "{expected:?}");
}

#[tokio::test]
async fn a_runtime_has_one_reactor_for_each_way_of_polling() {
    let context = tonic_rdma_verbs::soft::open().unwrap();
    let reactor = |config: Config| Reactor::current(&context, &config).unwrap();
    let adaptive = reactor(Config::default());
    assert!(Arc::ptr_eq(&adaptive, &reactor(Config::default())));
    assert!(!Arc::ptr_eq(&adaptive, &reactor(Config::default().poll_mode(PollMode::Event))));
}

/// The software device's ring is full several times before all messages have arrived. The message that has no
/// more room is sent in parts, and no completion says that a part has moved. If the poll task slept
/// meanwhile, the rest would wait for the device's thread.
#[tokio::test]
async fn the_poll_task_polls_again_while_parts_of_messages_move() {
    let context = soft::open().unwrap();
    let reactor = Reactor::current(&context, &Config::default().poll_mode(PollMode::Event)).unwrap();
    // The device's thread may carry out a whole round while other work keeps this thread from its processor.
    assert!((0..50).any(|_| polls_again(&*context, &reactor)), "each step said that the poll task may sleep");
}

/// Sends messages to a peer, which is polled too. Returns whether a step said that the poll task is to poll
/// again.
fn polls_again(context: &dyn Context, reactor: &Reactor) -> bool {
    /// Bytes of all messages: many rings.
    const ALL: usize = 4 << 20;
    let other = context.create_completion_queue(16).unwrap();
    let (ours, _) = queue_pair(context, reactor.assign().completion_queue());
    let (theirs, domain) = queue_pair(context, &other);
    for (one, peer) in [(&ours, &theirs), (&theirs, &ours)] {
        one.to_rtr(&peer.local_address(), &PathSettings::default()).unwrap();
        one.to_rts(&PathSettings::default()).unwrap();
    }
    let memory = Arc::new(HostMemory::shared(ALL, 4096).unwrap());
    let region = domain.register(memory, Access::LOCAL_WRITE | Access::REMOTE_WRITE).unwrap();

    let part = vec![1; 128 << 10];
    let data = [IoSlice::new(&part)];
    let writes = (0..ALL).step_by(part.len()).map(|at| SendRequest {
        wr_id: 0,
        operation: Operation::Write {
            data: Payload::Inline(&data),
            remote: RemoteSegment { address: region.memory().address() + at as u64, rkey: region.rkey() },
            immediate: None,
        },
        signaled: false,
    });
    ours.post_send(&writes.collect::<Vec<_>>()).unwrap();
    let mut again = false;
    while region.memory().load_u64(ALL - 8).unwrap() == 0 {
        assert_eq!(other.poll(&mut [WorkCompletion::EMPTY]), 0);
        again |= reactor.step(false) == Step::Again;
    }
    assert_ne!(reactor.step(false), Step::Again, "nothing is left that moves");
    again
}

/// Makes a queue pair that is not connected yet, with completions on `queue`.
fn queue_pair(
    context: &dyn Context,
    queue: &Arc<dyn CompletionQueue>,
) -> (Arc<dyn QueuePair>, Arc<dyn ProtectionDomain>) {
    let capacity = QueuePairCapacity {
        send_requests: 32,
        receive_requests: 1,
        send_segments: 1,
        receive_segments: 1,
        inline: 128 << 10,
    };
    let domain = context.alloc_protection_domain().unwrap();
    let pair = domain.create_queue_pair(queue, queue, &capacity).unwrap();
    pair.to_init(Access::LOCAL_WRITE | Access::REMOTE_WRITE).unwrap();
    (pair, domain)
}
