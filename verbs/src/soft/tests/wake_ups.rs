//! A poller that sleeps is woken when something it waits for has come.

use rustix::event::{PollFd, PollFlags, Timespec};

use super::*;
use crate::soft::completion_queue::Queue;
use crate::soft::shared::attention::{Attention, Watch};
use crate::soft::shared::platform::Native;

/// Returns whether an event of `queue` comes within the time limit of a test.
fn event(queue: &Arc<dyn CompletionQueue>) -> bool {
    let descriptor = queue.event_fd();
    let mut waiting = [PollFd::new(&descriptor, PollFlags::IN)];
    let timeout = Timespec { tv_sec: TIMEOUT.as_secs() as i64, tv_nsec: 0 };
    rustix::event::poll(&mut waiting, Some(&timeout)).unwrap() == 1
}

/// Sends a message from `a` to `b`, so that the device of `b` knows that a thread polls.
fn exchange(a: &Side, b: &Side) {
    assert!(b.post_receive(1) && a.send(1, 10));
    let (mut ours, mut theirs) = (0, 0);
    wait_for("one message", || {
        ours += a.drain().len();
        theirs += b.drain().len();
        ours == 1 && theirs == 1
    });
}

/// The peer's request to check the records comes after a thread has polled them, because the device's thread
/// got no core before. From then on the peer would ask the device with each message, and each request would
/// cause the next.
#[test]
fn a_late_request_to_the_device_does_not_end_the_polling() {
    let (a, b) = Side::connected();
    let wants_device = || Attention::of_own::<Native>(b.core.end.attention_word()).wants(Attention::DEVICE);
    let device = the_device().service.queue_pair(b.pair.number().0).unwrap();
    // On a machine that is busy, the device's thread may take a message before this thread polls.
    wait_for("the device to leave the polling to this thread", || {
        exchange(&a, &b);
        device.carry_out();
        !wants_device()
    });
    // No thread polls, and a message waits.
    assert!(b.post_receive(2) && a.send(2, 10));
    device.carry_out();
    // If the device's thread was first, it may still be about to say so.
    wait_for("a request to the device", wants_device);
    assert_eq!(b.drain().len(), 1);
}

/// Returns whether the peer asks the device of `side` with each message, because no thread seems to poll.
fn wants_device(side: &Side) -> bool {
    Attention::of_own::<Native>(side.core.end.attention_word()).wants(Attention::DEVICE)
}

/// Writes a word to the memory of `b`. The completion is taken, and nothing of it is left.
fn write(a: &Side, b: &Side, take: impl FnOnce()) {
    let slices = [IoSlice::new(&[7; 8])];
    let data = Payload::Inline(&slices);
    assert!(a.post(Operation::Write { data, remote: b.remote(0), immediate: None }));
    take();
    wait_for("the WRITE", || {
        b.drain();
        !a.drain().is_empty()
    });
}

/// A thread that waits for a value in memory checks for records, and seldom polls the completion queue.
#[test]
fn progress_ends_requests_to_the_device() {
    let (a, b) = Side::connected();
    exchange(&a, &b);
    let mut ends = 0;
    for _ in 0..100 {
        write(&a, &b, || {
            b.core.want(Attention::DEVICE);
            b.pair.local().unwrap().progress();
            ends += u32::from(!wants_device(&b));
        });
    }
    // On a machine that is busy, the device's thread may take a record before this thread checks.
    assert!(ends > 0);
}

/// The device's thread comes while another thread carries out a record. That thread polls, so the peer need
/// not ask the device.
#[test]
fn a_request_to_the_device_during_a_visit_does_not_end_the_polling() {
    let (a, b) = Side::connected();
    exchange(&a, &b);
    let device = the_device().service.queue_pair(b.pair.number().0).unwrap();
    let any: Arc<dyn Any + Send + Sync> = Arc::clone(&device) as _;
    let pair = any.downcast::<SoftPair>().unwrap();
    let goes_on_polling = || {
        exchange(&a, &b);
        b.pair.local().unwrap().need_no_events();
        let mut polls = false;
        write(&a, &b, || {
            let inside = Arc::new(std::sync::Barrier::new(2));
            std::thread::scope(|scope| {
                scope.spawn(|| pair.visit_with_pause(&inside));
                inside.wait();
                scope.spawn(|| device.carry_out());
                wait_for("the device's thread", || !pair.is_watched());
                std::thread::sleep(Duration::from_millis(2));
                inside.wait();
            });
            polls = !wants_device(&b);
        });
        polls
    };
    // On a machine that is busy, the device's thread takes the record before the new thread runs, in most
    // rounds perhaps.
    assert!((0..200).any(|_| goes_on_polling()));
}

/// A thread that checks for records leaves the completions to a later poll. It polls.
#[test]
fn completions_that_are_left_do_not_end_the_polling() {
    let (a, b) = Side::connected();
    let device = the_device().service.queue_pair(b.pair.number().0).unwrap();
    let mut polled = 0;
    for _ in 0..100 {
        exchange(&a, &b);
        assert!(b.post_receive(1) && a.send(1, 10));
        b.pair.local().unwrap().progress();
        device.carry_out();
        polled += u32::from(!wants_device(&b));
        let mut messages = 0;
        wait_for("the message", || {
            a.drain();
            messages += b.drain().len();
            messages == 1
        });
    }
    // On a machine that is busy, the device's thread may take a message before this thread checks.
    assert!(polled > 0);
}

/// A sleeping poller gets one event for all messages that come before it has woken up.
#[test]
fn many_messages_wake_a_poller_once() {
    let (a, b) = Side::connected();
    exchange(&a, &b);
    for round in 0..3 {
        (0..8).for_each(|number| assert!(b.post_receive(number)));
        b.drain();
        b.queue.arm().unwrap();
        assert!(b.drain().is_empty());
        b.queue.acknowledge_events();
        b.queue.arm().unwrap();
        (0..8).for_each(|number| assert!(a.send(number, 10)));
        assert!(event(&b.queue), "round {round}: the poller sleeps");
        let events = Queue::of(&b.queue, &the_device()).unwrap().take_peers_events();
        // The device's thread asks anew if this thread is preempted for long.
        assert!(events < 8, "round {round}: {events} events for two times of arming");
        b.queue.acknowledge_events();
        let mut messages = 0;
        wait_for("the messages", || {
            a.drain();
            messages += b.drain().len();
            messages == 8
        });
    }
}

/// The receiver takes a message and sleeps again, before the sender looks once more whether it sleeps.
#[test]
fn one_message_makes_one_event() {
    let (a, b) = Side::connected();
    let queue = Queue::of(&b.queue, &the_device()).unwrap();
    for round in 0..3 {
        assert!(b.post_receive(round.into()));
        b.drain();
        b.queue.arm().unwrap();
        assert!(a.send(round, 10));
        assert!(event(&b.queue), "round {round}: the poller sleeps");
        b.queue.acknowledge_events();
        wait_for("the message", || b.drain().len() == 1);
        b.queue.arm().unwrap();
        assert!(b.drain().is_empty());
        queue.take_peers_events();
        wait_for("the Send", || a.drain().len() == 1);
        assert!(a.drain().is_empty());
        assert_eq!(queue.take_peers_events(), 0, "round {round}: events after the message was taken");
    }
}

/// The device's thread looks often after messages for which the peer has got no event, because perhaps no
/// thread of the peer polls, and seldom after others. If no thread takes them, the devices carry them out.
#[test]
fn only_messages_without_an_event_are_watched_often() {
    for sleeps in [false, true] {
        let (a, b) = Side::connected();
        assert!(b.post_receive(1));
        b.drain();
        if sleeps {
            b.queue.arm().unwrap();
        }
        assert!(a.send(1, 10));
        let watched = [Watch::Seldom, Watch::Often].map(|watch| a.core.guarded.is(watch));
        assert_eq!(watched, [true, !sleeps]);
        wait_for("the Send, although no thread of the peer polls", || !a.drain().is_empty());
    }
    // A peer that has slept lately and is awake gets no event.
    let is_seldom = || {
        let (a, b) = Side::connected();
        assert!(b.post_receive(1));
        b.queue.arm().unwrap();
        the_device().service.queue_pair(a.pair.number().0).unwrap().watch();
        b.queue.disarm();
        assert!(a.send(1, 10));
        let is_often = a.core.guarded.is(Watch::Often);
        wait_for("the Send, although no thread of the peer polls", || !a.drain().is_empty());
        !is_often
    };
    // On a machine that is busy, the peer has slept too long ago.
    assert!((0..100).any(|_| is_seldom()));
}

/// A poller of sends sleeps with nothing under way, then another thread posts a request. Each sleep is a new
/// request for an event, so the peer does not take the event of the sleep before for that of this one.
#[test]
fn each_sleep_of_a_poller_of_sends_is_a_request() {
    let (a, _b) = Side::connected_as(|| (Side::with_queues(true), Side::new()));
    let request = || Attention::of_own::<Native>(a.core.end.attention_word()).request();
    for round in 0..3 {
        let before = request();
        a.sends.arm().unwrap();
        assert_ne!(request(), before, "round {round}");
        a.sends.acknowledge_events();
    }
}

/// Another thread posts a Send while the poller sleeps, and the peer has no receive yet.
#[test]
fn a_request_that_waits_wakes_a_poller_that_sleeps() {
    let (a, b) = Side::connected();
    exchange(&a, &b);
    exchange(&b, &a);
    a.queue.arm().unwrap();
    assert!(a.drain().is_empty());
    a.queue.acknowledge_events();
    assert!(a.send(2, 10));
    assert!(b.post_receive(2));
    assert!(event(&a.queue), "the Send waits for ever");
    wait_for("the message", || {
        a.drain();
        !b.drain().is_empty()
    });
}

/// The bytes of a READ come as records, which the poller of the other queue takes.
#[test]
fn a_read_wakes_the_poller_of_its_own_queue() {
    let (a, b) = Side::connected_as(|| (Side::with_queues(true), Side::new()));
    exchange(&a, &b);
    exchange(&b, &a);
    let into = a.part(0, 64);
    // Private memory, which the peer does not map.
    let domain = Arc::clone(&b.core.domain);
    let memory = Arc::new(HostMemory::from_vec(vec![9; 64]));
    let key = domain.insert(&memory, &(0..64), all(), 0).unwrap();
    let remote = RemoteSegment { address: memory.address(), rkey: crate::Rkey(key) };
    let before = b.core.end.taken_word().load(Relaxed);
    a.sends.arm().unwrap();
    assert!(a.drain().is_empty());
    assert!(a.post(Operation::Read { into: &into, remote }));
    // The peer takes the request, and sends the bytes.
    wait_for("the request", || {
        b.drain();
        b.core.end.taken_word().load(Relaxed) == before + 64
    });
    // The peer has notified this side of its progress once it has nothing else to do.
    (0..4).for_each(|_| drop(b.drain()));
    // The event for the progress of the request has come. The poller checks and sleeps again.
    let mut completions = [WorkCompletion::EMPTY; 4];
    a.sends.acknowledge_events();
    a.sends.arm().unwrap();
    // On a machine that is busy, the device's thread has taken the bytes by now.
    if a.sends.poll(&mut completions) == 0 {
        // The poller of receives takes the bytes.
        assert_eq!(a.queue.poll(&mut completions), 0);
        assert!(event(&a.sends), "the READ is complete, and its poller sleeps");
        assert_eq!(a.sends.poll(&mut completions), 1);
    }
    assert_eq!(completions[0].status, CompletionStatus::Success);
    domain.remove_region(key, 0);
}

/// The last check before the sleep takes the bytes of a READ, after it has searched for completions.
#[test]
fn the_last_look_finds_a_read() {
    let (a, b) = Side::connected();
    exchange(&a, &b);
    exchange(&b, &a);
    let domain = Arc::clone(&b.core.domain);
    let memory = Arc::new(HostMemory::from_vec(vec![9; 64]));
    let key = domain.insert(&memory, &(0..64), all(), 0).unwrap();
    let remote = RemoteSegment { address: memory.address(), rkey: crate::Rkey(key) };
    for round in 0..4 {
        let before = b.core.end.taken_word().load(Relaxed);
        assert!(a.post(Operation::Read { into: &a.part(0, 64), remote }));
        wait_for("the request", || {
            b.drain();
            b.core.end.taken_word().load(Relaxed) > before
        });
        a.queue.arm().unwrap();
        let mut completions = [WorkCompletion::EMPTY; 4];
        if a.queue.poll(&mut completions) == 0 {
            assert!(event(&a.queue), "round {round}: the READ is complete, and its poller sleeps");
            assert_eq!(a.queue.poll(&mut completions), 1);
        }
        a.queue.acknowledge_events();
        // Polls take sends and receives first by turns.
        if round % 2 == 0 {
            assert_eq!(a.queue.poll(&mut completions), 0);
        }
    }
    domain.remove_region(key, 0);
}

/// A thread that waits for a value in memory takes a message, while the poller sleeps.
#[test]
fn progress_wakes_a_poller_that_sleeps() {
    let (a, b) = Side::connected();
    for value in 0..3 {
        assert!(b.post_receive(1));
        b.drain();
        b.queue.arm().unwrap();
        assert!(b.drain().is_empty());
        b.queue.acknowledge_events();
        // The peer does not see that the poller of this side sleeps: a hostile process, or one that checked
        // just before.
        let attention = b.core.end.attention_word().swap(0, Relaxed);
        assert!(a.send(value, 10));
        b.pair.local().unwrap().progress();
        b.core.end.attention_word().store(attention, Relaxed);
        assert!(event(&b.queue), "the message was taken, and the poller sleeps");
        assert_eq!(b.drain().len(), 1);
        b.queue.acknowledge_events();
        wait_for("the Send", || !a.drain().is_empty());
    }
}

/// An honest peer may post more READs than its peer serves at a time.
#[test]
fn many_reads_at_once() {
    let (a, b) = Side::connected();
    exchange(&a, &b);
    exchange(&b, &a);
    let domain = Arc::clone(&b.core.domain);
    let memory = Arc::new(HostMemory::from_vec((0..1 << 20).map(|at| (at / 4096) as u8).collect()));
    let key = domain.insert(&memory, &(0..1 << 20), all(), 0).unwrap();
    let reads = 400;
    for number in 0..reads {
        let remote =
            RemoteSegment { address: memory.address() + number % 256 * 4096, rkey: crate::Rkey(key) };
        assert!(a.post(Operation::Read { into: &a.part(number as usize % 16 * 4096, 4096), remote }));
    }
    let mut done = 0;
    wait_for("the READs", || {
        b.drain();
        for completion in a.drain() {
            assert_eq!(completion.status, CompletionStatus::Success, "after {done}");
            done += 1;
        }
        done == reads
    });
    domain.remove_region(key, 0);
}

/// A request fails on the queue of sends. The receives complete on a queue of their own, though no record
/// comes any more.
#[test]
fn receives_of_a_queue_pair_that_fails_are_flushed() {
    let (a, b) = Side::connected_as(|| (Side::with_queues(true), Side::new()));
    assert!(a.post_receive(1));
    assert!(a.drain().is_empty());
    a.queue.arm().unwrap();
    let mut completions = [WorkCompletion::EMPTY; 4];
    assert_eq!(a.queue.poll(&mut completions), 0);
    // Memory of another domain.
    let foreign = b.part(0, 8);
    let data = Payload::Registered(&foreign);
    assert!(a.post(Operation::Send { data, immediate: None }));
    assert_eq!(a.sends.poll(&mut completions), 1);
    assert_eq!(completions[0].status, CompletionStatus::LocalProtection);
    assert!(event(&a.queue), "the poller of receives sleeps");
    assert_eq!(a.queue.poll(&mut completions), 1);
    assert_eq!((completions[0].wr_id, completions[0].status), (1, CompletionStatus::WorkRequestFlushed));
    // A receive that comes later.
    assert!(a.post_receive(2));
    assert_eq!(a.queue.poll(&mut completions), 1);
}
