//! What a peer makes this side keep has a bound.

use std::sync::Arc;

use super::super::application::Flag;
use super::*;
use crate::grpc::core::ledger::Ledger;
use crate::grpc::frame::Frames;

/// Two ends that may hold `most` bytes, with 1000 calls and headers of 1000 bytes.
fn limited(most: u64, window: usize, has_windows: bool) -> CorePair {
    let limits = (1000, 1000, window);
    let devices =
        [Device { exposed: 100, ..Device::default() }, Device { exposed: 100, ..Device::default() }];
    let mut pair = CorePair::with_limit(0, [limits, limits], devices, [most; 2], has_windows);
    pair.settle();
    pair
}

/// Opens calls at the server, which answers each with 10 000 bytes if it may, and then goes on with the calls
/// that have waited. Returns the calls that wait.
fn answer(pair: &mut CorePair, streams: std::ops::RangeInclusive<u32>, waker: &Arc<Flag>) -> Vec<StreamKey> {
    let mut keys = Vec::new();
    for stream in streams {
        let peer = Peer::new().open(stream).flagged(Kind::Data, END, stream, &[]);
        peer.send(pair, SERVER).unwrap();
        let (key, _) = pair.ends[SERVER].core.next_accepted().unwrap();
        pair.ends[SERVER].core.send_headers(key, HeaderMap::new());
        keys.push(key);
    }
    keys.retain(|key| !reply(pair, *key, waker));
    keys
}

/// Answers a call with 10 000 bytes, if it may. Returns whether it has.
fn reply(pair: &mut CorePair, key: StreamKey, waker: &Arc<Flag>) -> bool {
    let core = &mut pair.ends[SERVER].core;
    let is_ready = core.poll_send_ready(key, &Waker::from(waker.clone())).is_ready();
    if is_ready {
        core.send_data(key, vec![1; 10_000].into(), true);
        core.release(key);
    }
    pair.transmit(SERVER);
    pair.ends[SERVER].sent.clear();
    is_ready
}

/// The sum over the calls of a client bounds what it does not give back, and what it takes no credit for.
#[test]
fn replies_to_a_client_that_takes_nothing_wait() {
    for gives_credit in [true, false] {
        let mut pair = limited(200_000, 16 << 10, true);
        if !gives_credit {
            pair.ends[SERVER].core.ledger.parts.spend(1 << 40);
        }
        let waker = Flag::new();
        let waiting = answer(&mut pair, 1..=30, &waker);
        let core = &pair.ends[SERVER].core;
        let queued = if gives_credit { 10_000 } else { 10_000 + Ledger::QUEUED_PART };
        assert_eq!((waiting.len(), core.ledger.sent()), (20, 10 * queued));
        assert_eq!(core.output.offers.len(), if gives_credit { 10 } else { 0 });
        if !gives_credit {
            continue;
        }
        waker.take();
        // Calls that the peer leaves untaken need not get fewer.
        Peer::new().plain(Kind::Taken, 0, &0_u64.to_le_bytes()).send(&mut pair, SERVER).unwrap();
        assert!(waker.take());
        assert_eq!(waiting.iter().filter(|key| reply(&mut pair, **key, &waker)).count(), 1);
    }
}

#[test]
fn a_server_that_gives_no_requests_back_gets_no_more_calls() {
    let mut pair = limited(100 << 10, 16 << 10, true);
    for stream in 1..=20 {
        let key = open_at_client(&mut pair);
        pair.ends[CLIENT].core.send_data(key, vec![1; 10_000].into(), true);
        pair.transmit(CLIENT);
        let answered = Peer::new().flagged(Kind::Headers, END, stream, &[]).send(&mut pair, CLIENT);
        // Later calls wait, so the server does not know them.
        let unknown = CallViolation::UnknownStream { kind: Kind::Headers, stream };
        assert_eq!(answered, if stream <= 6 { Ok(()) } else { Err(unknown) });
        pair.ends[CLIENT].core.release(key);
        pair.ends[CLIENT].sent.clear();
    }
    assert_eq!(pair.ends[CLIENT].core.output.offers.len(), 6);
    Peer::new().plain(Kind::Taken, 0, &0_u64.to_le_bytes()).send(&mut pair, CLIENT).unwrap();
    open_at_client(&mut pair);
    assert_eq!(pair.ends[CLIENT].core.streams.open_len(), 1);
}

#[test]
fn credit_alone_does_not_make_a_stream_offer_without_end() {
    let mut pair = pair();
    pair.ends[SERVER].device.exposed = 100;
    let credit = (1_u64 << 49).to_le_bytes();
    Peer::new().open(1).plain(Kind::Credit, 1, &credit).send(&mut pair, SERVER).unwrap();
    let (key, _) = pair.ends[SERVER].core.next_accepted().unwrap();
    pair.ends[SERVER].core.send_headers(key, HeaderMap::new());
    let part = Bytes::from(vec![1; 16 << 20]);
    for _ in 0..20 {
        pair.ends[SERVER].core.send_data(key, part.clone(), false);
        pair.transmit(SERVER);
        pair.ends[SERVER].sent.clear();
    }
    assert_eq!(pair.ends[SERVER].core.output.offers.len(), 4, "64 MiB");
    let taken: Vec<u8> = (0..2_u64).flat_map(u64::to_le_bytes).collect();
    Peer::new().plain(Kind::Taken, 0, &taken).send(&mut pair, SERVER).unwrap();
    pair.transmit(SERVER);
    assert_eq!(pair.ends[SERVER].core.output.offers.next(), 6);
}

#[test]
fn a_peer_that_reads_nothing_cannot_fill_the_memory() {
    let mut pair = pair();
    Peer::new().open(1).plain(Kind::Reset, 1, &[]).send(&mut pair, SERVER).unwrap();
    let refused = (0..200).find_map(|round| {
        let offers = (0..1000).fold(Peer::new(), |peer, index| peer.offer(1, round * 1000 + index, 10));
        offers.send(&mut pair, SERVER).err()
    });
    assert_eq!(refused, Some(CallViolation::Unread(1 << 17)));
}

/// A peer that knows windows of the connection keeps within them. Of another peer, the call ends that goes
/// beyond the bound.
#[test]
fn data_of_calls_that_are_not_read_has_a_bound() {
    let data = Bytes::from(vec![7; 16 << 10]);
    let send = |pair: &mut CorePair, stream| {
        let data = if pair.ends[SERVER].core.ledger.has_windows { &data[..4 << 10] } else { &data };
        let peer = Peer::new().open(stream).plain(Kind::Data, stream, data);
        peer.send(pair, SERVER).map(|()| pair.ends[SERVER].core.next_accepted().unwrap().0)
    };
    // Parts may have 16 KiB and one more frame.
    let mut pair = limited(128 << 10, 16 << 10, true);
    let keys = [1, 2, 3, 4].map(|stream| send(&mut pair, stream).unwrap());
    let drawn = CallViolation::ConnectionOverdrawn { kind: Kind::Data, left: -1024 };
    assert_eq!(send(&mut pair, 5), Err(drawn));

    // Twice the limit, and one more frame.
    let mut pair = limited(26 << 10, 16 << 10, false);
    assert_eq!(keys, [1, 2, 3, 4].map(|stream| send(&mut pair, stream).unwrap()));
    let refused = send(&mut pair, 5).unwrap();
    let core = &mut pair.ends[SERVER].core;
    assert_eq!(*core.control.resets(), [(5, ResetCode::ResourceExhausted)]);
    let fault = core.poll_part(refused, None);
    assert!(matches!(fault, Poll::Ready(Some(Err(CallFault::NoMemory { .. })))), "{fault:?}");
    // The others go on, and their memory comes back when they are read or dropped.
    assert_eq!(core.poll_part(keys[0], None), Poll::Ready(Some(Ok(Part::Data(data.clone())))));
    keys[1..].iter().for_each(|key| core.release(*key));
    core.release(refused);
    assert_eq!(core.ledger.parts.held, 0);
    let key = send(&mut pair, 6).unwrap();
    let core = &mut pair.ends[SERVER].core;
    assert_eq!(core.poll_part(key, None), Poll::Ready(Some(Ok(Part::Data(data.clone())))));
}

/// What is taken, and what is dropped, gives the peer credit again: for calls that are gone, too.
#[test]
fn all_that_a_peer_has_sent_gives_it_credit_again() {
    let mut pair = limited(64 << 10, 16 << 10, true);
    let rounds = 1..200;
    for stream in rounds {
        let peer = Peer::new().open(stream).plain(Kind::Data, stream, &[7; 2000]);
        let peer = peer.offer(stream, u64::from(stream) - 1, 10);
        // Parts of a call that the peer has reset are dropped, and those of one that it has not as well.
        let peer = if stream % 2 == 0 { peer.plain(Kind::Reset, stream, &[]) } else { peer };
        peer.plain(Kind::Data, stream, &[7; 1000]).send(&mut pair, SERVER).unwrap();
        let (key, _) = pair.ends[SERVER].core.next_accepted().unwrap();
        pair.ends[SERVER].core.release(key);
        pair.transmit(SERVER);
        pair.ends[SERVER].sent.clear();
    }
    assert!(pair.ends[SERVER].core.ledger.is_empty());
}

/// Pieces of offers cost the peer 4 bytes each.
#[test]
fn pieces_of_offers_have_a_bound() {
    let offer = |id: u64, pieces: usize| {
        let piece = OfferSegment::Inline(Bytes::from_static(b"x"));
        let mut payload = Vec::new();
        let segments = vec![piece; pieces];
        ContentOffer { id, total: pieces as u64, aligned_at: 0, segments }.encode(&mut payload);
        payload
    };
    let many = to_server(Peer::new().open(1).plain(Kind::Offer, 1, &offer(0, 257)));
    assert_eq!(many, Err(CallViolation::Offer("more than 256 segments")));
    // A peer of version 3 knows no such bound.
    let mut old = limited(1 << 20, 64 << 10, false);
    Peer::new().open(1).plain(Kind::Offer, 1, &offer(0, 800)).send(&mut old, SERVER).unwrap();
    let mut pair = limited(1 << 20, 64 << 10, true);
    let sent = (0..10_000).find_map(|id| {
        let stream = 1 + (id / 15) as u32;
        let peer = if id % 15 == 0 { Peer::new().open(stream) } else { Peer::new() };
        peer.plain(Kind::Offer, stream, &offer(id, 256))
            .send(&mut pair, SERVER)
            .err()
            .map(|error| (id, error))
    });
    // The connection has 128 KiB for parts.
    assert!(
        matches!(sent, Some((8, CallViolation::ConnectionOverdrawn { kind: Kind::Offer, .. }))),
        "{sent:?}"
    );
}

/// No call waits for a call that waits for it: a stream that is not read leaves credit to others.
#[test]
fn a_stream_that_is_not_read_leaves_others_a_half() {
    let mut pair = limited(256 << 10, 1 << 20, true);
    let keys = [open_at_client(&mut pair), open_at_client(&mut pair)];
    let send = |pair: &mut CorePair, key| {
        (0..100).for_each(|_| pair.ends[CLIENT].core.send_data(key, vec![1; 1000].into(), false));
        pair.transmit(CLIENT);
        pair.settle();
    };
    send(&mut pair, keys[0]);
    let core = &mut pair.ends[SERVER].core;
    let [first, second] = [(); 2].map(|()| core.next_accepted().unwrap().0);
    assert!(core.poll_part(first, None).is_ready());
    pair.transmit(SERVER);
    send(&mut pair, keys[1]);
    for part in 0..100 {
        let taken = pair.ends[SERVER].core.poll_part(second, None);
        assert!(matches!(taken, Poll::Ready(Some(Ok(_)))), "part {part}: {taken:?}");
        pair.transmit(SERVER);
        pair.settle();
    }
    assert!(pair.ends[SERVER].core.ledger.parts.held > 15 << 10, "the first call is not read");
}

/// A call whose own offers wait for the peer stops itself, and goes on with what the peer takes.
#[test]
fn a_stream_that_the_peer_does_not_take_stops_before_others() {
    let mut pair = limited(400_000, 64 << 10, true);
    let waker = Flag::new();
    let open = |pair: &mut CorePair, stream| {
        Peer::new()
            .open(stream)
            .plain(Kind::Credit, stream, &(1_u64 << 40).to_le_bytes())
            .send(pair, SERVER)
            .unwrap();
        let (key, _) = pair.ends[SERVER].core.next_accepted().unwrap();
        pair.ends[SERVER].core.send_headers(key, HeaderMap::new());
        key
    };
    let send = |pair: &mut CorePair, key| {
        let core = &mut pair.ends[SERVER].core;
        let is_ready = core.poll_send_ready(key, &Waker::from(waker.clone())).is_ready();
        if is_ready {
            core.send_data(key, vec![1; 30_000].into(), false);
            pair.transmit(SERVER);
        }
        is_ready
    };
    let keys = [open(&mut pair, 1), open(&mut pair, 2)];
    // A half of 200 000 bytes each.
    assert_eq!(keys.map(|key| (0..10).filter(|_| send(&mut pair, key)).count()), [4, 4]);
    waker.take();
    Peer::new().plain(Kind::Taken, 0, &0_u64.to_le_bytes()).send(&mut pair, SERVER).unwrap();
    assert!(waker.take());
    assert!(send(&mut pair, keys[0]) && !send(&mut pair, keys[1]));
}

/// A call that waits for credit for its headers may wait for a call that has still to send.
#[test]
fn requests_whose_headers_wait_stop_no_sender() {
    let mut pair = limited(4 * 3000, 16 << 10, true);
    let keys: Vec<_> = (0..20).map(|_| open_at_client(&mut pair)).collect();
    keys[5..].iter().for_each(|key| pair.ends[CLIENT].core.send_data(*key, vec![1; 4000].into(), true));
    pair.transmit(CLIENT);
    let core = &mut pair.ends[CLIENT].core;
    assert!(!core.ledger.headers.has_credit() && core.ledger.sent() == 0);
    assert!(core.poll_send_ready(keys[0], Waker::noop()).is_ready());
}

/// A field of 500 bytes in headers counts 500 and the length of its name, and 32 twice.
fn long_field() -> HeaderMap {
    HeaderMap::from_iter([("n".parse().unwrap(), "v".repeat(500).parse().unwrap())])
}

/// The headers of requests count until their handlers are gone.
#[test]
fn headers_of_requests_have_a_bound() {
    // 1691 bytes each: the path of 6 bytes, the name, the value, 32 twice, 96 for a field, and 1024.
    for (has_windows, refused) in [(true, None), (false, Some(ResetCode::ResourceExhausted))] {
        let mut pair = limited(4 * 16_000, 16 << 10, has_windows);
        let mut peer = Peer::new();
        let mut open = |pair: &mut CorePair, stream| {
            let block = peer.block(long_field());
            Peer::new().plain(Kind::Headers, stream, &block).send(pair, SERVER)?;
            Ok(pair.ends[SERVER].core.next_accepted().map(|(key, _)| key))
        };
        let keys: Vec<_> = (1..=10).map(|stream| open(&mut pair, stream).unwrap().unwrap()).collect();
        assert_eq!(pair.ends[SERVER].core.ledger.headers.held, 10 * 1691);
        // The handler of a call that was reset still has the headers.
        Peer::new().plain(Kind::Reset, 1, &[]).send(&mut pair, SERVER).unwrap();
        let beyond = open(&mut pair, 11);
        let Some(code) = refused else {
            let left = 16_000 - 16_910;
            let drawn = CallViolation::ConnectionOverdrawn { kind: Kind::Headers, left };
            assert_eq!(beyond, Err(drawn));
            continue;
        };
        assert_eq!(beyond, Ok(None));
        let core = &mut pair.ends[SERVER].core;
        assert_eq!(*core.control.resets(), [(11, code)]);
        core.release(keys[0]);
        assert!(open(&mut pair, 12).unwrap().is_some());
        let core = &mut pair.ends[SERVER].core;
        keys[1..].iter().for_each(|key| core.release(*key));
        assert_eq!(core.ledger.headers.held, 1691);
    }
}

#[test]
fn headers_and_trailers_of_responses_that_are_not_taken_have_a_bound() {
    let mut pair = limited(4 * 3000, 16 << 10, false);
    let keys = [1, 2, 3].map(|_| open_at_client(&mut pair));
    let mut peer = Peer::new();
    let mut answer = |pair: &mut CorePair, kind, stream| {
        let mut block = Vec::new();
        peer.encoder.fields(&long_field(), &mut block);
        Peer::new().plain(kind, stream, &block).send(pair, CLIENT).unwrap();
    };
    answer(&mut pair, Kind::Headers, 1);
    answer(&mut pair, Kind::Headers, 2);
    let core = &mut pair.ends[CLIENT].core;
    assert_eq!(core.ledger.headers.held, 2 * 1653);
    core.control.resets().clear();
    answer(&mut pair, Kind::Headers, 3);
    let core = &mut pair.ends[CLIENT].core;
    assert_eq!(*core.control.resets(), [(3, ResetCode::ResourceExhausted)]);
    let refused = core.poll_headers(keys[2], None);
    assert!(matches!(refused, Poll::Ready(Err(CallFault::NoMemory { length: 533, .. }))), "{refused:?}");
    // Headers that are taken leave room for the trailers.
    assert_eq!(core.poll_headers(keys[0], None), Poll::Ready(Ok(long_field())));
    answer(&mut pair, Kind::Trailers, 1);
    let core = &mut pair.ends[CLIENT].core;
    assert_eq!(core.ledger.headers.held, 2 * 1653);
    let trailers = core.poll_part(keys[0], None);
    assert_eq!(trailers, Poll::Ready(Some(Ok(Part::Trailers(long_field())))));
    keys.into_iter().for_each(|key| core.release(key));
    assert_eq!(core.ledger.headers.held, 0);
}

/// Calls that have no credit wait, in their order, and trailers do not wait for data of other calls.
#[test]
fn calls_wait_for_credit_and_trailers_wait_for_no_data() {
    let mut pair = limited(4 * 16_000, 16 << 10, true);
    let keys: Vec<_> = (0..40).map(|_| open_at_client(&mut pair)).collect();
    let mut served = 0;
    while served < keys.len() {
        pair.settle();
        let core = &mut pair.ends[SERVER].core;
        let accepted: Vec<_> = std::iter::from_fn(|| core.next_accepted()).map(|(key, _)| key).collect();
        assert!((1..=16).contains(&accepted.len()), "{} calls", accepted.len());
        for accepted in accepted {
            let core = &mut pair.ends[SERVER].core;
            core.send_headers(accepted, HeaderMap::new());
            // The data of the first calls is not read, so it uses up the window of the connection.
            if served < 10 {
                core.send_data(accepted, vec![1; 3000].into(), false);
            }
            core.send_trailers(accepted, HeaderMap::new());
            core.release(accepted);
            pair.transmit(SERVER);
            pair.settle();
            let core = &mut pair.ends[CLIENT].core;
            assert!(matches!(core.poll_headers(keys[served], None), Poll::Ready(Ok(_))), "call {served}");
            if served >= 10 {
                let taken = core.poll_part(keys[served], None);
                assert!(
                    matches!(taken, Poll::Ready(Some(Ok(Part::Trailers(_))))),
                    "call {served}: {taken:?}"
                );
                core.release(keys[served]);
            }
            pair.transmit(CLIENT);
            served += 1;
        }
    }
    assert!(!pair.ends[SERVER].core.ledger.parts.has_credit());
}

/// The last frame of a response frees the headers of its request. The credit for them does not wait for another
/// frame of the peer, which may have no credit to send one.
#[test]
fn credit_that_is_due_with_the_end_of_a_response_goes_out_at_once() {
    let mut pair = limited(4 * 3000, 16 << 10, true);
    Peer::new().open(1).open(2).send(&mut pair, SERVER).unwrap();
    let core = &mut pair.ends[SERVER].core;
    let (key, _) = core.next_accepted().unwrap();
    core.send_headers(key, HeaderMap::new());
    core.send_trailers(key, HeaderMap::new());
    core.release(key);
    pair.transmit(SERVER);
    let is_credit = |message: Bytes| {
        let mut frames = Frames::new(message);
        std::iter::from_fn(|| frames.next_frame().unwrap())
            .any(|(header, _)| (header.kind, header.stream) == (Kind::Credit, 0))
    };
    assert!(pair.ends[SERVER].sent.drain(..).any(is_credit));
}

/// Responses that wait for credit which the peer does not give, and whose calls end, are gone: what they hold at
/// once, and their streams when half of those that wait have ended.
#[test]
fn calls_that_end_while_they_wait_for_credit_hold_nothing() {
    for is_part in [false, true] {
        let mut pair = limited(64 << 20, 64 << 10, true);
        let core = &mut pair.ends[SERVER].core;
        let window = if is_part { &mut core.ledger.parts } else { &mut core.ledger.headers };
        window.spend(1 << 40);
        let mut keys = Vec::new();
        for stream in 1..=100 {
            Peer::new().open(stream).send(&mut pair, SERVER).unwrap();
            let core = &mut pair.ends[SERVER].core;
            let (key, _) = core.next_accepted().unwrap();
            core.send_headers(key, HeaderMap::new());
            core.send_data(key, vec![1; 1000].into(), true);
            keys.push(key);
        }
        pair.transmit(SERVER);
        pair.ends[SERVER].sent.clear();
        let held = pair.ends[SERVER].core.ledger.headers.held;
        for stream in 1..=100 {
            // Every second handler ends before its call does.
            if stream % 2 == 0 {
                pair.ends[SERVER].core.release(keys[stream - 1]);
            }
            Peer::new().plain(Kind::Reset, stream as u32, &[]).send(&mut pair, SERVER).unwrap();
            let core = &mut pair.ends[SERVER].core;
            if stream % 2 != 0 {
                core.release(keys[stream - 1]);
            }
            assert_eq!(core.ledger.headers.held, held / 100 * (100 - stream as i64));
            assert!(core.streams.len() <= 2 * (100 - stream), "call {stream}: {}", core.streams.len());
        }
    }
}

/// A server that gives no credit may also end calls in order, while their requests wait.
#[test]
fn calls_that_the_server_ends_while_their_requests_wait_hold_nothing() {
    let mut pair = limited(64 << 20, 64 << 10, true);
    pair.ends[CLIENT].core.ledger.parts.spend(1 << 40);
    for stream in 1..=100 {
        let key = open_at_client(&mut pair);
        pair.ends[CLIENT].core.send_data(key, vec![1; 1000].into(), false);
        pair.transmit(CLIENT);
        pair.ends[CLIENT].sent.clear();
        let answer = Peer::new().plain(Kind::Headers, stream, &[]).plain(Kind::Trailers, stream, &[]);
        answer.send(&mut pair, CLIENT).unwrap();
        let core = &mut pair.ends[CLIENT].core;
        core.release(key);
        assert!(core.streams.len() <= 2, "call {stream}: {}", core.streams.len());
    }
}

/// Only a reader that waits gets the reserve of the connection. It gets it, although a stream whose reader does
/// not wait comes first.
#[test]
fn a_stream_whose_reader_does_not_wait_keeps_the_reserve_from_no_other() {
    let mut pair = limited(64 << 20, 1 << 20, true);
    pair.ends[SERVER].device = Device { refused: 100, reserve: 1 << 20, ..Device::default() };
    let peer = Peer::new().open(1).plain_offer(1, 0, 512 << 10).open(3).plain_offer(3, 1, 512 << 10);
    peer.send(&mut pair, SERVER).unwrap();
    let core = &mut pair.ends[SERVER].core;
    let keys = [(); 2].map(|()| core.next_accepted().unwrap().0);
    assert!(core.poll_part(keys[0], None).is_pending());
    assert!(core.poll_part(keys[1], Some(Waker::noop())).is_pending());
    pair.transmit(SERVER);
    assert_eq!(pair.ends[SERVER].fetches.len(), 1);
}
