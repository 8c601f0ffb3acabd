//! The ring of records.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use loom::cell::UnsafeCell;
use loom::thread;
use tonic_rdma_verbs::unstable::shared_memory::{Flags, Header, Kind, Orders, Reader, Word, Writer};

use crate::{Loom, LoomWord, explore, words};

/// Lines of the ring of a model.
const LINES: usize = 4;
/// Words of a line.
const LINE: usize = 8;
/// The key of the ring. Real keys are random.
const RING_KEY: u64 = 1000;

/// What the writer and the reader share.
struct SharedRing {
    ring: Vec<LoomWord>,
    /// The position up to which the reader has taken the records.
    taken: LoomWord,
    /// One for each line. The writer marks that it writes content there, and the reader that it reads it.
    lines: Vec<UnsafeCell<()>>,
}

struct Sender<O> {
    shared: Arc<SharedRing>,
    writer: Writer<Loom, O>,
    sent: u64,
}

struct Receiver<O> {
    shared: Arc<SharedRing>,
    reader: Reader<Loom, O>,
    received: u64,
}

fn pair<O: Orders>() -> (Sender<O>, Receiver<O>) {
    let shared = Arc::new(SharedRing {
        ring: words(LINES * LINE),
        taken: LoomWord::new(0),
        lines: (0..LINES).map(|_| UnsafeCell::new(())).collect(),
    });
    let size = (LINES * LINE * 8) as u64;
    let sender = Sender { shared: Arc::clone(&shared), writer: Writer::new(size, RING_KEY), sent: 0 };
    (sender, Receiver { shared, reader: Reader::new(size, RING_KEY), received: 0 })
}

impl<O: Orders> Sender<O> {
    /// Sends a record whose payload is `length` times its number. Returns false if there is no room.
    fn send(&mut self, length: usize) -> bool {
        assert!(self.writer.reclaim(&self.shared.taken).is_ok(), "model: an honest position is refused");
        let Some(place) = self.writer.reserve(&self.shared.ring, length as u64 * 8) else { return false };
        self.sent += 1;
        for index in place.payload()..place.payload() + length {
            self.shared.lines[index / LINE].with_mut(|_| {});
            self.shared.ring[index].store(self.sent, Relaxed);
        }
        let header = Header {
            kind: Kind::Write,
            flags: Flags::FIRST,
            length: length as u32 * 8,
            immediate: self.sent as u32,
            address: self.sent,
            key: self.sent as u32,
            total: self.sent,
        };
        self.writer.publish(&self.shared.ring, &place, &header);
        true
    }
}

impl<O: Orders> Receiver<O> {
    /// Takes a record, if there is one, and checks the content. Returns false if there is none.
    fn receive(&mut self) -> bool {
        let Ok(next) = self.reader.peek(&self.shared.ring) else {
            panic!("model: an honest record is refused");
        };
        let Some(record) = next else { return false };
        self.received += 1;
        let (number, header) = (self.received, record.header);
        assert!(
            (header.immediate, header.address, header.key, header.total)
                == (number as u32, number, number as u32, number),
            "model: the header is torn: {header:?}"
        );
        for index in record.payload..record.payload + header.length as usize / 8 {
            self.shared.lines[index / LINE].with(|_| {});
            assert!(self.shared.ring[index].load(Relaxed) == number, "model: the payload is torn");
        }
        self.reader.advance(&record);
        self.reader.give_back(&self.shared.taken);
        true
    }

    /// Takes what is left after the writer has ended. All records must have come, each once.
    fn finish(&mut self, sent: u64) {
        while self.receive() {}
        assert!(self.received == sent, "model: {} of {sent} records came", self.received);
    }
}

/// The reader sees a record as a whole or not at all, in order, each once.
pub fn content_is_never_torn<O: Orders + 'static>() -> u64 {
    explore(|| {
        let (mut sender, mut receiver) = pair::<O>();
        let writer = thread::spawn(move || {
            assert!(sender.send(3) && sender.send(1), "model: no room");
            sender.sent
        });
        receiver.receive();
        receiver.receive();
        let sent = writer.join().unwrap_or(0);
        receiver.finish(sent);
    })
}

/// The ring is full. The writer uses a slot again only after the reader has given it back.
pub fn places_are_used_again<O: Orders + 'static>() -> u64 {
    explore(|| {
        let (mut sender, mut receiver) = pair::<O>();
        for _ in 0..LINES {
            assert!(sender.send(1), "model: no room");
        }
        assert!(!sender.send(1), "model: a full ring has room");
        let writer = thread::spawn(move || {
            sender.send(2);
            sender.send(2);
            sender.sent
        });
        receiver.receive();
        receiver.receive();
        let sent = writer.join().unwrap_or(0);
        receiver.finish(sent);
    })
}

/// A record that does not fit before the end of the ring begins at the beginning, behind a skip.
pub fn records_skip_the_end<O: Orders + 'static>() -> u64 {
    explore(|| {
        let (mut sender, mut receiver) = pair::<O>();
        for _ in 0..3 {
            assert!(sender.send(1), "model: no room");
        }
        receiver.receive();
        receiver.receive();
        let writer = thread::spawn(move || {
            // Two lines, of which the ring has one before its end.
            if !sender.send(4) {
                sender.send(4);
            }
            sender.sent
        });
        receiver.receive();
        receiver.receive();
        let sent = writer.join().unwrap_or(0);
        receiver.finish(sent);
    })
}
