//! A model of two queue pairs, which carries out the protocol's requests in any order that verbs allow.
//!
//! Events of one queue are in order: sends arrive, and sends and READs complete, in the order of posting.
//! There is no order between queues: a message may arrive before or after the completion of its send, a READ
//! may land before or after a later message, and a slot may be posted again late.
//!
//! An end may leave its connection ([`Gone`]): its process hangs, or its device fails a request and with it
//! the queue pair.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use crate::protocol::{
    AbortCode, Chunk, Connection, ControlMessage, Event, Part, ProtocolViolation, ReadId, ReadRequest,
    Settings, SlotIndex,
};
use crate::wire::{Header, MessageKind};

/// A small generator of random numbers. Equal seeds give equal numbers.
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

/// Returns the byte at a position of an end's stream.
pub(super) fn content(end: usize, position: u64) -> u8 {
    (position.wrapping_mul(0x9e37_79b9) >> 7) as u8 ^ (end as u8).wrapping_mul(0x5a)
}

/// A message on the wire, or in a slot.
#[derive(Clone, Debug)]
struct Message(Vec<u8>);

/// One end: its connection, its memory and its queues.
#[derive(Debug)]
pub(super) struct PairEnd {
    pub(super) connection: Connection,
    index: usize,
    settings: Settings,
    /// The slots in the order of posting: the slots of a shared receive queue that are kept for this side.
    posted: VecDeque<SlotIndex>,
    /// The count of slots since the start, and the number that is kept for this side now.
    next_slot: u32,
    kept: u32,
    slots: HashMap<SlotIndex, Message>,
    /// The sends that have not completed locally.
    outstanding_sends: u32,
    /// The READs that have not completed, in order.
    reads: VecDeque<ReadRequest>,
    landings: HashMap<ReadId, Vec<u8>>,
    /// The offered chunks, the oldest first, with the memory that the peer reads.
    sources: VecDeque<u64>,
    memory: HashMap<u64, Vec<u8>>,
    next_address: u64,
    pub(super) written: u64,
    pub(super) read: u64,
    pub(super) buffers: usize,
    pub(super) events: Vec<Event>,
    /// The released slots that are not posted again yet.
    released: VecDeque<SlotIndex>,
    /// The parts that have arrived and were not read: the number of bytes, and the READ of a rendezvous.
    unread: VecDeque<(usize, Option<ReadId>)>,
    chunks_seen: u32,
    pub(super) gone: Option<Gone>,
    /// The time at which the timer of this side expires. As in the driver, the timer is set again when it
    /// expires, not when a message arrives.
    timer: Option<Instant>,
    last_received: Instant,
    /// The time since then in which this process did not run.
    stood_still: Duration,
    /// True if this side aborted, or received an abort.
    gave_up: bool,
    /// True if this side aborted because the peer did not answer a ping.
    pub(super) timed_out: bool,
}

/// The reason why an end has left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Gone {
    /// The process hangs. Its device and its memory still work.
    Hangs,
    /// The queue pair has failed: nothing arrives, nothing is sent, and the memory of this side can't be
    /// read. The application can still read the data that had arrived.
    Failed,
}

/// Both sides, and the wire between them.
#[derive(Debug)]
pub(super) struct ConnectionPair {
    pub(super) ends: [PairEnd; 2],
    /// The messages on the wire to each side.
    wire: [VecDeque<Message>; 2],
    pub(super) now: Instant,
    /// The messages that went over the wire, for transcripts.
    pub(super) log: Vec<(usize, MessageKind)>,
    pub(super) violation: Option<ProtocolViolation>,
}

impl ConnectionPair {
    pub(super) fn new(settings: [Settings; 2]) -> Self {
        let now = Instant::now();
        let ends = [0, 1].map(|index| PairEnd::new(index, &settings, now));
        let (wire, log) = Default::default();
        Self { ends, wire, now, log, violation: None }
    }

    /// Makes two sides with the same settings.
    pub(super) fn alike(settings: Settings) -> Self {
        Self::new([settings.clone(), settings])
    }

    /// Moves the time forward. Each side's timer expires when it is due.
    pub(super) fn pass(&mut self, time: Duration) {
        let until = self.now + time;
        let next = |pair: &Self| {
            let ends = pair.ends.iter().filter(|end| end.gone.is_none());
            let due = ends.filter_map(|end| Some((end.timer?, end.index)));
            due.filter(|(at, _)| *at <= until).min()
        };
        while let Some((at, end)) = next(self) {
            self.now = self.now.max(at);
            self.ends[end].timer_goes_off(self.now);
        }
        self.now = until;
        self.ends.iter().for_each(|end| end.check_silence(until));
    }

    /// Lets both processes stand still for this time. Timers go off when they run again.
    pub(super) fn stand_still(&mut self, time: Duration) {
        self.now += time;
        for end in self.ends.iter_mut().filter(|end| end.gone.is_none()) {
            end.stood_still += time;
            if end.timer.is_some_and(|due| due <= self.now) {
                end.timer_goes_off(self.now);
            }
        }
    }

    /// Aborts the connection at one side.
    pub(super) fn abort(&mut self, end: usize, code: AbortCode) {
        self.ends[end].gave_up = true;
        self.ends[end].connection.abort(code);
    }

    /// Lets the process of `end` hang.
    pub(super) fn hang(&mut self, end: usize) {
        self.ends[end].gone = Some(Gone::Hangs);
    }

    /// Fails a send or a READ of `end`, and all requests posted after it. A READ has no result. Of the
    /// messages on the wire only the first `arriving` arrive.
    pub(super) fn fail(&mut self, end: usize, arriving: usize) {
        self.ends[end].gone = Some(Gone::Failed);
        self.ends[end].reads.clear();
        self.wire[1 - end].truncate(arriving);
    }

    /// Returns the number of messages on the wire.
    pub(super) fn on_the_way_to(&self, end: usize) -> usize {
        self.wire[end].len()
    }

    /// Sends a message, which takes an entry of the send queue until it completes, and is on the wire.
    fn post(&mut self, from: usize, message: Vec<u8>) {
        let end = &mut self.ends[from];
        end.outstanding_sends += 1;
        assert!(end.outstanding_sends <= end.settings.send_queue, "the send queue is full");
        assert!(message.len() <= end.settings.peer_slot_size as usize, "longer than a slot");
        let header = Header::decode(message[..Header::LENGTH].try_into().unwrap()).unwrap();
        self.log.push((from, header.kind));
        self.wire[1 - from].push_back(Message(message));
        // There must be a slot for each message on the wire, so that "receiver not ready" never happens.
        let ready = self.ends[1 - from].posted.len();
        assert!(self.wire[1 - from].len() <= ready, "a message without a slot to go to");
    }

    /// Writes up to `length` bytes eagerly, and returns the number of bytes taken.
    pub(super) fn write_eager(&mut self, from: usize, length: usize) -> usize {
        let end = &mut self.ends[from];
        let count = if end.gone.is_some() { 0 } else { end.connection.eager_room().min(length) };
        if count == 0 {
            return 0;
        }
        let header = end.connection.send_eager(count).unwrap();
        let mut message = header.to_vec();
        message.extend(end.next_bytes(count));
        self.post(from, message);
        count
    }

    /// Offers chunks of these lengths, and returns the number of chunks taken.
    pub(super) fn write_rendezvous(&mut self, from: usize, lengths: &[usize]) -> usize {
        let end = &mut self.ends[from];
        let count = if end.gone.is_some() { 0 } else { end.connection.rendezvous_room().min(lengths.len()) };
        if count == 0 {
            return 0;
        }
        let chunks: Vec<Chunk> = lengths[..count].iter().map(|&length| end.offer(length)).collect();
        let message = end.connection.send_rendezvous(&chunks).unwrap();
        self.post(from, message.as_bytes().to_vec());
        count
    }

    /// Reads up to `most` bytes and checks them.
    pub(super) fn read(&mut self, at: usize, most: usize) -> usize {
        let end = &mut self.ends[at];
        let mut taken = 0;
        if end.gone == Some(Gone::Hangs) {
            return taken;
        }
        while taken < most {
            let Some(part) = end.connection.front() else {
                let there = end.unread.front().filter(|(_, read)| end.has_landed(*read));
                assert_eq!(there, None, "bytes that are there, and that end {at} does not get");
                break;
            };
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
            end.was_read(count);
            taken += count;
            if let Some(read) = end.connection.consume(count) {
                end.landings.remove(&read);
            }
        }
        taken
    }

    /// Lets the oldest message to `to` arrive. Returns false if there is none.
    pub(super) fn arrive(&mut self, to: usize) -> bool {
        let end = &mut self.ends[to];
        if end.gone.is_some() {
            return false;
        }
        let Some(message) = self.wire[to].pop_front() else { return false };
        let slot = end.posted.pop_front().expect("receiver not ready");
        let header = Header::decode(message.0[..Header::LENGTH].try_into().unwrap()).unwrap();
        let length = message.0.len();
        let body = if header.kind == MessageKind::Eager { &[][..] } else { &message.0[Header::LENGTH..] };
        let outcome = end.connection.handle_receive(slot, &header, body, length, self.now);
        (end.last_received, end.stood_still) = (self.now, Duration::ZERO);
        match header.kind {
            MessageKind::Eager => end.unread.push_back((length - Header::LENGTH, None)),
            MessageKind::Rts => end.expect_chunks(body),
            MessageKind::Abort => end.gave_up = true,
            _ => {}
        }
        end.slots.insert(slot, message);
        self.violation = self.violation.take().or(outcome.err());
        true
    }

    /// Completes the oldest send of `end` locally. Returns false if there is none.
    pub(super) fn complete_send(&mut self, end: usize) -> bool {
        let end = &mut self.ends[end];
        if end.gone.is_some() || end.outstanding_sends == 0 {
            return false;
        }
        end.outstanding_sends -= 1;
        end.connection.handle_sends_completed(1);
        true
    }

    /// Lets the oldest READ of `end` land. Returns false if there is none.
    pub(super) fn complete_read(&mut self, end: usize) -> bool {
        if self.ends[end].gone.is_some() || self.ends[1 - end].gone == Some(Gone::Failed) {
            return false;
        }
        let Some(request) = self.ends[end].reads.pop_front() else { return false };
        let bytes =
            self.ends[1 - end].memory.get(&request.address).expect("freed before it was read").clone();
        assert_eq!(bytes.len() as u64, request.length);
        let end = &mut self.ends[end];
        end.landings.insert(request.id, bytes);
        end.connection.handle_read_completed(request.id);
        true
    }

    /// Posts a released slot of `end` again. Returns false if there is none.
    pub(super) fn repost(&mut self, end: usize) -> bool {
        let end = &mut self.ends[end];
        if end.gone.is_some() {
            return false;
        }
        let Some(slot) = end.released.pop_front() else { return false };
        end.slots.remove(&slot);
        end.posted.push_back(slot);
        end.connection.handle_slots_posted(1);
        true
    }

    /// Keeps `slots` more slots of a shared receive queue for `end`.
    pub(super) fn widen(&mut self, end: usize, slots: u32) {
        let end = &mut self.ends[end];
        end.posted.extend((end.next_slot..end.next_slot + slots).map(SlotIndex));
        end.next_slot += slots;
        end.kept += slots;
        end.connection.widen(slots);
    }

    /// Carries out the requests of `end`'s connection. Returns false if there are none.
    pub(super) fn serve(&mut self, end: usize) -> bool {
        if self.ends[end].gone.is_some() {
            return false;
        }
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
        while let Some(message) = self.ends[end].connection.poll_transmit() {
            let message: ControlMessage = message;
            self.post(end, message.as_bytes().to_vec());
            busy = true;
        }
        busy
    }

    /// Runs all events until none is left. With `read`, the applications read.
    pub(super) fn settle(&mut self, read: bool) {
        self.drive_bounded(100_000, |pair| {
            let happened = [0, 1].map(|end| Action::ALL.map(|action| pair.act(action, end, read)));
            happened.as_flattened().contains(&true)
        });
    }

    /// Runs all events in an order that `random` chooses: an event of one side may wait for any time.
    pub(super) fn settle_in_any_order(&mut self, read: bool, random: &mut Random) {
        const ACTIONS: usize = 2 * Action::ALL.len();
        self.drive_bounded(1_000_000, |pair| {
            // Tries each event once, from a random start. The step and the number of events are coprime, so
            // no event is left out.
            let (start, step) =
                (random.below(ACTIONS as u64) as usize, [1, 5, 7, 11][random.below(4) as usize]);
            (0..ACTIONS).any(|index| {
                let chosen = (start + index * step) % ACTIONS;
                pair.act(Action::ALL[chosen / 2], chosen % 2, read)
            })
        });
    }

    fn act(&mut self, action: Action, end: usize, read: bool) -> bool {
        match action {
            Action::Serve => self.serve(end),
            Action::CompleteRead => self.complete_read(end),
            Action::Arrive => self.arrive(end),
            Action::CompleteSend => self.complete_send(end),
            Action::Repost => self.repost(end),
            Action::Read => read && self.read(end, usize::MAX) > 0,
        }
    }

    fn drive_bounded(&mut self, steps: usize, mut step: impl FnMut(&mut Self) -> bool) {
        for _ in 0..steps {
            if !step(self) || self.violation.is_some() {
                return;
            }
        }
        panic!("the two ends never fall silent");
    }
}

/// An event at a side that needs no new data.
#[derive(Clone, Copy, Debug)]
enum Action {
    Serve,
    CompleteRead,
    Arrive,
    CompleteSend,
    Repost,
    Read,
}

impl Action {
    const ALL: [Self; 6] =
        [Self::Serve, Self::CompleteRead, Self::Arrive, Self::CompleteSend, Self::Repost, Self::Read];
}

impl PairEnd {
    fn new(index: usize, settings: &[Settings; 2], now: Instant) -> Self {
        let (own, peer) = (&settings[index], &settings[1 - index]);
        let settings =
            Settings { peer_slots: peer.receive_slots, peer_slot_size: peer.slot_size, ..own.clone() };
        let connection = Connection::new(settings.clone(), now).unwrap();
        Self {
            timer: connection.poll_timeout(),
            connection,
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
            unread: VecDeque::new(),
            chunks_seen: 0,
            gone: None,
            last_received: now,
            stood_still: Duration::ZERO,
            gave_up: false,
            timed_out: false,
        }
    }

    fn next_bytes(&mut self, count: usize) -> Vec<u8> {
        let start = self.written;
        self.written += count as u64;
        (start..self.written).map(|position| content(self.index, position)).collect()
    }

    fn timer_goes_off(&mut self, now: Instant) {
        self.connection.handle_timeout(now);
        self.timer = self.connection.poll_timeout();
        assert!(self.timer.is_none_or(|next| next > now), "a timer that goes off for ever");
        if self.timer.is_none() && !self.gave_up {
            let silence = now - self.last_received;
            assert!(silence >= self.answer_timeout(), "end {} gave up after {silence:?}", self.index);
            (self.timed_out, self.gave_up) = (true, true);
        }
    }

    /// Returns the shortest silence after which the peer is given up.
    fn answer_timeout(&self) -> Duration {
        self.settings.ping_interval.unwrap() + self.settings.ping_timeout
    }

    /// Checks that a silent peer was given up in time. The ping may be late by an interval, because the timer
    /// may have been set before the peer's last message arrived.
    fn check_silence(&self, now: Instant) {
        let waits = self.gone.is_none() && !self.gave_up;
        if let Some(interval) = self.settings.ping_interval
            && waits
        {
            let silence = now - self.last_received - self.stood_still;
            assert!(silence < self.answer_timeout() + interval, "end {} waits for {silence:?}", self.index);
        }
    }

    fn expect_chunks(&mut self, body: &[u8]) {
        for chunk in Chunk::decode_all(body).unwrap() {
            self.unread.push_back((chunk.length as usize, Some(ReadId(self.chunks_seen))));
            self.chunks_seen += 1;
        }
    }

    fn has_landed(&self, read: Option<ReadId>) -> bool {
        read.is_none_or(|read| self.landings.contains_key(&read))
    }

    fn was_read(&mut self, mut count: usize) {
        while count > 0 {
            let (left, _) = self.unread.front_mut().expect("bytes that arrived");
            let part = count.min(*left);
            (*left, count) = (*left - part, count - part);
            if *left == 0 {
                self.unread.pop_front();
            }
        }
    }

    fn offer(&mut self, length: usize) -> Chunk {
        let bytes = self.next_bytes(length);
        let address = self.next_address;
        self.next_address += 1;
        self.sources.push_back(address);
        self.memory.insert(address, bytes);
        Chunk { address, rkey: 7, length: length as u64 }
    }

    /// Gives slots to other connections if this side need not keep them any more. Such slots are posted, or
    /// about to be posted.
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

    /// Returns the next READ, if there is a buffer for it.
    fn next_read(&mut self) -> Option<ReadRequest> {
        if self.reads.len() + self.landings.len() >= self.buffers {
            return None;
        }
        let request = self.connection.peek_read()?;
        self.connection.start_read();
        assert!(self.reads.len() < self.settings.max_reads as usize, "more READs than agreed");
        Some(request)
    }

    /// Returns true if the window is the window at the start, plus at most the slots that were not announced
    /// to the peer (less than a quarter of the window).
    pub(super) fn has_least_window(&self) -> bool {
        3 * self.connection.window() <= 4 * self.settings.receive_slots
    }

    pub(super) fn sources_left(&self) -> usize {
        self.sources.len()
    }
}
