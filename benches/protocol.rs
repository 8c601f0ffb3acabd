//! Measures the cost of the protocol core for each message: `cargo bench --bench protocol`. It uses no device
//! and moves no bytes.
//!
//! Two connections exchange messages. The bench does the work of the devices, everything at once: messages
//! arrive, sends complete, READs land. The measured time is the time of both sides together.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a bench that can't run says so by stopping")]

use std::collections::VecDeque;
use std::hint::black_box;
use std::time::Instant;

use divan::Bencher;
use divan::counter::ItemsCount;
use tonic_rdma::unstable::protocol::{Connection, Event, Settings, SlotIndex};
use tonic_rdma::unstable::wire::{Chunk, Header, MAX_CHUNKS};

/// Bytes of an eager message, and of a chunk. The bench does not touch them.
const EAGER: usize = 64;
const CHUNK: u64 = 256 << 10;

fn main() {
    divan::main();
}

/// Sends an eager message and an eager reply. Each carries the credit for the message before it.
#[divan::bench]
fn eager_round_trip(bencher: Bencher<'_, '_>) {
    let mut pair = SidePair::new();
    bencher.counter(ItemsCount::new(2_usize)).bench_local(|| {
        pair.eager(0);
        pair.eager(1);
    });
    pair.check();
}

/// Sends eager messages in one direction, with their acknowledgements.
#[divan::bench(args = [1, 16, 256])]
fn eager_one_way(bencher: Bencher<'_, '_>, messages: usize) {
    let mut pair = SidePair::new();
    bencher.counter(ItemsCount::new(messages)).bench_local(|| (0..messages).for_each(|_| pair.eager(0)));
    pair.check();
}

/// Makes one rendezvous of several chunks: RTS, READs, delivery, ATS.
#[divan::bench(args = [1, MAX_CHUNKS])]
fn rendezvous(bencher: Bencher<'_, '_>, chunks: usize) {
    let mut pair = SidePair::new();
    bencher.counter(ItemsCount::new(chunks)).bench_local(|| pair.rendezvous(chunks));
    pair.check();
}

/// Polls a connection without new events.
#[divan::bench]
fn nothing_to_do(bencher: Bencher<'_, '_>) {
    let mut pair = SidePair::new();
    bencher.bench_local(|| {
        let connection = &mut pair.sides[0].connection;
        let nothing = connection.poll_transmit().is_none()
            && connection.peek_read().is_none()
            && connection.front().is_none()
            && connection.poll_event().is_none();
        assert!(black_box(nothing));
    });
}

/// Encodes and decodes a header.
#[divan::bench]
fn header(bencher: Bencher<'_, '_>) {
    let mut pair = SidePair::new();
    let bytes = pair.sides[0].connection.send_eager(EAGER).unwrap();
    let header = Header::decode(&bytes).unwrap();
    bencher.bench_local(|| Header::decode(&black_box(header).encode()));
}

/// One end: its connection, and its receive slots in the order of their posts.
struct Side {
    connection: Connection,
    posted: VecDeque<SlotIndex>,
    sources: u64,
    sources_done: u64,
    delivered: u64,
}

impl Side {
    fn new(settings: &Settings, now: Instant) -> Self {
        Self {
            connection: Connection::new(settings.clone(), now).unwrap(),
            posted: (0..settings.receive_slots).map(SlotIndex).collect(),
            sources: 0,
            sources_done: 0,
            delivered: 0,
        }
    }

    /// Delivers the messages, and posts their slots again.
    fn read(&mut self) {
        while let Some(part) = self.connection.front() {
            let (tonic_rdma::unstable::protocol::Part::Eager { length, .. }
            | tonic_rdma::unstable::protocol::Part::Rendezvous { length, .. }) = part;
            self.delivered += length as u64;
            self.connection.consume(length);
        }
        let before = self.posted.len();
        while let Some(slot) = self.connection.poll_release() {
            self.posted.push_back(slot);
        }
        self.connection.handle_slots_posted((self.posted.len() - before) as u32);
    }

    /// Carries out the requested READs.
    fn run_reads(&mut self) {
        while let Some(read) = self.connection.peek_read() {
            self.connection.start_read();
            self.connection.handle_read_completed(black_box(read).id);
        }
    }

    fn take_events(&mut self) {
        while let Some(event) = self.connection.poll_event() {
            match event {
                Event::SourcesDone { count } => self.sources_done += count,
                other => panic!("{other:?}"),
            }
        }
    }
}

struct SidePair {
    sides: [Side; 2],
    now: Instant,
    sent: u64,
}

impl SidePair {
    fn new() -> Self {
        let (settings, now) = (Settings::default(), Instant::now());
        Self { sides: [0, 1].map(|_| Side::new(&settings, now)), now, sent: 0 }
    }

    /// Sends an eager message from `from`.
    fn eager(&mut self, from: usize) {
        let header = self.sides[from].connection.send_eager(EAGER).unwrap();
        self.sent += EAGER as u64;
        self.deliver(from, &header, &[], EAGER);
    }

    /// Starts a rendezvous from the first end.
    fn rendezvous(&mut self, chunks: usize) {
        let offered = [Chunk { address: 4096, rkey: 7, length: CHUNK }; MAX_CHUNKS];
        let sender = &mut self.sides[0];
        let message = sender.connection.send_rendezvous(&offered[..chunks]).unwrap();
        sender.sources += chunks as u64;
        self.sent += CHUNK * chunks as u64;
        self.message(0, message.as_bytes());
    }

    fn message(&mut self, from: usize, bytes: &[u8]) {
        let (header, body) = bytes.split_first_chunk::<{ Header::LENGTH }>().unwrap();
        self.deliver(from, header, body, body.len());
    }

    /// Moves a message from one end to the other, with everything that follows.
    fn deliver(&mut self, from: usize, header: &[u8; Header::LENGTH], body: &[u8], length: usize) {
        self.sides[from].connection.handle_sends_completed(1);
        let receiver = &mut self.sides[1 - from];
        let slot = receiver.posted.pop_front().unwrap();
        let header = Header::decode(header).unwrap();
        let length = Header::LENGTH + length;
        receiver.connection.handle_receive(slot, &header, body, length, self.now).unwrap();
        receiver.run_reads();
        receiver.read();
        receiver.take_events();
        self.pump(1 - from);
    }

    /// Sends the protocol's own messages.
    fn pump(&mut self, from: usize) {
        while let Some(message) = self.sides[from].connection.poll_transmit() {
            self.message(from, message.as_bytes());
        }
    }

    /// Checks that everything sent was delivered, and that only sources without a reported read are kept.
    fn check(&self) {
        assert_eq!(self.sides.iter().map(|end| end.delivered).sum::<u64>(), self.sent);
        let sender = &self.sides[0];
        assert!(sender.sources - sender.sources_done <= 2 * MAX_CHUNKS as u64, "sources pile up");
    }
}
