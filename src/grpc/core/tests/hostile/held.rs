//! What a hostile peer makes this side hold, in bytes. Two counts judge it that do not ask the state machine: what
//! this thread has allocated, and what the device would have registered.

#![allow(clippy::print_stdout, reason = "tests, which print what they count")]

use std::collections::VecDeque;

use bytes::BytesMut;
use support::held_by_this_thread;

use super::*;
use crate::grpc::frame::Frames;

/// The limit of a connection, in bytes.
pub(in crate::grpc::core::tests) const LIMIT: u64 = 1 << 20;
/// What a connection may hold beside twice its limit: the tables of headers, the block that short messages share,
/// answers that wait, and one part of a body that is being sent (1 MiB).
const FIXED: u64 = 2 << 20;
/// Messages of a peer are at most this long.
pub(in crate::grpc::core::tests) const LONGEST: usize = 16 << 10;

/// Counts what this thread's connections hold from now on.
pub(in crate::grpc::core::tests) struct Scale {
    before: isize,
    connections: u64,
    limit: u64,
    /// The most that was found.
    most: u64,
}

impl Scale {
    pub(in crate::grpc::core::tests) fn new(connections: u64, limit: u64) -> Self {
        Self { before: held_by_this_thread().bytes, connections, limit, most: 0 }
    }

    pub(in crate::grpc::core::tests) fn held(&mut self) -> u64 {
        let held = u64::try_from(held_by_this_thread().bytes - self.before).unwrap_or(0);
        self.most = self.most.max(held);
        held
    }

    /// Does not count what `act` allocates.
    pub(in crate::grpc::core::tests) fn except(&mut self, act: impl FnOnce()) {
        let before = held_by_this_thread().bytes;
        act();
        self.before += held_by_this_thread().bytes - before;
    }

    /// Returns the most that may be held.
    pub(in crate::grpc::core::tests) fn bound(&self) -> u64 {
        self.connections * (2 * self.limit + FIXED)
    }

    /// Finds out whether more is held than may be.
    pub(in crate::grpc::core::tests) fn find(&mut self) -> Result<(), String> {
        let (held, most) = (self.held(), self.bound());
        if held > most { Err(format!("{held} bytes are held, and {most} may be")) } else { Ok(()) }
    }

    fn check(&mut self, what: impl FnOnce() -> String) {
        self.find().unwrap_or_else(|fault| panic!("{}: {fault}", what()));
    }
}

/// An end of a connection whose peer is hostile, with its application.
pub(in crate::grpc::core::tests) struct Victim {
    pub(in crate::grpc::core::tests) pair: CorePair,
    pub(in crate::grpc::core::tests) end: usize,
    /// The block that short messages share, as in a connection.
    inbox: BytesMut,
    /// Calls of the application.
    pub(in crate::grpc::core::tests) keys: Vec<StreamKey>,
    /// Calls that are to be answered when the state machine takes a part.
    unanswered: VecDeque<StreamKey>,
    /// Replies have no end.
    streams_replies: bool,
    /// A call was refused, because there is no memory for it.
    pub(in crate::grpc::core::tests) has_refused: bool,
}

impl Victim {
    /// Makes an end that may hold `limit` bytes, and that takes `streams` calls at a time. `has_windows`: the peer
    /// knows windows of the connection, as peers of version 3 do not. `alter` changes the
    /// SETTINGS of its peer.
    pub(in crate::grpc::core::tests) fn new(
        end: usize,
        streams: u32,
        limit: u64,
        has_windows: bool,
        alter: impl FnOnce(&mut [u8]),
    ) -> Self {
        let limits = (streams, 16 << 10, 1 << 20);
        let devices = [Device::default(), Device::default()];
        let mut pair = CorePair::with_limit(0, [limits, limits], devices, [limit; 2], has_windows);
        let mut settings = pair.ends[1 - end].sent.pop_front().unwrap().to_vec();
        alter(&mut settings[FrameHeader::LENGTH..]);
        pair.receive(end, settings.into()).unwrap();
        pair.transmit(end);
        let mut victim = Self {
            pair,
            end,
            inbox: BytesMut::new(),
            keys: Vec::new(),
            unanswered: VecDeque::new(),
            streams_replies: false,
            has_refused: false,
        };
        victim.core();
        victim
    }

    pub(in crate::grpc::core::tests) fn core(
        &mut self,
    ) -> &mut crate::grpc::core::Core<super::super::network::Kept> {
        self.pair.ends[self.end].sent.clear();
        &mut self.pair.ends[self.end].core
    }

    /// Hands a message to the end as a connection does. A violation ends the connection.
    pub(in crate::grpc::core::tests) fn receive(&mut self, message: &[u8]) -> Result<(), CallViolation> {
        let bytes = if message.len() > 2 << 10 {
            Bytes::copy_from_slice(message)
        } else {
            if self.inbox.capacity() < message.len() {
                self.inbox = BytesMut::with_capacity(16 << 10);
            }
            self.inbox.extend_from_slice(message);
            self.inbox.split().freeze()
        };
        let received = self.pair.receive(self.end, bytes);
        if received.is_err() {
            self.core().end(&CallFault::PeerClosed);
        }
        self.transmit();
        received
    }

    /// Lets the end send. The other end reads nothing of it.
    pub(in crate::grpc::core::tests) fn transmit(&mut self) {
        self.pair.transmit(self.end);
        for message in &self.pair.ends[self.end].sent {
            let mut frames = Frames::new(message.clone());
            while let Some((header, _)) = frames.next_frame().unwrap() {
                let code = (header.kind == Kind::Reset).then(|| ResetCode::from_wire(header.extra));
                self.has_refused |= code == Some(ResetCode::ResourceExhausted);
            }
        }
        let after = self.core().after();
        after.unneeded.clear();
        after.headers.clear();
    }

    /// Takes the calls that have arrived. Each is answered by `reply` bytes, as soon as the state machine takes
    /// them.
    fn answer(&mut self, reply: usize) {
        while let Some((key, _)) = self.core().next_accepted() {
            self.core().send_headers(key, HeaderMap::new());
            self.unanswered.push_back(key);
        }
        for _ in 0..self.unanswered.len() {
            let Some(key) = self.unanswered.pop_front() else { return };
            let is_over = loop {
                let Poll::Ready(ready) = self.core().poll_send_ready(key, Waker::noop()) else { break false };
                if ready.is_ok() {
                    self.core().send_data(key, vec![1; reply].into(), false);
                    self.transmit();
                }
                if ready.is_err() || !self.streams_replies {
                    break true;
                }
            };
            if is_over {
                self.core().send_trailers(key, HeaderMap::new());
                self.core().release(key);
            } else {
                self.unanswered.push_back(key);
            }
            self.transmit();
        }
    }

    /// Drops all calls of the application.
    pub(in crate::grpc::core::tests) fn release_all(&mut self) {
        while let Some((key, _)) = self.core().next_accepted() {
            self.keys.push(key);
        }
        for key in std::mem::take(&mut self.keys).into_iter().chain(std::mem::take(&mut self.unanswered)) {
            self.core().release(key);
        }
        self.transmit();
    }
}

/// The messages of a step of an attack, by its stream and its number in the stream. Step 0 opens the stream.
type Messages<'a> = &'a dyn Fn(u32, usize, usize) -> Vec<Vec<u8>>;

/// Steps of each of 100 peers.
const STEPS: u32 = 30;
/// The headers of a request that need no table.
const REQUEST: &[u8] = b"\x01\x06\x00/a.B/C";

fn open(stream: u32) -> Peer {
    Peer::new().plain(Kind::Headers, stream, REQUEST)
}

/// Makes a peer take steps in as many calls as it may, and then 100 peers together. A peer that breaks a rule
/// tries again with less, because rules that it can learn are no bound.
fn attack(streams: u32, steps: usize, messages: Messages<'_>) {
    for has_windows in [true, false] {
        attack_with(has_windows, streams, steps, messages);
    }
}

fn attack_with(has_windows: bool, streams: u32, mut steps: usize, messages: Messages<'_>) {
    let mut end = (streams + 1, 0);
    while let Err(broken) = run(1, has_windows, end, steps, messages) {
        match broken {
            (1, step) if step > 0 => steps = step - 1,
            _ => end = broken,
        }
    }
    assert!(end > (1, 0), "not one call: is this attack broken?");
    // Not more steps than take some seconds.
    let end = end.min(((STEPS / (steps as u32 + 1)).max(1) + 1, 0));
    assert_eq!(run(100, has_windows, end, steps, messages), Ok(()), "each connection has the same rules");
}

/// Lets peers take steps before `end`. Returns the first step that breaks a rule.
fn run(
    connections: u64,
    has_windows: bool,
    end: (u32, usize),
    steps: usize,
    messages: Messages<'_>,
) -> Result<(), (u32, usize)> {
    let mut scale = Scale::new(connections, LIMIT);
    let mut victims = Vec::new();
    for _ in 0..connections {
        victims.push(Victim::new(SERVER, 1 << 16, LIMIT, has_windows, |_| {}));
        let victim = victims.last_mut().unwrap();
        let all = (1..=end.0).flat_map(|stream| (0..=steps).map(move |step| (stream, step)));
        for (stream, step) in all.take_while(|place| *place < end) {
            for message in messages(stream, step, steps) {
                victim.receive(&message).map_err(|_| (stream, step))?;
            }
            scale.check(|| {
                format!(
                    "{connections} connections, windows: {has_windows}, call {stream}, step {step} of {steps}"
                )
            });
        }
    }
    println!(
        "{connections} connections, windows: {has_windows}, {steps} steps in each call before {end:?}: {} bytes at most",
        scale.most
    );
    for victim in &mut victims {
        victim.release_all();
    }
    Ok(())
}

/// An offer of `pieces` times one byte inside the frame.
fn offer_of_pieces(stream: u32, id: u64, pieces: usize) -> Vec<u8> {
    let mut payload = Vec::new();
    for number in [id, pieces as u64, 0] {
        payload.extend_from_slice(&number.to_le_bytes());
    }
    payload.extend([0, 1, 0, 7].repeat(pieces));
    Peer::new().plain(Kind::Offer, stream, &payload).message
}

/// Offers of pieces inside the frame cost the peer 4 bytes for each.
#[test]
fn offers_of_one_byte_pieces_stay_within_the_limit() {
    for pieces in [1, 16, 255, 256, 257, 4000] {
        println!("{pieces} pieces");
        attack(25, 255, &|stream, step, steps| {
            let id = u64::from(stream - 1) * steps as u64 + step as u64;
            match step {
                0 => vec![open(stream).message],
                _ => vec![offer_of_pieces(stream, id - 1, pieces)],
            }
        });
    }
}

/// Offers of the peer's memory cost it 57 bytes.
#[test]
fn offers_that_nobody_reads_stay_within_the_limit() {
    attack(300, 255, &|stream, step, steps| {
        let id = u64::from(stream - 1) * steps as u64 + step as u64;
        match step {
            0 => vec![open(stream).message],
            _ => vec![Peer::new().plain_offer(stream, id - 1, 1).message],
        }
    });
}

/// A call costs the peer some 20 bytes, and this side a stream.
#[test]
fn calls_that_nobody_takes_stay_within_the_limit() {
    attack(1 << 16, 0, &|stream, _, _| vec![open(stream).message]);
}

/// A field without a value costs the peer 9 bytes, and this side a slot of a `HeaderMap`.
#[test]
fn headers_of_many_empty_fields_stay_within_the_limit() {
    let name = |number: u32| [b'a' + (number % 26) as u8, b'a' + (number / 26) as u8];
    let fields: Vec<u8> =
        (0..450).flat_map(|number| [&[5, 2, 0][..], &name(number), &[0; 4]].concat()).collect();
    let block = [REQUEST, &fields].concat();
    attack(120, 0, &|stream, _, _| vec![Peer::new().plain(Kind::Headers, stream, &block).message]);
}

/// A short part must not keep the memory that it shares with messages which follow it.
#[test]
fn short_first_parts_do_not_keep_the_memory_of_other_messages() {
    attack(600, 0, &|stream, _, _| {
        let first = open(stream).plain(Kind::Data, stream, b"x").message;
        let filler = (0..60).fold(Peer::new(), |peer, _| peer.plain(Kind::Credit, 1, &[0; 8])).message;
        [vec![first], vec![filler; 14]].concat()
    });
}

/// A first part must not keep much more of its message than it is charged for.
#[test]
fn first_parts_do_not_keep_the_rest_of_their_messages() {
    attack(400, 0, &|stream, _, _| {
        let first = open(stream).plain(Kind::Data, stream, &[1; 4040]);
        vec![(0..600).fold(first, |peer, _| peer.plain(Kind::Credit, stream, &[0; 8])).message]
    });
}

/// Every second part is of one byte, so that no part is alone.
#[test]
fn many_short_parts_stay_within_the_limit() {
    attack(300, 255, &|stream, step, _| match step {
        0 => vec![open(stream).message],
        _ => vec![Peer::new().plain(Kind::Data, stream, b"x").message],
    });
}

/// Makes `connections` peers open 200 calls each, whose replies have 1 MiB, or have no end and go in shorter
/// parts.
fn replies(connections: u64, reply: usize, exposed: u32, alter: fn(&mut [u8]), credit: u64, slots: usize) {
    let mut scale = Scale::new(connections, LIMIT);
    let mut victims = Vec::new();
    let credit = credit.to_le_bytes();
    for _ in 0..connections {
        victims.push(Victim::new(SERVER, 1 << 16, LIMIT, true, alter));
        let victim = victims.last_mut().unwrap();
        victim.streams_replies = reply < 1 << 20;
        victim.pair.ends[SERVER].device = Device { exposed, slots, ..Device::default() };
        if credit != [0; 8] {
            victim.receive(&Peer::new().plain(Kind::Credit, 0, &credit.repeat(2)).message).unwrap();
        }
        for stream in 1..=if connections == 1 { 200 } else { 20 } {
            let call = open(stream).flagged(Kind::Data, END, stream, &[]);
            let call = if credit == [0; 8] { call } else { call.plain(Kind::Credit, stream, &credit) };
            if victim.receive(&call.message).is_err() {
                break;
            }
            victim.answer(reply);
            scale.check(|| format!("{connections} connections, reply {stream}"));
        }
        let registered: u64 = victims.iter_mut().map(|victim| victim.pair.ends[SERVER].registered()).sum();
        let most = scale.bound();
        assert!(registered <= most, "{registered} bytes are registered, and {most} may be");
    }
    println!("{connections} connections, {exposed} % exposed: {} bytes at most", scale.most);
    // The application drops its calls, and the connections end: nothing is left of either.
    victims.iter_mut().for_each(Victim::release_all);
    drop(victims);
    let left = scale.held();
    assert!(left < 1 << 16, "{left} bytes are left");
}

/// The peer has credit for everything, and gives nothing back.
#[test]
fn replies_that_are_never_given_back_stay_within_the_limit() {
    for exposed in [100, 0] {
        for connections in [1, 100] {
            replies(connections, 1 << 20, exposed, |_| {}, 1 << 40, 1 << 10);
        }
    }
}

/// The same with replies that are streams.
#[test]
fn streams_that_are_never_given_back_stay_within_the_limit() {
    for connections in [1, 100] {
        replies(connections, 64 << 10, 100, |_| {}, 1 << 40, 1 << 10);
    }
}

/// SETTINGS with a window of 0: no reply may be sent.
#[test]
fn replies_without_a_window_stay_within_the_limit() {
    for connections in [1, 100] {
        replies(connections, 1 << 20, 100, |settings| settings[8..12].fill(0), 0, 1 << 10);
    }
}

/// The peer takes no message at all.
#[test]
fn replies_to_a_peer_that_reads_nothing_stay_within_the_limit() {
    for connections in [1, 100] {
        replies(connections, 1 << 20, 0, |_| {}, 1 << 40, 0);
    }
}
