//! Sequences of frames that a peer may or may not send, at both ends, with an application that takes what
//! arrives at random or never. After each step this end holds no more than its limit allows, by the counts of
//! [`held`](super::hostile::held). A violation ends the connection and frees its memory. A peer that keeps the rules
//! never makes one.
//!
//! `TONIC_RDMA_SCHEDULES` sets the number of sequences; `TONIC_RDMA_SEED` runs a single one. A sequence that fails is
//! made shorter as long as it fails, and printed.

use std::collections::HashSet;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::task::{Poll, Waker};

use fastrand::Rng;
use http::HeaderMap;

use super::hostile::held::{LIMIT, LONGEST, Scale, Victim};
use super::hostile::{CLIENT, Peer, SERVER};
use crate::grpc::core::Core;
use crate::grpc::core::stream::Stream;
use crate::grpc::frame::{
    CallViolation, ContentOffer, END, FrameHeader, Kind, MESSAGE, MORE, OfferSegment, RequestHeaders,
    ResetCode,
};
use tonic_rdma_verbs::{RemoteSegment, Rkey};

const SEQUENCES: u64 = 3000;

#[test]
fn any_sequence_of_frames() {
    let number = |name: &str| std::env::var(name).ok().map(|value| value.parse::<u64>().expect(name));
    let one = number("TONIC_RDMA_SEED");
    let all = 0..number("TONIC_RDMA_SCHEDULES").unwrap_or(SEQUENCES);
    let mut violations = 0;
    for seed in one.map_or(all, |seed| seed..seed + 1) {
        let mut sequence = Sequence::new(seed);
        match sequence.run() {
            Ok(is_violation) => violations += u64::from(is_violation),
            Err(fault) => {
                let Sequence { start, steps, .. } = sequence;
                let (steps, last) = shorten(start, steps, fault);
                panic!(
                    "seed {seed}: {last}; set TONIC_RDMA_SEED={seed} to run it alone: {start:?} {steps:#?}"
                );
            }
        }
    }
    // Rude peers break rules, and others send long sequences.
    assert!(one.is_some() || violations > 0, "no peer broke a rule");
}

/// How a sequence begins.
#[derive(Clone, Copy, Debug)]
struct Start {
    end: usize,
    streams: u32,
    window: u32,
    /// The peer knows windows of the connection, as peers of version 3 do not.
    has_windows: bool,
    /// How often the peer breaks a rule, in percent.
    rude: u32,
}

/// A step of a sequence. Indices are taken modulo the number of what there is.
#[derive(Clone)]
enum Step {
    /// The peer adds a frame to its message.
    Frame(Vec<u8>),
    /// The peer sends its message.
    Deliver,
    /// The client opens a call.
    Open,
    Accept,
    /// The application wants messages in one segment.
    InOne(usize),
    Read(usize),
    Reply(usize, usize),
    Finish(usize),
    Reset(usize),
    Release(usize),
    /// A read of the peer's memory lands.
    Land(usize),
    Transmit,
    /// The peer takes messages, or takes none.
    Slots(usize),
    /// How much lies in memory that the peer may read, and how often there is no memory, in percent.
    Device(u32, u32),
}

impl fmt::Debug for Step {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Frame(bytes) => {
                let header = bytes.first_chunk().map(FrameHeader::decode);
                write!(formatter, "Frame({header:?}, {:02x?} …)", &bytes[..bytes.len().min(24)])
            }
            Self::Deliver => formatter.write_str("Deliver"),
            Self::Open => formatter.write_str("Open"),
            Self::Accept => formatter.write_str("Accept"),
            Self::InOne(call) => write!(formatter, "InOne({call})"),
            Self::Read(call) => write!(formatter, "Read({call})"),
            Self::Reply(call, length) => write!(formatter, "Reply({call}, {length})"),
            Self::Finish(call) => write!(formatter, "Finish({call})"),
            Self::Reset(call) => write!(formatter, "Reset({call})"),
            Self::Release(call) => write!(formatter, "Release({call})"),
            Self::Land(read) => write!(formatter, "Land({read})"),
            Self::Transmit => formatter.write_str("Transmit"),
            Self::Slots(slots) => write!(formatter, "Slots({slots})"),
            Self::Device(exposed, refused) => write!(formatter, "Device({exposed}, {refused})"),
        }
    }
}

/// An end, while it goes through a sequence.
struct Run {
    start: Start,
    scale: Scale,
    victim: Victim,
    message: Vec<u8>,
    violation: Option<CallViolation>,
}

impl Run {
    fn new(start: Start) -> Self {
        let scale = Scale::new(1, LIMIT);
        let window = start.window.to_le_bytes();
        let victim = Victim::new(start.end, start.streams, LIMIT, start.has_windows, |settings| {
            settings[..4].copy_from_slice(&start.streams.to_le_bytes());
            settings[8..12].copy_from_slice(&window);
        });
        Self { start, scale, victim, message: Vec::new(), violation: None }
    }

    /// Takes a step, and checks what is held then.
    fn step(&mut self, step: &Step) -> Result<(), String> {
        let taken = catch_unwind(AssertUnwindSafe(|| self.take(step)));
        taken.map_err(|_| "a panic".to_owned())?;
        if let Some(violation) = self.violation.as_ref().filter(|_| self.start.rude == 0) {
            return Err(format!("a peer that keeps the rules broke one: {violation}"));
        }
        if self.victim.has_refused && self.start.rude == 0 && self.start.has_windows {
            return Err("there was no memory for a call of a peer that keeps the rules".into());
        }
        self.scale.find()?;
        let registered = self.victim.pair.ends[self.start.end].registered();
        if registered > self.scale.bound() {
            return Err(format!("{registered} bytes are registered, and {} may be", self.scale.bound()));
        }
        Ok(())
    }

    fn take(&mut self, step: &Step) {
        let victim = &mut self.victim;
        let key = |victim: &Victim, index: usize| victim.keys.get(index % victim.keys.len().max(1)).copied();
        match step {
            Step::Frame(frame) => {
                if self.message.len() + frame.len() > LONGEST {
                    self.deliver();
                }
                self.message.extend_from_slice(frame);
            }
            Step::Deliver => self.deliver(),
            Step::Open => {
                let path = "/a.B/C".parse().unwrap();
                let head = RequestHeaders { path, authority: None, headers: HeaderMap::new() };
                if let Ok(key) = victim.core().open(head) {
                    victim.keys.push(key);
                    victim.transmit();
                }
            }
            Step::Accept => {
                if let Some((key, _)) = victim.core().next_accepted() {
                    victim.keys.push(key);
                }
            }
            Step::InOne(call) => {
                if let Some(key) = key(victim, *call) {
                    victim.core().deliver_landed(key, 4 << 20);
                }
            }
            Step::Read(call) => {
                let Some(key) = key(victim, *call) else { return };
                if victim.end == CLIENT {
                    let _ = victim.core().poll_headers(key, None);
                }
                let _ = victim.core().poll_part(key, Some(Waker::noop()));
                victim.transmit();
            }
            Step::Reply(call, length) => {
                let Some(key) = key(victim, *call) else { return };
                if victim.end == SERVER {
                    victim.core().send_headers(key, HeaderMap::new());
                } else if victim.core().streams[key].id == 0 {
                    // What waits for other calls to end is the application's.
                    return;
                }
                if matches!(victim.core().poll_send_ready(key, Waker::noop()), Poll::Ready(Ok(()))) {
                    let parts = vec![vec![1; length / 4].into(), vec![2; length - length / 4].into()];
                    victim.core().send_message(key, parts, 0, false);
                }
                victim.transmit();
            }
            Step::Finish(call) => {
                let Some(key) = key(victim, *call) else { return };
                if victim.end == SERVER {
                    victim.core().send_trailers(key, HeaderMap::new());
                } else {
                    victim.core().send_data(key, bytes::Bytes::new(), true);
                }
                victim.transmit();
            }
            Step::Reset(call) => {
                let Some(key) = key(victim, *call) else { return };
                victim.core().reset(key, ResetCode::Cancel);
                victim.transmit();
            }
            Step::Release(call) => {
                if !victim.keys.is_empty() {
                    let index = call % victim.keys.len();
                    let key = victim.keys.swap_remove(index);
                    victim.core().release(key);
                    victim.transmit();
                }
            }
            Step::Land(read) => {
                let end = &mut victim.pair.ends[victim.end];
                if !end.fetches.is_empty() {
                    let index = read % end.fetches.len();
                    end.land_zeros(index);
                    victim.transmit();
                }
            }
            Step::Transmit => victim.transmit(),
            Step::Slots(slots) => victim.pair.ends[victim.end].device.slots = *slots,
            Step::Device(exposed, refused) => {
                let device = &mut victim.pair.ends[victim.end].device;
                (device.exposed, device.refused) = (*exposed, *refused);
            }
        }
    }

    /// Hands the message of the peer to the end.
    fn deliver(&mut self) {
        let message = std::mem::take(&mut self.message);
        if !message.is_empty() {
            self.violation = self.victim.receive(&message).err();
        }
    }

    /// Ends the connection. Nothing is left but what the application has, and then nothing.
    fn finish(mut self) -> Result<bool, String> {
        let ended = catch_unwind(AssertUnwindSafe(|| {
            self.victim.core().end(&crate::grpc::fault::CallFault::PeerClosed);
            self.victim.release_all();
            let streams = self.victim.core().streams.len();
            let fetches = &mut self.victim.pair.ends[self.start.end].fetches;
            fetches.clear();
            streams
        }));
        match ended {
            Err(_) => return Err("a panic at the end".into()),
            Ok(0) => {}
            Ok(streams) => return Err(format!("{streams} streams are left of a connection that has ended")),
        }
        // A frame that breaks a rule may have been counted before.
        let ledger = &self.victim.core().ledger;
        if self.violation.is_none() && !ledger.is_empty() {
            return Err(format!("the ledger of a connection that has ended is not empty: {ledger:?}"));
        }
        let registered = self.victim.pair.ends[self.start.end].registered();
        if registered > 0 {
            return Err(format!("{registered} registered bytes are left of a connection that has ended"));
        }
        let Self { victim, message, mut scale, violation, .. } = self;
        drop((victim, message));
        match scale.held() {
            0..4096 => Ok(violation.is_some()),
            left => Err(format!("{left} bytes are left of a connection that is gone")),
        }
    }
}

/// A sequence that is made while it is carried out, because a peer that keeps the rules looks at what it may send.
struct Sequence {
    start: Start,
    random: Rng,
    steps: Vec<Step>,
    /// The offers of this side that the peer has given back.
    given_back: HashSet<u64>,
    next_offer: u64,
    last_stream: u32,
    /// How often each of reading, answering and dropping happens, of 100 steps.
    application: [u32; 3],
}

impl Sequence {
    fn new(seed: u64) -> Self {
        let mut random = Rng::with_seed(seed);
        let start = Start {
            end: random.usize(..2),
            streams: [1, 3, 100, 1 << 16][random.usize(..4)],
            window: [0, 1, 16 << 10, 64 << 10][random.usize(..4)],
            has_windows: random.u32(..4) > 0,
            rude: [0, 0, 1, 10][random.usize(..4)],
        };
        let application = [(); 3].map(|()| [0, 0, 5, 20, 40][random.usize(..5)]);
        Self {
            start,
            random,
            steps: Vec::new(),
            given_back: HashSet::new(),
            next_offer: 0,
            last_stream: 0,
            application,
        }
    }

    /// Makes and takes steps. Returns whether the peer broke a rule.
    fn run(&mut self) -> Result<bool, String> {
        let mut run = Run::new(self.start);
        let count = [20, 100, 400][self.random.usize(..3)];
        while self.steps.len() < count && run.violation.is_none() {
            let begun = self.steps.len();
            run.victim.core();
            run.scale.except(|| self.add_steps(&mut run.victim));
            for step in begun..self.steps.len() {
                if run.violation.is_none() {
                    run.step(&self.steps[step])?;
                }
            }
        }
        run.finish()
    }

    fn one<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.random.usize(..of.len())]
    }

    fn add_steps(&mut self, victim: &mut Victim) {
        let index = self.random.usize(..1 << 16);
        let [reads, replies, drops] = self.application;
        if victim.keys.is_empty() || self.random.u32(..8) == 0 {
            let begins = if self.start.end == CLIENT { Step::Open } else { Step::Accept };
            self.steps.push(begins);
            return;
        }
        let length = self.one(&[1, 511, 513, 4096, 5000, 70_000, 256 << 10]);
        let step = match self.random.u32(..200) {
            0..2 => Step::Slots(self.one(&[0, 1, 1000])),
            2..4 => Step::Device(self.one(&[0, 50, 100]), self.one(&[0, 0, 20, 90])),
            4..8 => Step::InOne(index),
            8..20 => Step::Land(index),
            20..24 => Step::Transmit,
            chance if chance < 24 + reads => Step::Read(index),
            chance if chance < 24 + reads + replies => Step::Reply(index, length),
            chance if chance < 24 + reads + replies + drops / 4 => {
                self.one(&[Step::Finish as fn(usize) -> Step, Step::Reset, Step::Release])(index)
            }
            _ => return self.add_message(victim),
        };
        self.steps.push(step);
    }

    fn add_message(&mut self, victim: &mut Victim) {
        // The peer knows what it may send when the message before has arrived.
        for _ in 0..self.one(&[1, 1, 1, 3]) {
            if let Some(frame) = self.frame(victim) {
                self.steps.push(Step::Frame(frame));
                if self.start.rude == 0 {
                    break;
                }
            }
        }
        self.steps.push(Step::Deliver);
    }

    /// Returns whether the peer breaks a rule now.
    fn is_rude(&mut self) -> bool {
        self.random.u32(..100) < self.start.rude
    }

    /// Returns a frame, if the peer has one for what it has chosen to do.
    fn frame(&mut self, victim: &mut Victim) -> Option<Vec<u8>> {
        let rude = self.is_rude();
        let kind = if rude { self.random.u8(..11) } else { self.one(&[2, 2, 3, 3, 3, 4, 4, 4, 5, 6, 7, 8]) };
        let core = victim.core();
        if !rude
            && self.start.has_windows
            && !core.ledger.has_room(if matches!(kind, 2 | 6) { Kind::Headers } else { Kind::Data })
        {
            return None;
        }
        let stream = self.stream(core, kind, rude)?;
        let flags = if self.random.u32(..12) == 0 { END } else { 0 };
        let left = core.streams.by_number(stream).map_or(0, |key| core.streams[key].receiving.allowance);
        let with =
            |kind, flags, payload: &[u8]| Some(Peer::new().flagged(kind, flags, stream, payload).message);
        match kind {
            2 | 6 => {
                let kind = if kind == 2 { Kind::Headers } else { Kind::Trailers };
                if !rude {
                    self.last_stream = self.last_stream.max(stream);
                }
                let flags = if kind == Kind::Headers { flags } else { 0 };
                let block = self.block();
                let (first, rest) = block.split_at(self.random.usize(..=block.len()));
                if self.random.u32(..4) > 0 {
                    return with(kind, flags, &block);
                }
                let both =
                    Peer::new().flagged(kind, flags | MORE, stream, first).flagged(kind, 0, stream, rest);
                Some(both.message)
            }
            3 => {
                let most = LONGEST - FrameHeader::LENGTH;
                let all = usize::try_from(left).unwrap_or(0).min(most);
                let length = self.one(&[0, 1, 255, 256, 257, 4095, 4096, all, most]);
                let length = if rude { length } else { length.min(all) };
                with(Kind::Data, flags, &vec![7; length])
            }
            4 => {
                if !rude && left <= 0 {
                    return None;
                }
                let payload = self.offer(rude);
                self.next_offer += u64::from(!rude || self.random.bool());
                with(Kind::Offer, flags | self.one(&[0, MESSAGE]), &payload)
            }
            5 => {
                let next = core.output.offers.next();
                let id = self.random.u64(..=next);
                let is_known = id < next && self.given_back.insert(id);
                (is_known || rude).then(|| Peer::new().plain(Kind::Taken, 0, &id.to_le_bytes()).message)
            }
            7 => with(Kind::Reset, 0, &[]),
            8 => {
                let most = if rude { u64::MAX } else { 1 << 40 };
                let credit = self.one(&[0, 1, 256, 64 << 10, most]);
                with(
                    Kind::Credit,
                    0,
                    &credit.to_le_bytes().repeat(if stream == 0 && self.start.has_windows { 2 } else { 1 }),
                )
            }
            9 => Some(Peer::new().plain(Kind::GoAway, self.random.u32(..5), b"it goes").message),
            1 => Some(Peer::new().plain(Kind::Settings, 0, &[1; 24]).message),
            _ => {
                let length = self.random.usize(..40);
                Some((0..length).map(|_| self.random.u8(..)).collect())
            }
        }
    }

    /// Returns a stream on which the peer may send a frame of this kind.
    fn stream<K>(&mut self, core: &Core<K>, kind: u8, rude: bool) -> Option<u32> {
        if rude && self.random.bool() {
            return Some(self.one(&[
                0,
                1,
                self.last_stream.wrapping_add(1),
                self.last_stream.wrapping_add(7),
                u32::MAX,
            ]));
        }
        if kind == 2 && self.start.end == SERVER {
            let gap = self.one(&[1, 1, 1, 5]);
            return (core.streams.open_len() < self.start.streams as usize)
                .then_some(self.last_stream.saturating_add(gap));
        }
        if kind == 8 && self.start.has_windows && self.random.u32(..4) == 0 {
            return Some(0);
        }
        if kind == 6 && self.start.end == SERVER {
            return None;
        }
        let may = |stream: &Stream| {
            let receiving = &stream.receiving;
            !stream.closed
                && stream.id != 0
                && match kind {
                    2 => !receiving.headers_seen,
                    3 | 4 => receiving.headers_seen && !receiving.ended,
                    6 => receiving.headers_seen && !receiving.ended,
                    _ => true,
                }
        };
        let open: Vec<_> =
            core.streams.iter().filter(|(_, stream)| may(stream)).map(|(_, it)| it.id).collect();
        (!open.is_empty()).then(|| open[self.random.usize(..open.len())])
    }

    fn block(&mut self) -> Vec<u8> {
        let mut block = Vec::new();
        if self.start.end == SERVER {
            block.extend_from_slice(b"\x01\x06\x00/a.B/C");
        }
        let (count, longest) =
            self.one(&[(0, 0), (0, 0), (1, 10), (5, 100), (400, 0), (1, 14_000), (3, 4000)]);
        for number in 0..count {
            let name = [b'a' + (number % 26) as u8, b'a' + (number / 26) as u8];
            block.extend([5, 2, 0]);
            block.extend(name);
            block.extend_from_slice(&(longest as u32).to_le_bytes());
            block.extend(std::iter::repeat_n(b'v', longest));
        }
        block
    }

    /// Returns an offer of 1 to 256 segments, of a rude peer of 0 to 300.
    fn offer(&mut self, rude: bool) -> Vec<u8> {
        let count =
            self.one(&[1, 1, 2, 7, 255, 256, if rude { 0 } else { 1 }, if rude { 257 } else { 256 }, 300]);
        let count = if rude { count } else { count.min(256) };
        let remote = self.one(&[0, 50, 100]);
        let (inline, lengths): (&[usize], &[u64]) = if count > 8 {
            (&[1, 2, 40], &[1, 4096])
        } else {
            (&[1, 255, 1500], &[1, 4096, 512 << 10, 5 << 20, 1 << 40])
        };
        let mut segments: Vec<_> = (0..count)
            .map(|_| {
                if self.random.u32(..100) < remote {
                    let from = RemoteSegment { address: self.random.u64(..1 << 40), rkey: Rkey(1) };
                    OfferSegment::Remote { from, length: self.one(lengths) }
                } else {
                    OfferSegment::Inline(vec![7; self.one(inline)].into())
                }
            })
            .collect();
        let room = LONGEST - FrameHeader::LENGTH - ContentOffer::PREFIX;
        let mut encoded = 0;
        segments.retain(|segment| {
            encoded += segment.encoded_length();
            encoded <= room
        });
        let total =
            segments.iter().map(OfferSegment::length).sum::<u64>() + u64::from(rude && self.is_rude());
        let mut payload = Vec::new();
        ContentOffer { id: self.next_offer, total, aligned_at: 0, segments }.encode(&mut payload);
        payload
    }
}

/// Drops steps as long as the sequence still fails. Returns what is left, and how it fails.
fn shorten(start: Start, mut steps: Vec<Step>, fault: String) -> (Vec<Step>, String) {
    // Without some steps a peer that keeps the rules breaks others.
    let kind = |fault: &str| fault.replace(|letter: char| letter.is_ascii_digit(), "");
    let fails = |steps: &[Step]| {
        let mut run = Run::new(start);
        let broken =
            steps.iter().find_map(|step| (run.violation.is_none()).then(|| run.step(step).err()).flatten());
        broken.or_else(|| run.finish().err())
    };
    let (mut size, mut last) = (steps.len().next_power_of_two(), fault);
    while size > 0 {
        let mut at = 0;
        while at < steps.len() {
            let mut fewer = steps.clone();
            fewer.drain(at..(at + size).min(steps.len()));
            match fails(&fewer) {
                Some(fault) if kind(&fault) == kind(&last) => (steps, last) = (fewer, fault),
                _ => at += size,
            }
        }
        size /= 2;
    }
    (steps, last)
}
