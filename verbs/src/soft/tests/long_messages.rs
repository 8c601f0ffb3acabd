//! Messages that are longer than the ring, between threads that poll words of their memory, and between
//! threads that poll.

use super::*;
use crate::soft::shared::attention::Watch;

/// Bytes of a message: many rings.
const LONG: usize = 4 << 20;

/// Makes two sides that are connected. The device's thread does nothing for them.
fn unassisted() -> (Side, Side) {
    let (a, b) = Side::connected();
    for side in [&a, &b] {
        the_device().service.remove_queue_pair(side.pair.number().0);
        // So nothing begins to guard the records of this side.
        side.core.guarded.ask(Watch::Often);
    }
    (a, b)
}

/// Has both sides poll words of their memory, more often than a long message has parts.
fn poll_words(a: &Side, b: &Side) {
    for _ in 0..10 * LONG as u64 / a.core.end.ring_bytes() {
        a.pair.local().unwrap().progress();
        b.pair.local().unwrap().progress();
    }
}

/// Returns memory that the peer can't map, so that messages from it go through the ring.
fn private(side: &Side, value: u8) -> Arc<dyn MemoryRegion> {
    side.domain.register(Arc::new(HostMemory::from_vec(vec![value; LONG])), all()).unwrap()
}

fn whole(region: &Arc<dyn MemoryRegion>) -> [LocalSegment; 1] {
    // SAFETY: no reference to the memory exists.
    unsafe { [LocalSegment::new(&**region, 0..LONG)] }
}

fn remote(region: &Arc<dyn MemoryRegion>) -> RemoteSegment {
    RemoteSegment { address: region.memory().address(), rkey: region.rkey() }
}

fn write(a: &Side, from: &Arc<dyn MemoryRegion>, into: &Arc<dyn MemoryRegion>) {
    let data = whole(from);
    let data = Payload::Registered(&data);
    assert!(a.post(Operation::Write { data, remote: remote(into), immediate: None }));
}

/// Polls once. Returns the number of completions, and whether a message moves.
fn poll(side: &Side) -> (usize, bool) {
    (side.queue.poll(&mut [WorkCompletion::EMPTY; 4]), side.queue.is_moving())
}

fn assert_is(region: &Arc<dyn MemoryRegion>, value: u8) {
    let mut bytes = vec![0; LONG];
    region.memory().copy_out(0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == value), "the message waits for a poll");
}

#[test]
fn a_write_goes_on_while_the_threads_look_at_words() {
    let (a, b) = unassisted();
    let (from, into) = (private(&a, 5), b.large(LONG, 0));
    write(&a, &from, &into);
    poll_words(&a, &b);
    assert_is(&into, 5);
    assert_eq!(a.drain().len(), 1);
}

#[test]
fn a_read_goes_on_while_the_threads_look_at_words() {
    let (a, b) = unassisted();
    let (into, from) = (a.large(LONG, 0), private(&b, 6));
    assert!(a.post(Operation::Read { into: &whole(&into), remote: remote(&from) }));
    poll_words(&a, &b);
    assert_is(&into, 6);
    assert_eq!(a.drain().len(), 1);
}

/// A thread that waits for a message knows from its polls that parts of the message come, or that none comes.
#[test]
fn polls_say_whether_a_message_moves() {
    let (a, b) = unassisted();
    let (from, into) = (private(&a, 7), b.large(LONG, 0));
    write(&a, &from, &into);
    for _ in 0..3 {
        assert_eq!(poll(&a), (0, false), "the peer has made no room");
    }
    let (mut moves, mut done) = ([0; 2], 0);
    while done == 0 {
        let (count, moving) = poll(&b);
        moves[0] += u64::from(moving);
        assert_eq!(count, 0);
        let moving;
        (done, moving) = poll(&a);
        moves[1] += u64::from(moving);
    }
    // A visit that takes the last parts reports no move, because nothing follows them.
    let least = LONG as u64 / a.core.end.ring_bytes() - 2;
    assert!(moves.iter().all(|count| *count >= least), "{moves:?}");
    assert_is(&into, 7);
    for side in [&a, &b] {
        assert_eq!(poll(side), (0, false), "there is nothing more");
    }
}
