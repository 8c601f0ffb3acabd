//! What a peer makes this side keep has a bound.

use super::*;

/// Answers calls `streams` at the server, each with 10 000 bytes, which the client is to read.
fn answer(pair: &mut CorePair, streams: std::ops::RangeInclusive<u32>) {
    for stream in streams {
        Peer::new().open(stream).flagged(Kind::Data, END, stream, &[]).send(pair, SERVER).unwrap();
        let core = &mut pair.ends[SERVER].core;
        let Some((key, _)) = core.next_accepted() else { continue };
        core.send_headers(key, HeaderMap::new());
        core.send_data(key, vec![1; 10_000].into(), true);
        core.release(key);
        pair.transmit(SERVER);
        pair.ends[SERVER].sent.clear();
    }
}

#[test]
fn a_client_that_gives_no_responses_back_gets_no_more_calls() {
    let mut pair = pair();
    pair.ends[SERVER].device.room = 4096;
    answer(&mut pair, 1..=20);
    let core = &pair.ends[SERVER].core;
    // Three times the limit of 3 calls, and one.
    assert_eq!((core.streams.open_len(), core.output.offers.len()), (0, 10));
    let taken: Vec<u8> = (0..10_u64).flat_map(u64::to_le_bytes).collect();
    Peer::new().plain(Kind::Taken, 0, &taken).send(&mut pair, SERVER).unwrap();
    answer(&mut pair, 21..=22);
    assert_eq!(pair.ends[SERVER].core.output.offers.len(), 2);
}

#[test]
fn a_server_that_gives_no_requests_back_gets_no_more_calls() {
    let mut pair = pair();
    pair.ends[CLIENT].device.room = 4096;
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

#[test]
fn data_of_calls_that_are_not_read_has_a_bound() {
    let mut pair = pair();
    // 8 windows of 16 KiB, and 1000 bytes.
    pair.ends[SERVER].core.set_landing_budget(LandingBudget::new(1000));
    let most = *pair.ends[SERVER].core.account.most_unread_data();
    assert_eq!(most, 8 * (16 << 10) + 1000);
    *pair.ends[SERVER].core.account.most_unread_data() = 40 << 10;
    let data = vec![7; 16 << 10];
    let send = |pair: &mut CorePair, stream| {
        let peer = Peer::new().open(stream).plain(Kind::Data, stream, &data);
        peer.send(pair, SERVER).unwrap();
        pair.ends[SERVER].core.next_accepted().unwrap().0
    };
    let keys = [1, 2, 3].map(|stream| send(&mut pair, stream));
    let core = &mut pair.ends[SERVER].core;
    assert_eq!(*core.control.resets(), [(3, ResetCode::ResourceExhausted)]);
    let refused = core.poll_part(keys[2], None);
    assert!(matches!(refused, Poll::Ready(Some(Err(CallFault::NoMemory { .. })))), "{refused:?}");
    // The others go on, and their memory comes back when they are read or dropped.
    assert_eq!(core.poll_part(keys[0], None), Poll::Ready(Some(Ok(Part::Data(data.clone().into())))));
    core.release(keys[1]);
    core.release(keys[2]);
    assert_eq!(core.account.unread_data(), 0);
    let key = send(&mut pair, 4);
    let core = &mut pair.ends[SERVER].core;
    assert_eq!(core.poll_part(key, None), Poll::Ready(Some(Ok(Part::Data(data.clone().into())))));
}

/// A field of 500 bytes in headers counts 500 and the length of its name, and 32 twice.
fn long_field() -> HeaderMap {
    HeaderMap::from_iter([("n".parse().unwrap(), "v".repeat(500).parse().unwrap())])
}

#[test]
fn heads_of_requests_have_a_bound_until_their_handlers_are_gone() {
    let limits = (1000, 1000, 16 << 10);
    let mut pair = CorePair::new(0, [limits, limits], [Device::default(), Device::default()]);
    pair.settle();
    pair.ends[SERVER].core.set_landing_budget(LandingBudget::new(1000));
    assert_eq!(*pair.ends[SERVER].core.account.most_headers(), 64 * 1000);
    let mut peer = Peer::new();
    let mut open = |pair: &mut CorePair, stream| {
        let block = peer.block(long_field());
        Peer::new().plain(Kind::Headers, stream, &block).send(pair, SERVER).unwrap();
        pair.ends[SERVER].core.next_accepted().map(|(key, _)| key)
    };
    let keys: Vec<_> = (1..=200).map_while(|stream| open(&mut pair, stream)).collect();
    // 571 bytes each: the path of 6 bytes, the name, the value, and 32 twice.
    assert_eq!((keys.len(), pair.ends[SERVER].core.account.headers()), (112, 112 * 571));
    let core = &mut pair.ends[SERVER].core;
    assert_eq!(*core.control.resets(), [(113, ResetCode::ResourceExhausted)]);
    // The handler of a call that was reset still has the headers.
    Peer::new().plain(Kind::Reset, 1, &[]).send(&mut pair, SERVER).unwrap();
    assert_eq!(open(&mut pair, 114), None);
    let core = &mut pair.ends[SERVER].core;
    core.release(keys[0]);
    assert!(open(&mut pair, 115).is_some());
    let core = &mut pair.ends[SERVER].core;
    keys[1..].iter().for_each(|key| core.release(*key));
    assert_eq!(core.account.headers(), 571);
}

#[test]
fn heads_and_trailers_of_responses_that_are_not_taken_have_a_bound() {
    let mut pair = pair();
    *pair.ends[CLIENT].core.account.most_headers() = 1200;
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
    assert_eq!(core.account.headers(), 2 * 533);
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
    assert_eq!(core.account.headers(), 2 * 533);
    let trailers = core.poll_part(keys[0], None);
    assert_eq!(trailers, Poll::Ready(Some(Ok(Part::Trailers(long_field())))));
    keys.into_iter().for_each(|key| core.release(key));
    assert_eq!(core.account.headers(), 0);
}

#[test]
fn only_as_many_streams_as_the_budget_covers_have_full_windows() {
    let limits = (100, 1000, 1 << 20);
    let mut pair = CorePair::new(0, [limits, limits], [Device::default(), Device::default()]);
    pair.settle();
    pair.ends[SERVER].core.set_landing_budget(LandingBudget::new(0));
    let mut keys = Vec::new();
    for stream in 1..=20 {
        Peer::new().open(stream).plain(Kind::Data, stream, &[1; 1000]).send(&mut pair, SERVER).unwrap();
        let core = &mut pair.ends[SERVER].core;
        keys.push(core.next_accepted().unwrap().0);
        assert!(core.poll_part(keys[keys.len() - 1], None).is_ready());
    }
    let core = &mut pair.ends[SERVER].core;
    let full =
        |core: &Core<_>| core.control.credits().iter().filter(|(_, credit)| *credit > 64 << 10).count();
    assert_eq!(full(core), 8);
    // A call that ends leaves its window to others.
    keys.into_iter().for_each(|key| core.release(key));
    assert_eq!(core.account.full_windows(), 0);
}
