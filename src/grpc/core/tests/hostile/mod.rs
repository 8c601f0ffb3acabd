//! A peer that breaks the rules: each violation is named, limits hold, and nothing panics.

mod bounds;
pub(super) mod held;
mod shares;

use std::task::{Poll, Waker};

use bytes::Bytes;
use http::HeaderMap;
use proptest::prelude::*;

use super::network::{CorePair, Device};
use crate::grpc::core::{Part, StreamKey};
use crate::grpc::fault::CallFault;
use crate::grpc::frame::headers::Encoder;
use crate::grpc::frame::{
    CallViolation, ContentOffer, END, FrameHeader, Kind, Limits, MESSAGE, MORE, OfferSegment, RequestHeaders,
    ResetCode,
};
use tonic_rdma_verbs::{RemoteSegment, Rkey};

pub(super) const CLIENT: usize = 0;
pub(super) const SERVER: usize = 1;

/// Makes the messages of a peer that obeys nothing.
#[derive(Default)]
pub(super) struct Peer {
    encoder: Encoder,
    pub(super) message: Vec<u8>,
}

impl Peer {
    pub(super) fn new() -> Self {
        let mut peer = Self::default();
        peer.encoder.set_room(100, 10_000);
        peer
    }

    fn frame(mut self, header: FrameHeader, payload: &[u8]) -> Self {
        self.message.extend_from_slice(&header.encode());
        self.message.extend_from_slice(payload);
        self
    }

    pub(super) fn plain(self, kind: Kind, stream: u32, payload: &[u8]) -> Self {
        self.frame(FrameHeader::new(kind, stream, payload.len()), payload)
    }

    pub(super) fn flagged(self, kind: Kind, flags: u8, stream: u32, payload: &[u8]) -> Self {
        self.frame(FrameHeader { flags, ..FrameHeader::new(kind, stream, payload.len()) }, payload)
    }

    fn block(&mut self, headers: HeaderMap) -> Vec<u8> {
        let path = "/a.B/C".parse().unwrap();
        let mut block = Vec::new();
        self.encoder.request(&RequestHeaders { path, authority: None, headers }, &mut block);
        block
    }

    fn open(mut self, stream: u32) -> Self {
        let block = self.block(HeaderMap::new());
        self.plain(Kind::Headers, stream, &block)
    }

    fn offer(self, stream: u32, id: u64, total: u64) -> Self {
        self.offer_with(MESSAGE, stream, id, total)
    }

    /// Offers bytes that are not one whole message.
    fn plain_offer(self, stream: u32, id: u64, total: u64) -> Self {
        self.offer_with(0, stream, id, total)
    }

    fn offer_with(self, flags: u8, stream: u32, id: u64, total: u64) -> Self {
        let segments =
            vec![OfferSegment::Remote { from: RemoteSegment { address: 1, rkey: Rkey(1) }, length: total }];
        let mut payload = Vec::new();
        ContentOffer { id, total, aligned_at: 0, segments }.encode(&mut payload);
        self.flagged(Kind::Offer, flags, stream, &payload)
    }

    fn send(self, pair: &mut CorePair, to: usize) -> Result<(), CallViolation> {
        pair.receive(to, self.message.into())
    }
}

/// Two ends that know each other's limits: 3 calls, headers of 1000 bytes, windows of 16 KiB.
fn pair() -> CorePair {
    let limits = (3, 1000, 16 << 10);
    let mut pair = CorePair::new(0, [limits, limits], [Device::default(), Device::default()]);
    pair.settle();
    pair
}

fn to_server(peer: Peer) -> Result<(), CallViolation> {
    peer.send(&mut pair(), SERVER)
}

fn open_at_client(pair: &mut CorePair) -> StreamKey {
    let head = RequestHeaders { path: "/a.B/C".parse().unwrap(), authority: None, headers: HeaderMap::new() };
    let key = pair.ends[CLIENT].core.open(head).unwrap();
    pair.transmit(CLIENT);
    key
}

#[test]
fn messages_that_are_no_frames_are_refused() {
    use CallViolation::{Empty, Flags, Truncated, UnknownKind};
    let raw = |bytes: &[u8]| pair().receive(SERVER, Bytes::copy_from_slice(bytes));
    assert_eq!(raw(&[]), Err(Empty));
    assert_eq!(raw(&[3; 5]), Err(Truncated { needed: 12, left: 5 }));
    assert_eq!(raw(&[0; 12]), Err(UnknownKind(0)));
    assert_eq!(raw(&[77; 12]), Err(UnknownKind(77)));
    assert_eq!(raw(&[3, 64, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]), Err(Flags { kind: Kind::Data, flags: 64 }));
    let header = FrameHeader::new(Kind::Data, 1, 10);
    assert_eq!(to_server(Peer::new().frame(header, &[0; 9])), Err(Truncated { needed: 10, left: 9 }));
}

#[test]
fn settings_come_first_and_once() {
    let limits = (3, 1000, 16 << 10);
    let mut fresh = CorePair::new(0, [limits, limits], [Device::default(), Device::default()]);
    let refused = Peer::new().open(1).send(&mut fresh, SERVER);
    assert_eq!(refused, Err(CallViolation::BeforeSettings(Kind::Headers)));
    let payload = [0; Limits::LENGTH];
    let refused = to_server(Peer::new().plain(Kind::Settings, 0, &payload));
    assert_eq!(refused, Err(CallViolation::SecondSettings));
    let mut fresh = CorePair::new(0, [limits, limits], [Device::default(), Device::default()]);
    let short = Peer::new().plain(Kind::Settings, 0, &payload[1..]).send(&mut fresh, SERVER);
    assert_eq!(short, Err(CallViolation::Truncated { needed: 28, left: 27 }));
}

#[test]
fn streams_out_of_order_or_beyond_the_limit_are_refused() {
    use CallViolation::{SecondHeaders, StreamOrder, TooManyStreams};
    assert_eq!(to_server(Peer::new().open(1).open(1)), Err(SecondHeaders(1)));
    assert_eq!(to_server(Peer::new().open(2).open(1)), Err(StreamOrder { stream: 1, last: 2 }));
    assert_eq!(to_server(Peer::new().open(0)), Err(StreamOrder { stream: 0, last: 0 }));
    assert_eq!(to_server(Peer::new().open(u32::MAX)), Err(StreamOrder { stream: u32::MAX, last: u32::MAX }));
    assert_eq!(to_server(Peer::new().open(1).open(2).open(3).open(4)), Err(TooManyStreams(3)));
    // A call that was reset may not come back.
    let again = Peer::new().open(1).plain(Kind::Reset, 1, &[]).open(1);
    assert_eq!(to_server(again), Err(StreamOrder { stream: 1, last: 1 }));
}

#[test]
fn calls_that_are_opened_and_reset_in_turn_do_not_pile_up() {
    let (mut pair, mut peer) = (pair(), Peer::new());
    for stream in 1..1000 {
        peer = peer.open(stream).plain(Kind::Reset, stream, &[]);
    }
    peer.send(&mut pair, SERVER).unwrap();
    let core = &mut pair.ends[SERVER].core;
    assert!(core.streams.len() <= 7, "{} handlers", core.streams.len());
    // The handlers of those that were accepted find their calls reset.
    while let Some((key, _)) = core.next_accepted() {
        assert!(matches!(core.poll_reset(key, Waker::noop()), Poll::Ready(CallFault::Reset(_))));
        core.release(key);
    }
    assert!(core.streams.len() == 0);
}

#[test]
fn frames_of_streams_that_never_were_are_refused_and_of_closed_ones_dropped() {
    let unknown = |kind, stream| Err(CallViolation::UnknownStream { kind, stream });
    assert_eq!(to_server(Peer::new().plain(Kind::Data, 5, b"x")), unknown(Kind::Data, 5));
    assert_eq!(to_server(Peer::new().plain(Kind::Reset, 5, &[])), unknown(Kind::Reset, 5));
    assert_eq!(to_server(Peer::new().plain(Kind::Credit, 5, &[0; 8])), unknown(Kind::Credit, 5));
    assert_eq!(to_server(Peer::new().offer(5, 0, 10)), unknown(Kind::Offer, 5));
    let closed = |peer: Peer| peer.open(1).plain(Kind::Reset, 1, &[]);
    let late = closed(Peer::new()).plain(Kind::Data, 1, b"x").plain(Kind::Credit, 1, &[1; 8]);
    assert_eq!(to_server(late), Ok(()));
    // What a closed call offers is given back.
    let mut pair = pair();
    closed(Peer::new()).offer(1, 0, 1 << 60).send(&mut pair, SERVER).unwrap();
    assert_eq!(*pair.ends[SERVER].core.control.offers_taken(), [0]);
}

#[test]
fn parts_after_the_end_or_before_the_head_are_refused() {
    let ended = |peer: Peer| peer.open(1).flagged(Kind::Data, END, 1, b"x");
    let after = |kind| Err(CallViolation::AfterEnd { kind, stream: 1 });
    assert_eq!(to_server(ended(Peer::new()).plain(Kind::Data, 1, b"x")), after(Kind::Data));
    assert_eq!(to_server(ended(Peer::new()).offer(1, 0, 10)), after(Kind::Offer));
    let refused = to_server(Peer::new().open(1).plain(Kind::Trailers, 1, &[]));
    assert_eq!(refused, Err(CallViolation::ServersOnly(Kind::Trailers)));
    let mut it = pair();
    open_at_client(&mut it);
    for kind in [Kind::Data, Kind::Trailers] {
        let early = Peer::new().plain(kind, 1, &[]).send(&mut it, CLIENT);
        assert_eq!(early, Err(CallViolation::BeforeHeaders { kind, stream: 1 }));
    }
    let twice = Peer::new().plain(Kind::Headers, 1, &[]).plain(Kind::Headers, 1, &[]).send(&mut it, CLIENT);
    assert_eq!(twice, Err(CallViolation::SecondHeaders(1)));
}

#[test]
fn credit_cannot_be_overdrawn_or_overflow() {
    let (mut it, long) = (pair(), vec![7; 16 << 10]);
    Peer::new().open(1).plain(Kind::Data, 1, &long).send(&mut it, SERVER).unwrap();
    let refused = Peer::new().plain(Kind::Data, 1, b"x").send(&mut it, SERVER);
    assert_eq!(refused, Err(CallViolation::Overdrawn { stream: 1, cost: 1, left: -256 }));
    let refused = Peer::new().offer(1, 0, 10).send(&mut it, SERVER);
    assert_eq!(refused, Err(CallViolation::Overdrawn { stream: 1, cost: 10, left: -256 }));
    // Many short parts cost more than their bytes.
    let peer = (0..100).fold(Peer::new().open(1), |peer, _| peer.plain(Kind::Data, 1, b"x"));
    assert!(matches!(to_server(peer), Err(CallViolation::Overdrawn { .. })));
    for credit in [u64::MAX, 1 << 62, 1 << 51] {
        let refused = to_server(Peer::new().open(1).plain(Kind::Credit, 1, &credit.to_le_bytes()));
        assert_eq!(refused, Err(CallViolation::Credit(credit)));
    }
    let short = to_server(Peer::new().open(1).plain(Kind::Credit, 1, &[1; 7]));
    assert_eq!(short, Err(CallViolation::Length { kind: Kind::Credit, length: 7 }));
}

#[test]
fn heads_beyond_the_limits_are_refused() {
    let field = |value: &str| HeaderMap::from_iter([("name".parse().unwrap(), value.parse().unwrap())]);
    let mut peer = Peer::new();
    let block = peer.block(field(&"v".repeat(980)));
    assert_eq!(to_server(peer.plain(Kind::Headers, 1, &block)), Err(CallViolation::HeadersTooLong(1000)));
    // The same in two frames, which never end.
    let halves =
        Peer::new().flagged(Kind::Headers, MORE, 1, &[5; 600]).flagged(Kind::Headers, MORE, 1, &[5; 600]);
    assert_eq!(to_server(halves), Err(CallViolation::HeadersTooLong(1000)));
    // A long value in the table is short on the wire, and counts in full each time.
    let mut peer = Peer::new();
    let mut block = Vec::new();
    for _ in 0..3 {
        block = peer.block(field(&"v".repeat(400)));
        if block.len() > 100 {
            let (stream, payload) = (peer.message.len() as u32 + 1, block.clone());
            peer = peer.plain(Kind::Headers, stream, &payload);
        }
    }
    let bomb = [&block[..3], &block[3..].repeat(3)].concat();
    assert!(bomb.len() < 20);
    assert_eq!(to_server(peer.plain(Kind::Headers, 9000, &bomb)), Err(CallViolation::HeadersTooLong(1000)));
}

/// Headers within the limit of bytes may have more fields than a `HeaderMap` holds. They end their own call:
/// the connection, and the table of the headers that follow, stay whole.
#[test]
fn a_head_of_too_many_fields_ends_its_call_only() {
    let limits = (3, 1 << 20, 16 << 10);
    let fields: Vec<u8> = (0..25_000_u32)
        .flat_map(|name| {
            let name = format!("{name:x}");
            [&[5, name.len() as u8, 0][..], name.as_bytes(), &[0; 4]].concat()
        })
        .collect();
    // The last field is an entry of the table from now on.
    let last = b"\x06\x03\x00new\x00\x00\x00\x00";
    let mut it = CorePair::new(0, [limits, limits], [Device::default(), Device::default()]);
    it.settle();
    let request = [&b"\x02\x06\x00/a.B/C"[..], &fields, last].concat();
    Peer::new().plain(Kind::Headers, 1, &request).send(&mut it, SERVER).unwrap();
    let core = &mut it.ends[SERVER].core;
    assert!(core.next_accepted().is_none());
    assert_eq!(*core.control.resets(), [(1, ResetCode::ResourceExhausted)]);
    Peer::new()
        .plain(Kind::Headers, 2, b"\x00\x00\x00\x07\x01\x00\x01\x00\x00\x00v")
        .send(&mut it, SERVER)
        .unwrap();
    let (_, head) = it.ends[SERVER].core.next_accepted().unwrap();
    assert_eq!((head.path.as_str(), &head.headers["new"]), ("/a.B/C", &"v".parse().unwrap()));
    for kind in [Kind::Headers, Kind::Trailers] {
        let (key, other) = (open_at_client(&mut it), open_at_client(&mut it));
        let id = it.ends[CLIENT].core.streams[key].id;
        let begun =
            if kind == Kind::Trailers { Peer::new().plain(Kind::Headers, id, &[]) } else { Peer::new() };
        begun.plain(kind, id, &fields).plain(Kind::Headers, id + 1, &[]).send(&mut it, CLIENT).unwrap();
        let core = &mut it.ends[CLIENT].core;
        let poll = core.poll_reset(key, Waker::noop());
        assert!(matches!(&poll, Poll::Ready(CallFault::NoMemory { .. })), "{poll:?}");
        assert_eq!(core.poll_headers(other, None), Poll::Ready(Ok(HeaderMap::new())));
        [key, other].into_iter().for_each(|key| core.release(key));
    }
}

#[test]
fn tables_cannot_be_abused() {
    let entry = |entry: u16| [&[0][..], &entry.to_le_bytes()].concat();
    assert_eq!(to_server(Peer::new().plain(Kind::Headers, 1, &entry(0))), Err(CallViolation::TableEntry(0)));
    assert_eq!(to_server(Peer::new().plain(Kind::Headers, 1, &entry(9))), Err(CallViolation::TableEntry(9)));
    let mut it = pair();
    let path = b"\x02\x06\x00/a.B/C";
    Peer::new().plain(Kind::Headers, 1, path).send(&mut it, SERVER).unwrap();
    let twice = [entry(0), entry(0)].concat();
    let refused = Peer::new().plain(Kind::Headers, 2, &twice).send(&mut it, SERVER);
    assert_eq!(refused, Err(CallViolation::Headers("a second path")));
    let refused = Peer::new().plain(Kind::Headers, 2, &[7, 0, 0, 0, 0, 0, 0]).send(&mut it, SERVER);
    assert_eq!(refused, Err(CallViolation::TableEntry(0)), "a path where a name is needed");
    // A table that only grows.
    let mut it = pair();
    let full = (1..2000_u32).find_map(|stream| {
        let authority = format!("{:0>200}", stream);
        let mut block = path.to_vec();
        block[0] = 1;
        block.extend_from_slice(&[4, 200, 0]);
        block.extend_from_slice(authority.as_bytes());
        let peer = Peer::new().plain(Kind::Headers, stream, &block).plain(Kind::Reset, stream, &[]);
        peer.send(&mut it, SERVER).err()
    });
    assert_eq!(full, Some(CallViolation::TableFull { entries: 1024, bytes: 64 << 10 }));
}

#[test]
fn heads_that_are_none_are_refused() {
    for (block, why) in [
        (&b""[..], "a request without a path"),
        (b"\x01\x03\x00\xff\xff\xff", "a path that is none"),
        (b"\x03\x01\x00 ", "an authority that is none"),
        (b"\x05\x01\x00 \x00\x00\x00\x00", "a name that is none"),
        (b"\x05\x01\x00a\x01\x00\x00\x00\n", "a value that is none"),
        (b"\x05\x01\x00a\xff\xff\xff\xff", "it is too short"),
        (b"\x09", "an unknown instruction"),
        (b"\x81\x01\x00/", "an unknown instruction"),
    ] {
        let refused = to_server(Peer::new().plain(Kind::Headers, 1, block));
        assert_eq!(refused, Err(CallViolation::Headers(why)), "{block:?}");
    }
    let mut it = pair();
    open_at_client(&mut it);
    let refused = Peer::new().open(1).send(&mut it, CLIENT);
    assert_eq!(refused, Err(CallViolation::Headers("a response with a path or an authority")));
}

#[test]
fn nothing_may_come_between_the_frames_of_a_head() {
    let begun = || Peer::new().open(1).flagged(Kind::Headers, MORE, 2, b"\x01");
    for (kind, stream) in [(Kind::Data, 1), (Kind::Headers, 3), (Kind::Reset, 1), (Kind::Taken, 0)] {
        let refused = to_server(begun().plain(kind, stream, &[]));
        assert_eq!(refused, Err(CallViolation::Interleaved { seen: kind, stream, open: 2 }));
    }
    assert_eq!(to_server(begun().plain(Kind::Headers, 2, b"\x06\x00/a.B/C")), Ok(()));
}

#[test]
fn offers_that_are_none_are_refused() {
    let payload = |total: u64, aligned: u64, segments: &[(u64, u64)]| {
        let from = |address| RemoteSegment { address, rkey: Rkey(1) };
        let segment = |&(address, length): &(u64, u64)| OfferSegment::Remote { from: from(address), length };
        let mut payload = Vec::new();
        let segments = segments.iter().map(segment).collect();
        ContentOffer { id: 0, total, aligned_at: aligned, segments }.encode(&mut payload);
        payload
    };
    let refused = |payload: &[u8]| to_server(Peer::new().open(1).plain(Kind::Offer, 1, payload));
    let why = |why| Err(CallViolation::Offer(why));
    assert_eq!(refused(&[0; 23]), why("the frame is too short"));
    let sum = "the segments do not add up to the total";
    assert_eq!(refused(&payload(0, 0, &[])), why(sum));
    assert_eq!(refused(&payload(10, 0, &[(1, 9)])), why(sum));
    assert_eq!(refused(&payload((1 << 60) + 1, 0, &[(1, (1 << 60) + 1)])), why(sum));
    assert_eq!(
        refused(&payload(u64::MAX, 0, &[(0, u64::MAX), (0, 1)])),
        why("the sum of the segments is too large")
    );
    assert_eq!(refused(&payload(0, 0, &[(1, 0)])), why("a segment is empty"));
    assert_eq!(refused(&payload(10, 0, &[(u64::MAX, 10)])), why("a segment ends beyond the address space"));
    assert_eq!(refused(&payload(10, 10, &[(1, 10)])), why("the aligned byte is beyond the end"));
    assert_eq!(refused(&[payload(10, 0, &[(1, 10)]), vec![9]].concat()), why("a segment has an unknown tag"));
    let inline = [payload(10, 0, &[]), vec![0, 200, 0, 1, 2]].concat();
    assert_eq!(refused(&inline), why("a segment is longer than the frame"));
    let order = to_server(Peer::new().open(1).offer(1, 1, 10));
    assert_eq!(order, Err(CallViolation::OfferOrder { seen: 1, expected: 0 }));
}

#[test]
fn an_offer_of_a_huge_body_needs_no_memory() {
    for landed in [false, true] {
        let mut pair = pair();
        Peer::new().open(1).offer(1, 0, 1 << 60).send(&mut pair, SERVER).unwrap();
        let core = &mut pair.ends[SERVER].core;
        let (key, _) = core.next_accepted().unwrap();
        if landed {
            core.deliver_landed(key, 4 << 20);
        }
        assert!(core.poll_part(key, Some(Waker::noop())).is_pending());
        pair.transmit(SERVER);
        let core = &mut pair.ends[SERVER].core;
        if landed {
            let refused = CallFault::MessageTooLarge { length: (1 << 60) - 5, limit: 4 << 20 };
            assert_eq!(core.poll_part(key, None), Poll::Ready(Some(Err(refused))));
            assert!(core.received_offers.is_empty());
        } else {
            assert_eq!(core.streams[key].receiving.landing, 512 << 10);
        }
        core.release(key);
        assert!(core.streams.len() == 0 || core.streams.queues()[3] == [key]);
    }
}

/// A reader finds the reason in the place of an offer whose content can't land any further. What was spent for the
/// offer is spent no more, so that parts which follow arrive.
#[test]
fn an_offer_that_was_given_up_costs_the_stream_nothing() {
    let limits = (3, 1000, 1 << 20);
    let mut pair = CorePair::new(0, [limits, limits], [Device::default(), Device::default()]);
    pair.settle();
    Peer::new().open(1).plain_offer(1, 0, (1 << 20) + 1).send(&mut pair, SERVER).unwrap();
    let (key, _) = pair.ends[SERVER].core.next_accepted().unwrap();
    assert!(pair.ends[SERVER].core.poll_part(key, None).is_pending());
    pair.transmit(SERVER);
    let receiving = |pair: &CorePair| {
        let receiving = &pair.ends[SERVER].core.streams[key].receiving;
        (receiving.landing, receiving.unread)
    };
    assert_eq!(receiving(&pair), (1 << 20, (1 << 20) + 1 + 256));
    pair.ends[SERVER].land_zeros(0);
    assert!(matches!(pair.ends[SERVER].core.poll_part(key, None), Poll::Ready(Some(Ok(_)))));
    assert_eq!(receiving(&pair).0, 512 << 10);
    pair.ends[SERVER].device.longest = 0;
    pair.transmit(SERVER);
    let fault = CallFault::NoMemory { length: 1, reason: "too long".into() };
    assert_eq!(pair.ends[SERVER].core.poll_part(key, None), Poll::Ready(Some(Err(fault))));
    assert_eq!(receiving(&pair), (0, 0));
    // The peer has credit again, and what it offers is fetched.
    pair.ends[SERVER].device.longest = 100;
    pair.transmit(SERVER);
    Peer::new().plain_offer(1, 1, 100).send(&mut pair, SERVER).unwrap();
    assert!(pair.ends[SERVER].core.poll_part(key, None).is_pending());
    pair.transmit(SERVER);
    assert_eq!(receiving(&pair), (100, 100 + 256));
}

#[test]
fn offers_that_are_taken_twice_or_never_made_are_refused() {
    let taken = |ids: &[u64]| {
        let payload: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        Peer::new().plain(Kind::Taken, 0, &payload)
    };
    assert_eq!(to_server(taken(&[5])), Err(CallViolation::Taken(5)));
    assert_eq!(to_server(taken(&[])), Err(CallViolation::Length { kind: Kind::Taken, length: 0 }));
    let odd = Peer::new().plain(Kind::Taken, 0, &[1; 9]);
    assert_eq!(to_server(odd), Err(CallViolation::Length { kind: Kind::Taken, length: 9 }));
    let mut pair = pair();
    let key = open_at_client(&mut pair);
    pair.ends[CLIENT].core.send_data(key, vec![1; 100_000].into(), true);
    pair.transmit(CLIENT);
    assert_eq!(pair.ends[CLIENT].core.output.offers.len(), 1);
    assert_eq!(taken(&[0, 0]).send(&mut pair, CLIENT), Err(CallViolation::Taken(0)));
}

#[test]
fn going_away_twice_may_not_take_more_calls_back() {
    let mut pair = pair();
    Peer::new().plain(Kind::GoAway, 5, b"first").send(&mut pair, CLIENT).unwrap();
    Peer::new().plain(Kind::GoAway, 3, b"\xff second").send(&mut pair, CLIENT).unwrap();
    let refused = Peer::new().plain(Kind::GoAway, 4, b"").send(&mut pair, CLIENT);
    assert_eq!(refused, Err(CallViolation::GoAwayOrder { seen: 4, before: 3 }));
}

#[test]
fn calls_beyond_the_last_number_fail_and_the_call_that_has_it_is_answered() {
    let mut pair = pair();
    pair.ends[CLIENT].core.skip_numbers(u32::MAX - 1);
    let head = RequestHeaders { path: "/a.B/C".parse().unwrap(), authority: None, headers: HeaderMap::new() };
    let keys = [(); 3].map(|()| pair.ends[CLIENT].core.open(head.clone()).unwrap());
    pair.ends[CLIENT].core.send_data(keys[0], Bytes::from_static(b"request"), true);
    pair.transmit(CLIENT);
    let core = &mut pair.ends[CLIENT].core;
    for key in &keys[1..] {
        let Poll::Ready(Err(fault)) = core.poll_headers(*key, None) else {
            panic!("the call waits for ever")
        };
        assert!(matches!(fault, CallFault::GoneAway(_)), "{fault:?}");
    }
    assert_eq!((core.active(), core.streams.queues()[2].len()), (1, 0));
    assert!(core.open(head).is_err());
    pair.settle();
    let core = &mut pair.ends[SERVER].core;
    let (served, _) = core.next_accepted().unwrap();
    assert_eq!(core.poll_part(served, None), Poll::Ready(Some(Ok(Part::Data("request".into())))));
    core.send_headers(served, HeaderMap::new());
    core.send_trailers(served, HeaderMap::new());
    pair.transmit(SERVER);
    pair.settle();
    let core = &mut pair.ends[CLIENT].core;
    assert!(matches!(core.poll_headers(keys[0], None), Poll::Ready(Ok(_))));
    keys.into_iter().for_each(|key| core.release(key));
    assert_eq!((core.active(), core.streams.len()), (0, 0));
}

/// Frames of any kind, sensible or not.
fn frames() -> impl Strategy<Value = (u8, u8, u16, u32, Vec<u8>)> {
    let payload = prop_oneof![
        prop::collection::vec(any::<u8>(), 0..40),
        Just(b"\x02\x06\x00/a.B/C".to_vec()),
        Just(b"\x00\x00\x00".to_vec()),
        Just(1_u64.to_le_bytes().to_vec()),
        (0..3_u64, 1..5000_u64).prop_map(|(id, total)| {
            let peer = Peer::new().offer(1, id, total);
            peer.message[FrameHeader::LENGTH..].to_vec()
        }),
    ];
    (2..10_u8, 0..8_u8, 0..7_u16, 0..5_u32, payload)
}

proptest! {
    /// The end takes any messages or names the violation, and its answers stay within the rules of the
    /// simulated wire.
    #[test]
    fn any_messages_are_taken_or_refused(to in 0..2_usize, messages in prop::collection::vec((frames(), any::<bool>()), 1..40)) {
        let mut pair = pair();
        let mut keys = Vec::new();
        if to == CLIENT {
            keys.extend([open_at_client(&mut pair), open_at_client(&mut pair)]);
            pair.ends[CLIENT].core.send_data(keys[0], vec![1; 50_000].into(), true);
            pair.transmit(CLIENT);
        }
        pair.ends[to].sent.clear();
        for ((kind, flags, extra, stream, payload), reads) in messages {
            let header = [
                &[kind, flags][..], &extra.to_le_bytes(), &stream.to_le_bytes(), &(payload.len() as u32).to_le_bytes(),
            ];
            let message = [header.concat(), payload].concat();
            if pair.receive(to, message.into()).is_err() {
                pair.ends[to].core.end(&CallFault::PeerClosed);
                break;
            }
            pair.transmit(to);
            pair.ends[to].sent.clear();
            while let Some((key, _)) = pair.ends[to].core.next_accepted() {
                keys.push(key);
            }
            if reads {
                for key in &keys {
                    if let Poll::Ready(Some(Ok(Part::Data(data)))) = pair.ends[to].core.poll_part(*key, None) {
                        prop_assert!(!data.is_empty());
                    }
                }
            }
        }
        for key in keys {
            pair.ends[to].core.release(key);
        }
        // What is left waits for its turn to send or to fetch, and has no handle.
        for (_, stream) in pair.ends[to].core.streams.iter() {
            prop_assert!(stream.released);
        }
    }
}
