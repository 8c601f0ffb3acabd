#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::collections::VecDeque;
use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::{Access, HostMemory, Lkey, MemoryRegion, Rkey};

/// A region of any address, to make segments from. No test reads or writes through it.
#[derive(Debug)]
struct Stub(Arc<HostMemory>, u32);

impl crate::sealed::Sealed for Stub {}

impl MemoryRegion for Stub {
    fn lkey(&self) -> Lkey {
        Lkey(self.1)
    }

    fn rkey(&self) -> Rkey {
        Rkey(self.1)
    }

    fn access(&self) -> Access {
        Access::LOCAL_READ
    }

    fn memory(&self) -> &Arc<HostMemory> {
        &self.0
    }

    fn range(&self) -> std::ops::Range<usize> {
        0..self.0.len()
    }
}

fn segment(key: u32, length: usize) -> LocalSegment {
    let stub = Stub(Arc::new(HostMemory::from_vec(vec![0; 1])), key);
    // SAFETY: the segment is only published, never used.
    unsafe { LocalSegment::new(&stub, 0..length) }
}

/// Creates a link for `receives`, mapped twice as in two processes.
fn both(receives: u32, segments: u32) -> (Link, Link) {
    let shape = Shape { receives, segments };
    let (owner, fd) = Link::create(shape, 42).unwrap();
    let peer = Link::import(&fd, shape).unwrap();
    (owner, peer)
}

/// One step of the owner or its peer.
#[derive(Clone, Debug)]
enum Move {
    Publish(Vec<u32>),
    Deliver { length: u64, immediate: Option<u32>, kind: u8 },
    Collect,
}

fn moves() -> impl Strategy<Value = Vec<Move>> {
    let publish = proptest::collection::vec(1u32..1000, 0..=3).prop_map(Move::Publish);
    let deliver = (0u64..1 << 40, any::<Option<u32>>(), 0u8..4)
        .prop_map(|(length, immediate, kind)| Move::Deliver { length, immediate, kind });
    proptest::collection::vec(prop_oneof![publish, deliver, Just(Move::Collect)], 0..300)
}

/// The content that the link should have.
struct Oracle {
    posted: VecDeque<Vec<u32>>,
    delivered: VecDeque<Delivery>,
    next: u32,
    taken: u32,
    collected: u32,
}

fn step(owner: &Link, peer: &Link, oracle: &mut Oracle, step: Move) {
    match step {
        Move::Publish(keys) if oracle.next.wrapping_sub(oracle.collected) < 5 => {
            let segments: Vec<_> = keys.iter().map(|key| segment(*key, *key as usize)).collect();
            owner.publish(oracle.next, &segments);
            oracle.next = oracle.next.wrapping_add(1);
            oracle.posted.push_back(keys);
        }
        Move::Publish(_) => {}
        Move::Deliver { length, immediate, kind } => {
            let expected = oracle.posted.pop_front();
            assert_eq!(peer.posted(oracle.taken), Ok(expected.as_ref().map(|keys| keys.len() as u32)));
            let Some(keys) = expected else { return };
            for (index, key) in keys.iter().enumerate() {
                let piece = peer.piece(oracle.taken, index as u32);
                assert_eq!((piece.key, piece.length), (*key, u64::from(*key)));
            }
            let kinds =
                [DeliveryKind::Send, DeliveryKind::Write, DeliveryKind::TooLong, DeliveryKind::Protection];
            let delivery = Delivery { kind: kinds[usize::from(kind)], length, immediate };
            peer.deliver(oracle.taken, &delivery);
            oracle.taken = oracle.taken.wrapping_add(1);
            oracle.delivered.push_back(delivery);
        }
        Move::Collect => {
            let found = owner.delivered(oracle.collected);
            match oracle.delivered.pop_front() {
                Some(delivery) => {
                    assert_eq!(found, Delivered::Message(delivery));
                    oracle.collected = oracle.collected.wrapping_add(1);
                }
                None => assert_eq!(found, Delivered::NotYet),
            }
        }
    }
}

proptest! {
    /// The link behaves like two queues, in every order of actions of the two sides.
    #[test]
    fn behaves_as_queues(moves in moves(), wraps in any::<bool>()) {
        let (owner, peer) = both(5, 3);
        // Numbers wrap after 2³² receives. By then every slot has been used.
        let start = if wraps { u32::MAX - 20 } else { 0 };
        let mut oracle = Oracle {
            posted: VecDeque::new(), delivered: VecDeque::new(), next: start, taken: start, collected: start,
        };
        for _ in 0..8 {
            step(&owner, &peer, &mut oracle, Move::Publish(vec![1]));
            step(&owner, &peer, &mut oracle, Move::Deliver { length: 1, immediate: None, kind: 0 });
            step(&owner, &peer, &mut oracle, Move::Collect);
        }
        for next in moves {
            step(&owner, &peer, &mut oracle, next);
        }
    }

    /// No value in a slot leads beyond the segment.
    #[test]
    fn garbage_stays_within_the_segment(words in proptest::collection::vec(any::<u64>(), 16), number in any::<u32>()) {
        let (owner, peer) = both(4, 3);
        owner.scribble(|index| words[index % words.len()]);
        let _ = owner.delivered(number);
        if let Ok(Some(segments)) = peer.posted(number) {
            prop_assert!(segments <= 3);
        }
        for index in [0, 1, 2, 3, u32::MAX] {
            let _ = peer.piece(number, index);
        }
        let _ = (owner.state(), peer.section(), owner.take_waiting());
    }
}

/// Receives and deliveries go from one thread to another, each with its own mapping.
#[test]
fn threads_see_receives_and_deliveries() {
    const ROUNDS: u32 = 100_000;
    let (owner, peer) = both(8, 1);
    let keys: Vec<_> = (0..64).map(|key| segment(key, key as usize)).collect();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for number in 0..ROUNDS {
                while peer.posted(number).unwrap().is_none() {
                    std::thread::yield_now();
                }
                let piece = peer.piece(number, 0);
                assert_eq!(u64::from(piece.key), piece.length);
                assert_eq!(piece.key, number % 64);
                let length = u64::from(number) * 3;
                peer.deliver(number, &Delivery { kind: DeliveryKind::Send, length, immediate: Some(number) });
            }
        });
        let mut next = 0;
        for collected in 0..ROUNDS {
            while next < ROUNDS && next - collected < 8 {
                owner.publish(next, &keys[next as usize % 64..][..1]);
                next += 1;
            }
            let delivery = loop {
                match owner.delivered(collected) {
                    Delivered::Message(delivery) => break delivery,
                    Delivered::NotYet => std::thread::yield_now(),
                    Delivered::Violation => panic!("a violation out of nothing"),
                }
            };
            assert_eq!(delivery.length, u64::from(collected) * 3);
            assert_eq!(delivery.immediate, Some(collected));
        }
    });
}

#[test]
fn states_never_go_back() {
    let (owner, peer) = both(1, 1);
    assert_eq!(peer.state(), LinkState::Waiting);
    owner.advance(LinkState::Ready);
    assert_eq!(peer.state(), LinkState::Ready);
    peer.advance(LinkState::Ended);
    owner.advance(LinkState::Ready);
    assert_eq!(owner.state(), LinkState::Ended);
}
