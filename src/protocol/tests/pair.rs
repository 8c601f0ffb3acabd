//! The model: what two queue pairs do with what the protocol asks for, in any order that verbs allow.
//!
//! Of one queue, things happen in order: sends arrive as posted, send completions come as posted, and so do READs'.
//! Between queues nothing is promised: a message may arrive before or after the completion of the send that carried it,
//! a READ before or after a later message, a slot be posted again late.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use crate::protocol::{
    Chunk, Connection, ControlMessage, Event, Part, ReadId, ReadRequest, Settings, SlotIndex, Violation,
};
use crate::wire::{Header, Kind};

/// A small generator of numbers, the same for the same seed.
#[derive(Debug)]
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5851_f42d_4c95_7f2d)
    }

    pub(super) fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }

    pub(super) fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

/// The byte at a place of an end's stream.
pub(super) fn content(end: usize, position: u64) -> u8 {
    (position.wrapping_mul(0x9e37_79b9) >> 7) as u8 ^ (end as u8).wrapping_mul(0x5a)
}

/// A message on its way, or in a slot.
#[derive(Clone, Debug)]
struct Message(Vec<u8>);

/// One end: its connection, its memory, its queues.
#[derive(Debug)]
pub(super) struct End {
    pub(super) connection: Connection,
    index: usize,
    settings: Settings,
    /// Slots in posting order; those of a shared receive queue that are kept for this end.
    posted: VecDeque<SlotIndex>,
    /// Slots there ever were, and how many are kept for this end now.
    next_slot: u32,
    kept: u32,
    slots: HashMap<SlotIndex, Message>,
    /// Sends that have not completed locally.
    outstanding_sends: u32,
    /// READs that have not completed, in order.
    reads: VecDeque<ReadRequest>,
    landings: HashMap<ReadId, Vec<u8>>,
    /// Chunks offered, oldest first, and the memory that the peer reads.
    sources: VecDeque<u64>,
    memory: HashMap<u64, Vec<u8>>,
    next_address: u64,
    pub(super) written: u64,
    pub(super) read: u64,
    pub(super) buffers: usize,
    pub(super) events: Vec<Event>,
    /// Released slots that are not posted again yet.
    released: VecDeque<SlotIndex>,
}

/// Both ends, and what is between them.
#[derive(Debug)]
pub(super) struct Pair {
    pub(super) ends: [End; 2],
    /// Messages on their way to each end.
    wire: [VecDeque<Message>; 2],
    pub(super) now: Instant,
    /// What went over the wire, for transcripts.
    pub(super) log: Vec<(usize, Kind)>,
    pub(super) violation: Option<Violation>,
}

impl Pair {
    pub(super) fn new(settings: [Settings; 2]) -> Self {
        let now = Instant::now();
        let ends = [0, 1].map(|index| End::new(index, &settings, now));
        let (wire, log) = Default::default();
        Self { ends, wire, now, log, violation: None }
    }

    /// Both ends alike.
    pub(super) fn alike(settings: Settings) -> Self {
        Self::new([settings.clone(), settings])
    }

    pub(super) fn pass(&mut self, time: Duration) {
        self.now += time;
        for end in &mut self.ends {
            end.connection.handle_timeout(self.now);
        }
    }

    /// An end sends a message: takes a place on its queue and on the wire.
    fn post(&mut self, from: usize, message: Vec<u8>) {
        let end = &mut self.ends[from];
        end.outstanding_sends += 1;
        assert!(end.outstanding_sends <= end.settings.send_queue, "the send queue is full");
        assert!(message.len() <= end.settings.peer_slot_size as usize, "longer than a slot");
        let header = Header::decode(message[..Header::LENGTH].try_into().unwrap()).unwrap();
        self.log.push((from, header.kind));
        self.wire[1 - from].push_back(Message(message));
        // Receiver not ready must never happen: there is a slot for everything on the wire.
        let ready = self.ends[1 - from].posted.len();
        assert!(self.wire[1 - from].len() <= ready, "a message without a slot to go to");
    }

    /// Writes up to `length` bytes eagerly; how many were taken.
    pub(super) fn write_eager(&mut self, from: usize, length: usize) -> usize {
        let end = &mut self.ends[from];
        let count = end.connection.eager_room().min(length);
        if count == 0 {
            return 0;
        }
        let header = end.connection.send_eager(count, false, self.now).unwrap();
        let mut message = header.to_vec();
        message.extend(end.next_bytes(count));
        self.post(from, message);
        count
    }

    /// Offers chunks of these lengths; how many were taken.
    pub(super) fn write_rendezvous(&mut self, from: usize, lengths: &[usize]) -> usize {
        let end = &mut self.ends[from];
        let count = end.connection.rendezvous_room().min(lengths.len());
        if count == 0 {
            return 0;
        }
        let chunks: Vec<Chunk> = lengths[..count].iter().map(|&length| end.offer(length)).collect();
        let message = end.connection.send_rendezvous(&chunks, false, self.now).unwrap();
        self.post(from, message.as_bytes().to_vec());
        count
    }

    /// Reads up to `most` bytes and checks them.
    pub(super) fn read(&mut self, at: usize, most: usize) -> usize {
        let end = &mut self.ends[at];
        let mut taken = 0;
        while taken < most
            && let Some(part) = end.connection.front()
        {
            let (bytes, offset, length) = match part {
                Part::Eager { slot, offset, length } => (&end.slots[&slot].0, offset, length),
                Part::Rendezvous { read, offset, length } => (&end.landings[&read], offset, length),
            };
            let count = length.min(most - taken);
            for (index, byte) in bytes[offset..offset + count].iter().enumerate() {
                let position = end.read + index as u64;
                assert_eq!(*byte, content(1 - at, position), "byte {position} of the stream to end {at}");
            }
            end.read += count as u64;
            taken += count;
            if let Some(crate::protocol::Finished::Read(read)) = end.connection.consume(count) {
                end.landings.remove(&read);
            }
        }
        taken
    }

    /// The oldest message on its way to `to` arrives; false if there is none.
    pub(super) fn arrive(&mut self, to: usize) -> bool {
        let Some(message) = self.wire[to].pop_front() else { return false };
        let end = &mut self.ends[to];
        let slot = end.posted.pop_front().expect("receiver not ready");
        let header = Header::decode(message.0[..Header::LENGTH].try_into().unwrap()).unwrap();
        let length = message.0.len();
        let body = if header.kind == Kind::Eager { &[][..] } else { &message.0[Header::LENGTH..] };
        let outcome = end.connection.handle_receive(slot, &header, body, length, self.now);
        end.slots.insert(slot, message);
        self.violation = self.violation.take().or(outcome.err());
        true
    }

    /// The oldest send of `end` completes locally; false if there is none.
    pub(super) fn complete_send(&mut self, end: usize) -> bool {
        let end = &mut self.ends[end];
        if end.outstanding_sends == 0 {
            return false;
        }
        end.outstanding_sends -= 1;
        end.connection.handle_sends_completed(1);
        true
    }

    /// The oldest READ of `end` lands; false if there is none.
    pub(super) fn complete_read(&mut self, end: usize) -> bool {
        let Some(request) = self.ends[end].reads.pop_front() else { return false };
        let bytes =
            self.ends[1 - end].memory.get(&request.address).expect("freed before it was read").clone();
        assert_eq!(bytes.len() as u64, request.length);
        let end = &mut self.ends[end];
        end.landings.insert(request.id, bytes);
        end.connection.handle_read_completed(request.id);
        true
    }

    /// A released slot of `end` is posted again; false if there is none.
    pub(super) fn repost(&mut self, end: usize) -> bool {
        let end = &mut self.ends[end];
        let Some(slot) = end.released.pop_front() else { return false };
        end.slots.remove(&slot);
        end.posted.push_back(slot);
        end.connection.handle_slots_posted(1);
        true
    }

    /// A shared receive queue keeps `slots` more for `end`.
    pub(super) fn widen(&mut self, end: usize, slots: u32) {
        let end = &mut self.ends[end];
        end.posted.extend((end.next_slot..end.next_slot + slots).map(SlotIndex));
        end.next_slot += slots;
        end.kept += slots;
        end.connection.widen(slots);
    }

    /// Carries out what `end`'s connection wants done; false if that is nothing.
    pub(super) fn serve(&mut self, end: usize) -> bool {
        let mut busy = self.ends[end].let_go();
        while let Some(slot) = self.ends[end].connection.poll_release() {
            self.ends[end].released.push_back(slot);
            busy = true;
        }
        while let Some(event) = self.ends[end].connection.poll_event() {
            self.ends[end].handle_event(event);
            busy = true;
        }
        while let Some(request) = self.ends[end].next_read() {
            self.ends[end].reads.push_back(request);
            busy = true;
        }
        while let Some(message) = self.ends[end].connection.poll_transmit(self.now) {
            let message: ControlMessage = message;
            self.post(end, message.as_bytes().to_vec());
            busy = true;
        }
        busy
    }

    /// Everything that can happen happens, until nothing does. `read` says whether the applications read.
    pub(super) fn settle(&mut self, read: bool) {
        self.drive_bounded(100_000, read);
    }

    fn drive_bounded(&mut self, steps: usize, read: bool) {
        for _ in 0..steps {
            let mut busy = false;
            for end in [0, 1] {
                busy |= self.serve(end);
                busy |=
                    self.complete_read(end) | self.arrive(end) | self.complete_send(end) | self.repost(end);
                if read {
                    busy |= self.read(end, usize::MAX) > 0;
                }
            }
            if !busy || self.violation.is_some() {
                return;
            }
        }
        panic!("the two ends never fall silent");
    }
}

impl End {
    fn new(index: usize, settings: &[Settings; 2], now: Instant) -> Self {
        let (own, peer) = (&settings[index], &settings[1 - index]);
        let settings =
            Settings { peer_slots: peer.receive_slots, peer_slot_size: peer.slot_size, ..own.clone() };
        Self {
            connection: Connection::new(settings.clone(), now).unwrap(),
            index,
            posted: (0..settings.receive_slots).map(SlotIndex).collect(),
            next_slot: settings.receive_slots,
            kept: settings.receive_slots,
            settings,
            slots: HashMap::new(),
            outstanding_sends: 0,
            reads: VecDeque::new(),
            landings: HashMap::new(),
            sources: VecDeque::new(),
            memory: HashMap::new(),
            next_address: 1,
            written: 0,
            read: 0,
            buffers: 4,
            events: Vec::new(),
            released: VecDeque::new(),
        }
    }

    fn next_bytes(&mut self, count: usize) -> Vec<u8> {
        let start = self.written;
        self.written += count as u64;
        (start..self.written).map(|position| content(self.index, position)).collect()
    }

    fn offer(&mut self, length: usize) -> Chunk {
        let bytes = self.next_bytes(length);
        let address = self.next_address;
        self.next_address += 1;
        self.sources.push_back(address);
        self.memory.insert(address, bytes);
        Chunk { address, rkey: 7, length: length as u64 }
    }

    /// Slots that need not be kept any more go to other connections; they are posted, or about to be.
    fn let_go(&mut self) -> bool {
        let window = self.connection.window();
        assert!(window >= self.settings.receive_slots && window <= self.kept, "the window of {}", self.index);
        let surplus = (self.kept - window) as usize;
        let posted = surplus.min(self.posted.len());
        self.posted.truncate(self.posted.len() - posted);
        self.kept -= posted as u32;
        posted > 0
    }

    fn handle_event(&mut self, event: Event) {
        if let Event::SourcesDone { count } = event {
            for _ in 0..count {
                let address = self.sources.pop_front().expect("more chunks done than were offered");
                self.memory.remove(&address);
            }
        }
        self.events.push(event);
    }

    /// The next READ, if there is a buffer for it.
    fn next_read(&mut self) -> Option<ReadRequest> {
        if self.reads.len() + self.landings.len() >= self.buffers {
            return None;
        }
        let request = self.connection.peek_read()?;
        self.connection.start_read();
        assert!(self.reads.len() < self.settings.max_reads as usize, "more READs than agreed");
        Some(request)
    }

    /// Whether no more slots are kept for it than at the start, and as many as the peer was not told of: less than a
    /// quarter.
    pub(super) fn has_least_window(&self) -> bool {
        3 * self.connection.window() <= 4 * self.settings.receive_slots
    }

    pub(super) fn sources_left(&self) -> usize {
        self.sources.len()
    }
}
