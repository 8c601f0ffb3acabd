//! Connections of one process share what it may hold: none takes what another is to have.

use std::sync::Arc;

use super::super::application::Flag;
use super::*;
use crate::endpoint::HeldBudget;
use crate::grpc::frame::Frames;

const MIB: u64 = 1 << 20;

/// Two ends, of which the server's has a share of `budget`, and a limit that no test reaches.
fn sharing(budget: &Arc<HeldBudget>) -> CorePair {
    limited_and_sharing(256 * MIB, budget)
}

fn limited_and_sharing(limit: u64, budget: &Arc<HeldBudget>) -> CorePair {
    let limits = (1000, 16 << 10, 1 << 20);
    let devices =
        [Device { exposed: 100, ..Device::default() }, Device { exposed: 100, ..Device::default() }];
    let mut pair = CorePair::with_limit(0, [limits, limits], devices, [limit; 2], true);
    pair.settle();
    pair.ends[SERVER].core.ledger.set_share(budget.share());
    pair
}

/// Sends calls with 16 KiB each, which the server does not read, until one of them ends for want of memory.
/// Returns the streams that have not ended, with the number of the first that has.
fn fill(pair: &mut CorePair, first: u32) -> (Vec<StreamKey>, u32) {
    let mut keys = Vec::new();
    for stream in first..first + 900 {
        let peer = Peer::new().open(stream).plain(Kind::Data, stream, &[7; 16 << 10]);
        peer.send(pair, SERVER).unwrap();
        let core = &mut pair.ends[SERVER].core;
        let Some((key, _)) = core.next_accepted() else { return (keys, stream) };
        if core.control.resets().contains(&(stream, ResetCode::ResourceExhausted)) {
            let fault = core.poll_part(key, None);
            let Poll::Ready(Some(Err(CallFault::NoMemory { reason, .. }))) = fault else {
                panic!("{fault:?}")
            };
            assert!(reason.contains("RDMA_HELD_LIMIT"), "{reason}");
            core.release(key);
            return (keys, stream);
        }
        keys.push(key);
    }
    panic!("a connection holds what it likes");
}

#[test]
fn what_is_not_read_leaves_others_their_own() {
    let budget = HeldBudget::new(8 * MIB);
    let mut pairs = [(); 3].map(|()| sharing(&budget));
    let mut filled = pairs.each_mut().map(|pair| fill(pair, 1));
    // 1 MiB of its own, and the half, the fourth and the eighth of 5 MiB, each within some steps of 64 KiB.
    for (pair, most) in pairs.iter().zip([3.5, 2.25, 1.625]) {
        let held = pair.ends[SERVER].core.ledger.all_held() as f64 / MIB as f64;
        assert!(held <= most && held > most - 0.25, "{held} MiB of {most}");
    }
    // What one gives back is there for the others, and for its own next calls.
    let (keys, _) = &mut filled[0];
    keys.drain(..).for_each(|key| pairs[0].ends[SERVER].core.release(key));
    let more = fill(&mut pairs[2], filled[2].1 + 1);
    assert!(more.0.len() > 30, "{more:?}");
    assert!(fill(&mut pairs[0], filled[0].1 + 1).0.len() > 100);
}

/// A call that ended for want of memory costs the peer no credit.
#[test]
fn what_is_refused_gives_the_peer_credit_again() {
    let mut pair = limited_and_sharing(16 * MIB, &HeldBudget::new(1));
    let (_unread, last) = fill(&mut pair, 1);
    pair.transmit(SERVER);
    pair.ends[SERVER].sent.clear();
    let mut credit = 0;
    for stream in last + 1..=last + 250 {
        let peer = Peer::new().open(stream).plain(Kind::Data, stream, &[7; 16 << 10]);
        peer.send(&mut pair, SERVER).unwrap();
        if let Some((key, _)) = pair.ends[SERVER].core.next_accepted() {
            pair.ends[SERVER].core.release(key);
        }
        pair.transmit(SERVER);
        for message in std::mem::take(&mut pair.ends[SERVER].sent) {
            let mut frames = Frames::new(message);
            while let Some((header, payload)) = frames.next_frame().unwrap() {
                if (header.kind, header.stream) == (Kind::Credit, 0) {
                    let parts = frames.bytes(payload)[..8].try_into().unwrap();
                    credit += u64::from_le_bytes(parts);
                }
            }
        }
    }
    // Up to a half of the window of 2 MiB is not given back yet.
    let sent = 250 * (16 << 10);
    assert!(credit > sent - MIB, "{credit} bytes of {sent}");
}

/// Content waits at the peer, and a reader gets it part by part, whatever the process holds.
#[test]
fn a_reader_gets_its_message_by_and_by() {
    let budget = HeldBudget::new(1);
    let mut pair = sharing(&budget);
    // Room for the headers of one call more.
    let mut unread = fill(&mut pair, 1).0;
    pair.ends[SERVER].core.release(unread.pop().unwrap());
    let stream = 901;
    let message = 20 * MIB;
    Peer::new().open(stream).offer(stream, 0, message).send(&mut pair, SERVER).unwrap();
    let (key, _) = pair.ends[SERVER].core.next_accepted().unwrap();
    pair.ends[SERVER].core.deliver_landed(key, 1 << 30);
    let (flag, mut received) = (Flag::new(), 0);
    while received < message {
        let part = pair.ends[SERVER].core.poll_part(key, Some(&Waker::from(Arc::clone(&flag))));
        let Poll::Ready(Some(Ok(Part::Data(part) | Part::Message(part)))) = part else {
            assert!(part.is_pending(), "{part:?}");
            pair.transmit(SERVER);
            assert_eq!(pair.ends[SERVER].fetches(), 1, "after {received} bytes");
            pair.ends[SERVER].land_zeros(0);
            continue;
        };
        assert!(part.len() <= 512 << 10);
        received += part.len() as u64;
    }
}

/// Without a reader that waits, and beyond the part that a reader always gets, content waits until others hold
/// less, and the device is asked to be called again.
#[test]
fn content_waits_until_others_hold_less() {
    let budget = HeldBudget::new(4 * MIB);
    let mut other = sharing(&budget);
    let unread = fill(&mut other, 1).0;
    let mut pair = sharing(&budget);
    for stream in 1..=50 {
        Peer::new().open(stream).plain(Kind::Data, stream, &[7; 16 << 10]).send(&mut pair, SERVER).unwrap();
        pair.ends[SERVER].core.next_accepted().unwrap();
    }
    Peer::new().open(901).offer(901, 0, 4 * MIB).send(&mut pair, SERVER).unwrap();
    let (key, _) = pair.ends[SERVER].core.next_accepted().unwrap();
    assert!(pair.ends[SERVER].core.poll_part(key, None).is_pending());
    pair.transmit(SERVER);
    assert_eq!((pair.ends[SERVER].fetches(), pair.ends[SERVER].starved), (0, true));
    unread.into_iter().for_each(|key| other.ends[SERVER].core.release(key));
    pair.transmit(SERVER);
    assert!(pair.ends[SERVER].fetches() > 0 && !pair.ends[SERVER].starved);
}

/// Opens a call, and answers with 200 kB if its sender has not to wait. Returns whether it has answered.
fn answers(pair: &mut CorePair, stream: u32, waker: &Waker) -> bool {
    let peer = Peer::new().open(stream).flagged(Kind::Data, END, stream, &[]);
    peer.send(pair, SERVER).unwrap();
    let core = &mut pair.ends[SERVER].core;
    let (key, _) = core.next_accepted().unwrap();
    core.send_headers(key, HeaderMap::new());
    let is_ready = core.poll_send_ready(key, waker).is_ready();
    if is_ready {
        core.send_data(key, vec![1; 200_000].into(), true);
        pair.transmit(SERVER);
    }
    is_ready
}

/// Senders wait, too, and go on when another connection holds less.
#[test]
fn senders_wait_until_others_hold_less() {
    let budget = HeldBudget::new(4 * MIB);
    let mut other = sharing(&budget);
    let unread = fill(&mut other, 1).0;
    let mut pair = sharing(&budget);
    let flag = Flag::new();
    let waker = Waker::from(Arc::clone(&flag));
    let waiting = (1..100).find(|stream| !answers(&mut pair, *stream, &waker)).unwrap();
    assert!((waiting - 1) * 200_000 > 1 << 20, "{waiting} answers are this connection's own");
    flag.take();
    pair.transmit(SERVER);
    assert!(pair.ends[SERVER].starved && !flag.take());
    assert!(pair.ends[SERVER].core.has_much_to_send());
    unread.into_iter().for_each(|key| other.ends[SERVER].core.release(key));
    pair.transmit(SERVER);
    assert!(flag.take() && !pair.ends[SERVER].starved && !pair.ends[SERVER].core.has_much_to_send());
    assert!(answers(&mut pair, waiting + 1, &waker));
}

/// Another connection takes what there is between two looks at it. The sender is woken, or the device is asked.
#[test]
fn a_sender_is_not_forgotten_when_others_hold_more_meanwhile() {
    let budget = HeldBudget::new(16 * MIB);
    let (mut pair, mut other) = (sharing(&budget), budget.share());
    other.hold(16 * MIB, true);
    let flag = Flag::new();
    let waker = Waker::from(Arc::clone(&flag));
    (1..100).find(|stream| !answers(&mut pair, *stream, &waker)).unwrap();
    pair.transmit(SERVER);
    flag.take();
    other.hold(0, true);
    pair.transmit_and(SERVER, || assert!(other.hold(16 * MIB, true)));
    assert!(flag.take() || pair.ends[SERVER].starved);
}

/// Senders wait because this side has much to send. Then the peer takes some of it, and others hold much.
#[test]
fn a_sender_that_waits_for_its_peer_then_waits_for_others() {
    let budget = HeldBudget::new(16 * MIB);
    let (mut pair, mut other) = (limited_and_sharing(4 * MIB, &budget), budget.share());
    let flag = Flag::new();
    let waker = Waker::from(Arc::clone(&flag));
    (1..100).find(|stream| !answers(&mut pair, *stream, &waker)).unwrap();
    pair.transmit(SERVER);
    flag.take();
    other.hold(16 * MIB, true);
    let taken = [0_u64, 1].map(u64::to_le_bytes);
    Peer::new().plain(Kind::Taken, 0, taken.as_flattened()).send(&mut pair, SERVER).unwrap();
    assert!(!flag.take() && !pair.ends[SERVER].core.is_idle(), "transmits, so that the device is asked");
    pair.transmit(SERVER);
    assert!(pair.ends[SERVER].starved);
    other.hold(0, true);
    pair.transmit(SERVER);
    assert!(flag.take());
}

/// However much the process holds, what a connection sends, and one reader that stands still, leave it its calls.
#[test]
fn what_is_sent_and_one_slow_reader_leave_a_connection_its_calls() {
    const PART: usize = 16 << 10;
    let budget = HeldBudget::new(16 * MIB);
    let (mut pair, mut other) = (sharing(&budget), budget.share());
    other.hold(16 * MIB, true);
    let waiting = (1..100).find(|stream| !answers(&mut pair, *stream, Waker::noop())).unwrap();
    assert!(pair.ends[SERVER].core.ledger.sent() as u64 > MIB);
    let data = |pair: &mut CorePair, stream| {
        Peer::new().plain(Kind::Data, stream, &[7; PART]).send(pair, SERVER).unwrap();
    };
    let call = |pair: &mut CorePair, stream| {
        Peer::new().open(stream).send(pair, SERVER).unwrap();
        let (key, _) = pair.ends[SERVER].core.next_accepted().expect("its headers are held");
        data(pair, stream);
        let part = pair.ends[SERVER].core.poll_part(key, None);
        assert!(matches!(part, Poll::Ready(Some(Ok(Part::Data(_))))), "{part:?}");
        key
    };
    let slow = call(&mut pair, waiting + 1);
    while pair.ends[SERVER].core.streams[slow].receiving.allowance > PART as i64 {
        data(&mut pair, waiting + 1);
    }
    assert!(pair.ends[SERVER].core.streams[slow].receiving.unread as u64 > MIB - MIB / 16, "a full window");
    for stream in waiting + 2..waiting + 6 {
        call(&mut pair, stream);
    }
    assert!(!pair.ends[SERVER].core.control.has_resets());
}
