//! READs through the ring that are longer than the ring: the side that serves a READ has to continue each
//! time there is room again.

use std::sync::atomic::AtomicBool;
use std::thread;

use rustix::event::{PollFd, PollFlags, Timespec};

use super::*;
use crate::soft::device::PAST_CACHES;
use crate::soft::domain::Domain;
use crate::soft::shared::attention::Attention;
use crate::soft::shared::platform::Native;

/// Bytes of a READ: more than one visit of the device's thread serves.
const LONG: usize = 4 << 20;
/// Repetitions of a test whose threads are not always as fast as it needs them.
const ROUNDS: usize = 32;

/// Private memory, which the peer does not map. So each READ goes through the ring.
struct Private {
    domain: Arc<Domain>,
    memory: Arc<HostMemory>,
    key: u32,
}

impl Private {
    fn of(side: &Side, bytes: Vec<u8>) -> Self {
        let (domain, length) = (Arc::clone(&side.core.domain), bytes.len());
        let memory = Arc::new(HostMemory::from_vec(bytes));
        let key = domain.insert(&memory, &(0..length), all(), 0).unwrap();
        Self { domain, memory, key }
    }

    fn remote(&self) -> RemoteSegment {
        RemoteSegment { address: self.memory.address(), rkey: crate::Rkey(self.key) }
    }
}

impl Drop for Private {
    fn drop(&mut self) {
        self.domain.remove_region(self.key, 0);
    }
}

/// Reads memory of `b` into memory of `a`. This thread polls `a` only.
fn read(a: &Side, b: &Side) {
    let into = a.large(LONG, 0);
    // SAFETY: no reference to the memory exists.
    let segments = unsafe { [LocalSegment::new(&*into, 0..LONG)] };
    // Memory that was never touched, so that `b` is not faster than `a`. `a` maps it during the READ.
    let memory = Arc::new(HostMemory::shared(LONG, 4096).unwrap());
    memory.copy_in(LONG - 1, &[7]).unwrap();
    let region = b.domain.register(memory, all()).unwrap();
    let remote = RemoteSegment { address: region.memory().address(), rkey: region.rkey() };
    assert!(a.post(Operation::Read { into: &segments, remote }));
    let mut done = Vec::new();
    wait_for("the READ", || {
        done.extend(a.drain());
        !done.is_empty()
    });
    assert_eq!((done.len(), done[0].status), (1, CompletionStatus::Success));
    let mut last = [0];
    into.memory().copy_out(LONG - 1, &mut last).unwrap();
    assert_eq!(last, [7]);
}

/// The reader takes the bytes as fast as the device's thread puts them into the ring. So the ring is not full
/// at the end of a visit of that thread, and the reader has nothing to wake it for.
#[test]
fn a_long_read_needs_no_poll_of_the_peer() {
    for _ in 0..ROUNDS {
        let (a, b) = Side::connected();
        read(&a, &b);
    }
}

/// A thread that does not poll posts a READ. The device copies the bytes at once. The poller sleeps, and
/// learns of it by an event. So long a READ does not stay in the caches, so it is stored past them. Its
/// memory begins at no multiple of a line.
#[test]
fn a_read_longer_than_the_caches_arrives_whole() {
    const START: usize = 3;
    let length = PAST_CACHES as usize + 101;
    let bytes: Vec<u8> = (0..length).map(|at| (at ^ at >> 8 ^ at >> 16) as u8).collect();
    let (a, b) = Side::connected();
    let source = Private::of(&b, bytes.clone());
    let into = a.large(START + length + 1, 0);
    // SAFETY: no reference to the memory exists.
    let segments = unsafe { [LocalSegment::new(&*into, START..START + length)] };
    assert!(a.post(Operation::Read { into: &segments, remote: source.remote() }));
    let mut done = Vec::new();
    wait_for("the READ", || {
        done.extend(a.drain());
        !done.is_empty()
    });
    assert_eq!((done.len(), done[0].status), (1, CompletionStatus::Success));
    let mut arrived = vec![1; START + length + 1];
    into.memory().copy_out(0, &mut arrived).unwrap();
    assert!(arrived[START..START + length] == bytes);
    let around = [&arrived[..START], &arrived[START + length..]].concat();
    assert_eq!(around, [0; START + 1], "bytes beside the READ's memory");
}

#[test]
fn a_read_that_is_complete_at_once_wakes_the_poller() {
    let (a, b) = Side::connected();
    let (into, memory) = (a.large(4096, 0), Arc::new(HostMemory::from_vec(vec![7; 4096])));
    // SAFETY: no reference to the memory exists.
    let segments = unsafe { [LocalSegment::new(&*into, 0..4096)] };
    let region = b.domain.register(memory, all()).unwrap();
    let remote = RemoteSegment { address: region.memory().address(), rkey: region.rkey() };
    // The first READ maps the peer's memory.
    for _ in 0..3 {
        a.queue.arm().unwrap();
        assert_eq!(a.queue.poll(&mut [WorkCompletion::EMPTY; 4]), 0);
        assert!(a.post(Operation::Read { into: &segments, remote }));
        let descriptor = a.queue.event_fd();
        let mut waiting = [PollFd::new(&descriptor, PollFlags::IN)];
        let timeout = Timespec { tv_sec: TIMEOUT.as_secs() as i64, tv_nsec: 0 };
        assert_eq!(rustix::event::poll(&mut waiting, Some(&timeout)).unwrap(), 1, "no event");
        a.queue.acknowledge_events();
        wait_for("the READ", || !a.drain().is_empty());
    }
}

/// A READ at once brings the bytes without a completion, and refuses what an ordinary READ refuses.
#[test]
fn a_read_at_once_has_no_completion() {
    let (a, b) = Side::connected();
    let into = a.large(4096, 0);
    // SAFETY: no reference to the memory exists.
    let segments = unsafe { [LocalSegment::new(&*into, 8..4096)] };
    let memory = Arc::new(HostMemory::shared(8192, 4096).unwrap());
    memory.copy_in(100, &[7; 4088]).unwrap();
    let region = b.domain.register(Arc::clone(&memory), all()).unwrap();
    let at = |offset| RemoteSegment { address: memory.address() + offset, rkey: region.rkey() };
    // An ordinary READ maps the memory of the peer.
    wait_for("a READ at once", || {
        if a.pair.local().unwrap().read_at_once(&segments, at(100)) {
            return true;
        }
        assert!(a.post(Operation::Read { into: &segments, remote: at(0) }));
        wait_for("the READ", || !a.drain().is_empty());
        false
    });
    let mut arrived = [0; 4096];
    into.memory().copy_out(0, &mut arrived).unwrap();
    assert!(arrived[..8] == [0; 8] && arrived[8..] == [7; 4088]);
    assert!(a.drain().is_empty(), "no completion");
    assert!(!a.pair.local().unwrap().read_at_once(&segments, at(8192 - 4087)), "beyond the region");
    // SAFETY: no reference to the memory exists.
    let beyond = unsafe { [LocalSegment::new(&*into, 8..4097)] };
    assert!(!a.pair.local().unwrap().read_at_once(&beyond, at(100)), "beyond the own region");
    let remote = at(100);
    drop(region);
    assert!(!a.pair.local().unwrap().read_at_once(&segments, remote), "the owner has taken the memory back");
    b.pair.to_error();
    a.pair.to_error();
    assert!(!a.pair.local().unwrap().read_at_once(&segments, remote), "in Error");
}

/// As [`a_long_read_needs_no_poll_of_the_peer`], and the peer's poller sleeps whenever a poll has found
/// nothing.
#[test]
fn a_long_read_of_a_peer_that_sleeps() {
    for _ in 0..ROUNDS {
        let (a, b) = Side::connected();
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut completions = [WorkCompletion::EMPTY; 4];
                while !stop.load(Relaxed) {
                    b.queue.arm().unwrap();
                    b.queue.poll(&mut completions);
                    let descriptor = b.queue.event_fd();
                    let mut waiting = [PollFd::new(&descriptor, PollFlags::IN)];
                    let timeout = Timespec { tv_sec: TIMEOUT.as_secs() as i64 + 5, tv_nsec: 0 };
                    if rustix::event::poll(&mut waiting, Some(&timeout)).unwrap() == 0 {
                        // The READ hangs, too.
                        break;
                    }
                    b.queue.acknowledge_events();
                }
            });
            read(&a, &b);
            stop.store(true, Relaxed);
            // An event for the poller.
            assert!(b.post_receive(1) && a.send(1, 10));
        });
    }
}

/// The peer's thread polls when the request has come, and then computes for a long time. The device's thread
/// continues for it.
#[test]
fn a_long_read_of_a_peer_that_polls_once() {
    for _ in 0..ROUNDS {
        let (a, b) = Side::connected();
        let before = b.core.end.taken_word().load(Relaxed);
        thread::scope(|scope| {
            scope.spawn(|| {
                wait_for("the request", || {
                    b.drain();
                    b.core.end.taken_word().load(Relaxed) != before
                });
                b.drain();
            });
            read(&a, &b);
        });
    }
}

/// A READ of the peer waits for room in the ring of this side. A Send that waited for a receive begins. The
/// peer must still say when there is room for the READ.
#[test]
fn a_read_waits_longer_than_a_request() {
    let (mut hostile, victim) = Hostile::connected();
    let take = |hostile: &Hostile, position: u64| hostile.end().taken_word().store(position, Release);
    // The device's thread does not find the queue pair of the hostile process. So it takes none of the bytes.
    the_device().service.remove_queue_pair(hostile.side.pair.number().0);
    let memory = Private::of(&victim, vec![9; LONG]);
    let remote = memory.remote();
    let request =
        Header { total: LONG as u64, address: remote.address, key: remote.rkey.0, ..header(Kind::Read, 0) };
    assert!(hostile.put(&victim, &request, &[]));
    victim.drain();
    let waits = || Attention::of_own::<Native>(victim.core.end.attention_word()).wants(Attention::STUCK);
    assert!(waits(), "the READ has filled the ring");
    // Room for the Sends, and too little for the next bytes of the READ.
    take(&hostile, 2048);
    // Polls check for receives and sends first by turns.
    for round in 1..=2 {
        let before = victim.core.published.load(Relaxed);
        assert!(victim.send(1, 200));
        assert_eq!(victim.core.published.load(Relaxed), before, "the Send waits for a receive");
        hostile.end().posted_word().store(round, Release);
        assert_eq!(victim.queue.poll(&mut [WorkCompletion::EMPTY; 4]), 0);
        assert!(victim.core.published.load(Relaxed) > before, "the Send is in the ring");
        assert!(waits(), "round {round}: the READ waits, and the peer says nothing when there is room");
    }
    wait_for("the READ", || {
        take(&hostile, victim.core.published.load(Relaxed));
        victim.drain();
        !waits()
    });
    let bytes = victim.core.published.load(Relaxed);
    assert!(bytes > LONG as u64, "{bytes} bytes, and the READ waits for room no more");
}

/// Posts requests without a completion, until there are `count` or no slot is left. Returns how many.
fn post_silent(side: &Side, count: usize, operation: Operation<'_>) -> usize {
    let request = SendRequest { wr_id: REQUEST, operation, signaled: false };
    (0..count).take_while(|_| side.pair.post_send(&[request]).is_ok()).count()
}

/// The peer has taken none of the Sends when the READ completes. Their slots are free then, and are freed only
/// once.
#[test]
fn a_read_overtakes_sends_and_frees_their_slots() {
    const SLOTS: usize = 512;
    let (a, b) = Side::connected();
    let segments = a.part(64, 8);
    let read = Operation::Read { into: &segments, remote: b.remote(0) };
    let payload = [IoSlice::new(&[7; 8])];
    let send = Operation::Send { data: Payload::Inline(&payload), immediate: None };
    let write = Operation::Write { data: Payload::Inline(&payload), remote: b.remote(0), immediate: None };
    // An ordinary READ maps the memory of the peer.
    wait_for("a READ at once", || {
        assert!(a.post(read));
        wait_for("the READ", || !a.drain().is_empty());
        a.pair.local().unwrap().read_at_once(&segments, b.remote(0))
    });
    for ends_here in [false, false, true] {
        assert!((0..10).all(|wr_id| b.post_receive(wr_id)));
        for sends in [3, 7] {
            assert_eq!(post_silent(&a, sends, send), sends);
            assert!(a.post(read));
            let done = a.drain();
            assert_eq!((done.len(), done[0].opcode), (1, crate::CompletionOpcode::Read), "the READ is done");
        }
        if ends_here {
            b.pair.to_error();
            wait_for("the end", || {
                a.drain();
                a.pair.state() == crate::QueuePairState::Error
            });
            assert!(a.post(write), "the slots are free in Error");
            wait_for("the flushed request", || !a.drain().is_empty());
            return;
        }
        for _ in 0..2 {
            assert_eq!(post_silent(&a, SLOTS - 1, write), SLOTS - 1);
            assert!(a.post(write));
            assert_eq!(post_silent(&a, 1, write), 0, "more requests than slots");
            wait_for("the last WRITE", || {
                b.drain();
                !a.drain().is_empty()
            });
        }
    }
}
