//! Messages that are taken from the memory of the peer, and the charges of memory that a peer may have
//! mapped.

use std::sync::Weak;

use super::*;
use crate::QueuePairState;
use crate::soft::peers::message::Object;
use crate::soft::peers::received::Received;
use crate::soft::peers::segments::Offer;

/// Publishes a record that names addresses in the memory of the hostile process.
fn pull(hostile: &mut Hostile, victim: &Side, addresses: &[[u64; 3]], total: u64) {
    let flags = Flags::FIRST.with(Flags::LAST).with(Flags::PULL);
    let target = victim.remote(0);
    let payload = addresses.as_flattened();
    let length = payload.len() as u32 * 8;
    let record = Header {
        flags,
        length,
        total,
        address: target.address,
        key: target.rkey.0,
        ..header(Kind::Write, 0)
    };
    assert!(hostile.put(victim, &record, payload));
}

/// Makes the victim map the memory of the hostile process. Returns the number of the segment.
fn offered(hostile: &Hostile, victim: &Side) -> u64 {
    let memory = hostile.side.memory();
    let segments = Arc::clone(victim.core.segments().unwrap());
    let fd = memory.shared_fd().unwrap().try_clone_to_owned().unwrap();
    assert!(segments.map(memory.id(), MEMORY as u64, Received::new(fd, None)));
    memory.id()
}

#[test]
fn a_message_is_taken_from_mapped_memory() {
    let (mut hostile, victim) = Hostile::connected();
    let id = offered(&hostile, &victim);
    hostile.side.memory().copy_in(100, &[5; 64]).unwrap();
    pull(&mut hostile, &victim, &[[id, 100, 32], [id, 132, 32]], 64);
    victim.drain();
    let mut bytes = [0; 65];
    victim.memory().copy_out(0, &mut bytes).unwrap();
    assert_eq!((&bytes[..64], bytes[64]), (&[5; 64][..], 0));
    assert_eq!(victim.pair.state(), QueuePairState::Rts);
}

#[test]
fn impossible_places_end_the_connection() {
    let mut honest = Honest::connected();
    let end = MEMORY as u64;
    for case in 0..9 {
        let (mut hostile, victim) = Hostile::connected();
        let id = offered(&hostile, &victim);
        let (addresses, total): (Vec<[u64; 3]>, u64) = match case {
            0 => (vec![[id + 1_000_000, 0, 64]], 64),
            1 => (vec![[id, end - 32, 64]], 64),
            2 => (vec![[id, u64::MAX - 8, 64]], 64),
            3 => (vec![[id, 0, 32]], 64),
            4 => (vec![[id, 0, u64::MAX], [id, 0, 65]], 64),
            5 => (vec![[id, 0, 64], [id, 0, 0]], 64),
            6 => (vec![[id, 0, 1]; 33], 33),
            7 => (vec![], 64),
            _ => (vec![[id, end, 8]], 8),
        };
        pull(&mut hostile, &victim, &addresses, total);
        victim.drain();
        assert_eq!(victim.pair.state(), QueuePairState::Error, "case {case}");
        honest.exchange();
    }
}

/// The peer takes its memory back while the target has taken a part of a message: the target does not
/// complete the message.
#[test]
fn a_pull_from_withdrawn_memory_ends_the_connection() {
    let mut honest = Honest::connected();
    for ended in [false, true] {
        let (mut hostile, victim) = Hostile::connected();
        let id = offered(&hostile, &victim);
        victim.memory().copy_in(0, &[1; MEMORY]).unwrap();
        hostile.side.memory().copy_in(0, &[5; MEMORY]).unwrap();
        pull(&mut hostile, &victim, &[[id, 0, 64]], 64);
        if ended {
            // The peer's queue pair has ended, so it may use its memory again.
            hostile.side.pair.to_error();
        } else {
            victim.core.segments().unwrap().unmap(id);
        }
        victim.drain();
        assert_eq!(victim.pair.state(), QueuePairState::Error);
        let mut last = [0; 8];
        victim.memory().copy_out(56, &mut last).unwrap();
        assert_eq!(last, [1; 8], "the last word says that the message is complete");
        honest.exchange();
    }
}

/// A part of a budget that a test counts.
struct Charge;

/// Offers memory that has a charge to the peer of `side`.
fn offered_by(side: &Side) -> (Arc<HostMemory>, Arc<Offer>, Weak<Charge>) {
    let charge: Arc<Charge> = Arc::new(Charge);
    let watched = Arc::downgrade(&charge);
    let memory = Arc::new(HostMemory::shared(MEMORY, 4096).unwrap());
    memory.set_charge(charge);
    let connection = side.core.connection().unwrap();
    let offer = connection.peer.offer(&connection.address, &memory).unwrap();
    (memory, offer, watched)
}

/// Memory that a peer may have mapped stays charged until the peer has unmapped it, though it is gone in this
/// process.
#[test]
fn memory_stays_charged_until_it_is_unmapped() {
    let (a, b) = Side::connected();
    let (memory, offer, watched) = offered_by(&a);
    wait_for("the mapping", || offer.is_mapped());
    assert!(b.core.segments().unwrap().find(memory.id()).is_some());
    let id = memory.id();
    drop((memory, offer));
    wait_for("the charge", || watched.strong_count() == 0);
    assert!(b.core.segments().unwrap().find(id).is_none(), "the charge came back before the memory");
}

/// The last connection to a peer goes, while the peer has memory mapped.
#[test]
fn a_connection_that_goes_leaves_no_charge() {
    let (a, b) = Side::connected();
    let (memory, offer, watched) = offered_by(&a);
    wait_for("the mapping", || offer.is_mapped());
    drop((a, b, memory, offer));
    wait_for("the charge", || watched.strong_count() == 0);
}

/// The queue pair that the offer named is gone, and other connections to the peer continue.
#[test]
fn memory_of_an_earlier_connection_is_unmapped() {
    let honest = Honest::connected();
    let (a, b) = Side::connected();
    let (memory, offer, watched) = offered_by(&a);
    wait_for("the mapping", || offer.is_mapped());
    drop((a, b));
    drop((memory, offer));
    wait_for("the charge", || watched.strong_count() == 0);
    drop(honest);
}

/// The memory goes while the peer's queue pair is not connected back, so the peer can't confirm that it has
/// unmapped the memory.
#[test]
fn memory_is_unmapped_by_a_peer_that_connects_later() {
    let (a, b) = (Side::new(), Side::new());
    a.connect(&b);
    let (memory, offer, watched) = offered_by(&a);
    let segments = Arc::clone(b.core.segments().unwrap());
    let id = memory.id();
    wait_for("the mapping", || segments.find(id).is_some());
    drop((memory, offer));
    wait_for("the news", || segments.find(id).is_none());
    b.connect(&a);
    wait_for("the charge", || watched.strong_count() == 0);
}

/// The queue pair that the news name is gone before the peer's device takes the news, and another connection
/// continues.
#[test]
fn memory_is_unmapped_though_the_news_name_a_queue_pair_that_is_gone() {
    let honest = Honest::connected();
    let (a, b) = Side::connected();
    let (memory, offer, watched) = offered_by(&a);
    wait_for("the mapping", || offer.is_mapped());
    let connection = a.core.connection().unwrap();
    let (peer, gone) = (Arc::clone(&connection.peer), connection.address);
    drop((a, b));
    assert!(peer.offers.withdraw(memory.id()));
    peer.send(&gone, Object::Withdraw { id: memory.id() }, None).unwrap();
    drop((memory, offer));
    the_device().service.remind_later();
    wait_for("the charge", || watched.strong_count() == 0);
    drop(honest);
}
