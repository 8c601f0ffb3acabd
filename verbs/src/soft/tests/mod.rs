//! A hostile or confused peer. This process continues, whatever the peer writes to shared memory or sends
//! over the socket.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]
#![cfg_attr(fuzzing, allow(dead_code, reason = "a fuzzer has no other tests"))]

#[cfg(test)]
mod ends;
pub(crate) mod fuzz;
#[cfg(test)]
mod hostile_devices;
#[cfg(test)]
mod lifetimes;
#[cfg(test)]
mod long_messages;
#[cfg(test)]
mod pulls;
#[cfg(test)]
mod reads;
#[cfg(test)]
mod sockets;
#[cfg(test)]
mod views;
#[cfg(test)]
mod wake_ups;

use std::any::Any;
use std::io::IoSlice;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, Release};
use std::time::{Duration, Instant};

use super::context;
use super::device::Device;
use super::queue_pair::SoftPair;
use super::queue_pair::core::Core;
use super::shared::end::{PairEnd, Writer};
use super::shared::ring::{Flags, Header, Kind};
use crate::{
    Access, CompletionQueue, CompletionStatus, Context, HostMemory, LocalSegment, MemoryRegion, Operation,
    PathSettings, Payload, ProtectionDomain, QueuePair, QueuePairCapacity, ReceiveRequest, RemoteSegment,
    SendRequest, VerbsError, WorkCompletion, soft,
};

/// Receives that a queue pair of these tests can have.
const RECEIVES: u64 = 16;
/// The identifier of requests that are not receives.
const REQUEST: u64 = 1000;
/// Bytes of the registered memory of a side.
const MEMORY: usize = 1 << 16;
/// Longest time that a test waits for something that comes at once. Only a hang lasts as long: beside other
/// work, a test may get a small part of the processor.
const TIMEOUT: Duration = Duration::from_secs(120);

/// One side of a connection, with its own completion queues.
struct Side {
    _context: Arc<dyn Context>,
    /// The completion queue of receives, and of sends if they have none of their own.
    queue: Arc<dyn CompletionQueue>,
    sends: Arc<dyn CompletionQueue>,
    domain: Arc<dyn ProtectionDomain>,
    pair: Arc<dyn QueuePair>,
    region: Arc<dyn MemoryRegion>,
    core: Arc<Core>,
}

fn the_device() -> Arc<Device> {
    context::current().unwrap()
}

/// Returns all rights.
fn all() -> Access {
    Access::from_bits_truncate(7)
}

impl Side {
    fn new() -> Self {
        Self::with_queues(false)
    }

    /// Makes a side that has one completion queue, or two.
    fn with_queues(two: bool) -> Self {
        let context = soft::open().unwrap();
        let domain = context.alloc_protection_domain().unwrap();
        let queue = context.create_completion_queue(1024).unwrap();
        let sends = if two { context.create_completion_queue(1024).unwrap() } else { Arc::clone(&queue) };
        let capacity = QueuePairCapacity {
            send_requests: 512,
            receive_requests: RECEIVES as u32,
            send_segments: 2,
            receive_segments: 2,
            inline: 256,
        };
        let pair = domain.create_queue_pair(&sends, &queue, &capacity).unwrap();
        pair.to_init(all()).unwrap();
        let memory = Arc::new(HostMemory::shared(MEMORY, 4096).unwrap());
        let region = domain.register(memory, all()).unwrap();
        let local: Arc<dyn Any + Send + Sync> = the_device().service.queue_pair(pair.number().0).unwrap();
        let core = Arc::clone(&local.downcast::<SoftPair>().unwrap().core);
        Self { _context: context, queue, sends, domain, pair, region, core }
    }

    fn connect(&self, peer: &Self) {
        self.try_to_connect(peer).unwrap();
    }

    fn try_to_connect(&self, peer: &Self) -> Result<(), VerbsError> {
        let settings = PathSettings::default();
        self.pair.to_rtr(&peer.pair.local_address(), &settings)?;
        self.pair.to_rts(&settings)
    }

    /// Makes two sides that are connected. On a busy machine the answer of the device may come too late; then
    /// two other sides take their place.
    fn connected() -> (Self, Self) {
        Self::connected_as(|| (Self::new(), Self::new()))
    }

    /// Connects the two sides that `make` makes.
    fn connected_as(make: impl Fn() -> (Self, Self)) -> (Self, Self) {
        for _ in 0..10 {
            let (a, b) = make();
            match a.try_to_connect(&b).and_then(|()| b.try_to_connect(&a)) {
                Ok(()) => return (a, b),
                Err(error) if error.system().is_some() => {}
                Err(error) => panic!("{error}"),
            }
        }
        panic!("the device was too late each time");
    }

    fn memory(&self) -> &HostMemory {
        self.region.memory()
    }

    /// Registers more memory, which is full of the byte `value`.
    fn large(&self, length: usize, value: u8) -> Arc<dyn MemoryRegion> {
        let memory = Arc::new(HostMemory::shared(length, 4096).unwrap());
        memory.copy_in(0, &vec![value; length]).unwrap();
        self.domain.register(memory, all()).unwrap()
    }

    /// Returns a part of the registered memory.
    fn part(&self, start: usize, length: usize) -> [LocalSegment; 1] {
        // SAFETY: no reference to the memory exists.
        unsafe { [LocalSegment::new(&*self.region, start..start + length)] }
    }

    fn post_receive(&self, wr_id: u64) -> bool {
        self.pair.post_receive(&[ReceiveRequest { wr_id, into: &self.part(0, 256) }]).is_ok()
    }

    fn post(&self, operation: Operation<'_>) -> bool {
        self.pair.post_send(&[SendRequest { wr_id: REQUEST, operation, signaled: true }]).is_ok()
    }

    /// Sends a message of `length` times the byte `value`.
    fn send(&self, value: u8, length: usize) -> bool {
        let payload = vec![value; length];
        let slices = [IoSlice::new(&payload)];
        self.post(Operation::Send { data: Payload::Inline(&slices), immediate: None })
    }

    /// Takes the completions that have come. Every completion must belong to a posted request.
    fn drain(&self) -> Vec<WorkCompletion> {
        let mut all = Vec::new();
        for queue in [&self.queue, &self.sends] {
            let mut completions = [WorkCompletion::EMPTY; 32];
            let count = queue.poll(&mut completions);
            for completion in &completions[..count] {
                assert!(completion.wr_id < RECEIVES || completion.wr_id == REQUEST, "{completion:?}");
                assert_eq!(completion.queue_pair, self.pair.number());
                all.push(*completion);
            }
        }
        all
    }

    /// Returns the address of a part of this side's memory for the peer.
    fn remote(&self, offset: u64) -> RemoteSegment {
        RemoteSegment { address: self.memory().address() + offset, rkey: self.region.rkey() }
    }
}

/// A hostile process: the test writes its end by hand, and does not use the queues of its queue pair.
struct Hostile {
    side: Side,
    writer: Writer,
}

impl Hostile {
    /// Makes a hostile process that is connected to an honest side.
    fn connected() -> (Self, Side) {
        let (side, victim) = Side::connected();
        let writer = Writer::new(side.core.end.ring_bytes(), side.core.end.key());
        (Self { side, writer }, victim)
    }

    fn end(&self) -> &PairEnd {
        &self.side.core.end
    }

    /// Publishes a record. Returns false if the ring has no room.
    fn put(&mut self, victim: &Side, header: &Header, payload: &[u64]) -> bool {
        // The peer of a hostile process is honest.
        self.writer.reclaim(victim.core.end.taken_word()).unwrap();
        let ring = self.side.core.end.ring();
        let Some(slot) = self.writer.reserve(ring, payload.len() as u64 * 8) else { return false };
        for (word, value) in ring[slot.payload()..].iter().zip(payload) {
            word.store(*value, Relaxed);
        }
        self.writer.publish(ring, &slot, header);
        true
    }

    /// Overwrites a word of the hostile process's end.
    fn set(&self, index: usize, value: u64) {
        self.end().words()[index].store(value, Release);
    }

    /// Overwrites everything that a hostile process writes while the connection is in use.
    fn scribble(&self, value: impl Fn(usize) -> u64) {
        for (index, word) in self.end().words().iter().enumerate().skip(PairEnd::FIRST_CHANGING) {
            word.store(value(index), Relaxed);
        }
    }
}

/// Returns the header of a message in one record.
fn header(kind: Kind, length: u64) -> Header {
    Header {
        kind,
        flags: Flags::FIRST.with(Flags::LAST),
        length: length as u32,
        immediate: 0,
        address: 0,
        key: 0,
        total: length,
    }
}

/// An honest connection, whose traffic continues whatever other peers do.
struct Honest {
    a: Side,
    b: Side,
    round: u8,
}

impl Honest {
    fn connected() -> Self {
        let (a, b) = Side::connected();
        Self { a, b, round: 0 }
    }

    /// Sends a message, WRITEs and READs, and checks the content.
    fn exchange(&mut self) {
        self.round = self.round.wrapping_add(1);
        let round = self.round;
        assert!(self.b.post_receive(3));
        assert!(self.a.send(round, 200));
        self.a.memory().copy_in(1000, &[round; 100]).unwrap();
        let (from, into) = (self.a.part(1000, 100), self.a.part(3000, 100));
        let data = Payload::Registered(&from);
        assert!(self.a.post(Operation::Write { data, remote: self.b.remote(2000), immediate: None }));
        assert!(self.a.post(Operation::Read { into: &into, remote: self.b.remote(2000) }));
        let (mut sent, mut received) = (0, 0);
        wait_for("the honest traffic", || {
            for completion in self.a.drain().into_iter().chain(self.b.drain()) {
                assert_eq!(completion.status, CompletionStatus::Success, "{completion:?}");
                if completion.wr_id == REQUEST { sent += 1 } else { received += 1 }
            }
            sent == 3 && received == 1
        });
        let mut bytes = [0; 300];
        self.b.memory().copy_out(0, &mut bytes[..200]).unwrap();
        self.a.memory().copy_out(3000, &mut bytes[200..]).unwrap();
        assert_eq!(bytes, [round; 300]);
    }
}

/// Calls `done` until it returns true.
fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < TIMEOUT, "waited too long for {what}");
        std::thread::yield_now();
    }
}

/// Returns a small generator whose values depend only on `seed`, so that a failure can be repeated.
fn random(seed: u64) -> impl Fn(usize) -> u64 {
    move |index| {
        let mut value = (seed << 20 | index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        value ^= value >> 29;
        value = value.wrapping_mul(0xbf58_476d_1ce4_e5b9);
        // Many of the values look like valid ones.
        match value >> 60 {
            0..4 => value % 8,
            4..6 => (value % 40) << 32 | value >> 50 & 3,
            6 => u64::MAX,
            7..9 => 1 << 32 | (value % 7) << 24 | (value >> 8 & 15) << 16 | value >> 40 & 15,
            _ => value ^ value >> 32,
        }
    }
}
