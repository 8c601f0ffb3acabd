//! Two queue pairs of this process, connected to one another, and the time of a message between them.
//!
//! The code that connections use ([`Link`]) does the work, one end after the other on one thread. So the measured time is
//! the work of both ends together, and of the device. The protocol is left out, because its cost is equal in both transfer
//! modes.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::error::CalibrationError;
use crate::endpoint::config::Config;
use crate::endpoint::link::Link;
use crate::endpoint::link::receive::{Receives, Ring};
use crate::endpoint::link::work_id::{WorkId, WorkKind};
use crate::protocol::{ReadId, ReadRequest, SlotIndex};
use crate::wire::{Chunk, Header, MAX_CHUNKS};
use tonic_rdma_verbs::internal::SlabRegistrations;
use tonic_rdma_verbs::memory::{Block, Budget, Pool, PoolSettings, Quota};
use tonic_rdma_verbs::{
    Access, CompletionQueue, CompletionStatus, Context, ProtectionDomain, QueuePair, QueuePairCapacity,
    WorkCompletion,
};

/// A device that is connected to itself.
#[derive(Debug)]
pub(super) struct Loopback {
    /// Declared before the queue, so that the ends are dropped first.
    ends: [LoopbackEnd; 2],
    queue: Arc<dyn CompletionQueue>,
    /// Bytes that fit into one eager message.
    room: usize,
    reads: usize,
    source: Vec<u8>,
    sink: Vec<u8>,
}

/// One end. The end [`SENDER`] sends.
#[derive(Debug)]
struct LoopbackEnd {
    link: Link,
    /// Slots with messages, and the messages' lengths.
    arrived: VecDeque<(u32, usize)>,
    /// READs that have completed.
    landed: Vec<u32>,
}

const SENDER: usize = 0;
const RECEIVER: usize = 1;

/// Bytes in place of the header of a message.
const HEADER: [u8; Header::LENGTH] = [0; Header::LENGTH];

/// A chunk that the receiver is reading.
struct Landing {
    read: u32,
    block: Block,
    length: usize,
    landed: bool,
}

impl Loopback {
    /// Receive buffers of each end, which limit the messages in flight.
    pub(super) const SLOTS: u32 = 16;
    /// Most outstanding sends.
    const SENDS: u32 = 128;
    /// Most chunks that are offered and not read yet.
    const SOURCES: usize = 64;
    /// Most registered memory.
    const MEMORY: u64 = 64 << 20;
    /// Longest time without a completion. A thread that drives the device may not get a core for a second.
    const PATIENCE: Duration = Duration::from_secs(10);

    /// Connects the device to itself, with content for messages of `longest` bytes.
    ///
    /// # Errors
    /// The device can't be connected to itself, as with some iWARP devices, or there is too little memory.
    pub(super) fn new(
        context: &Arc<dyn Context>,
        config: &Config,
        longest: usize,
    ) -> Result<Self, CalibrationError> {
        let (slot_size, path) = (config.slot_size, &config.path);
        let attributes = context.attributes();
        let reads = Link::READS.min(attributes.max_outstanding_reads).max(1);
        let queue = context.create_completion_queue(1024).map_err(CalibrationError::NoLoopback)?;
        let budget = Budget::for_process(attributes.locks_memory, Some(Self::MEMORY));
        let capacity = QueuePairCapacity {
            send_requests: (Self::SENDS + reads).min(attributes.max_work_requests),
            receive_requests: Self::SLOTS,
            send_segments: (Link::SLICES as u32).min(attributes.max_segments),
            receive_segments: 1,
            inline: attributes.max_inline.min(config.max_inline.unwrap_or(u32::MAX)).min(Link::MAX_INLINE),
        };
        let pair = || unconnected(&**context, &queue, &capacity, &budget);
        let pairs = [pair()?, pair()?];
        let ring = slot_size as usize * Self::SLOTS as usize;
        let end = |key: usize| -> Result<LoopbackEnd, CalibrationError> {
            let (pair, domain, pool) = &pairs[key];
            let block = pool.lease(ring, Quota::Receive)?;
            let receives = Receives::Own(Ring::new(block, Self::SLOTS, slot_size as usize)?);
            let registrations = SlabRegistrations::new(Arc::clone(domain), Arc::clone(&budget));
            let link = Link::new(Arc::clone(pair), key as u32, pool.clone(), registrations, receives)?;
            Ok(LoopbackEnd { link, arrived: VecDeque::new(), landed: Vec::new() })
        };
        let ends = [end(SENDER)?, end(RECEIVER)?];
        for (from, to) in [(SENDER, RECEIVER), (RECEIVER, SENDER)] {
            let address = pairs[to].0.local_address();
            pairs[from].0.to_rtr(&address, path).map_err(CalibrationError::NoLoopback)?;
            pairs[from].0.to_rts(path).map_err(CalibrationError::NoLoopback)?;
        }
        let source = (0..longest).map(|at| (at % 251) as u8).collect();
        let room = slot_size as usize - Header::LENGTH;
        Ok(Self { ends, queue, room, reads: reads as usize, source, sink: vec![0; longest] })
    }

    /// Sends `length` bytes eagerly, and copies them out at the other end. Returns the time.
    pub(super) fn eager(&mut self, length: usize) -> Result<Duration, CalibrationError> {
        let start = Instant::now();
        let (mut sent, mut received, mut in_flight) = (0, 0, 0);
        while received < length {
            while sent < length && in_flight < Self::SLOTS {
                let part = self.room.min(length - sent);
                let message = [IoSlice::new(&HEADER), IoSlice::new(&self.source[sent..sent + part])];
                self.ends[SENDER].post(&message)?;
                (sent, in_flight) = (sent + part, in_flight + 1);
            }
            self.poll()?;
            let end = &mut self.ends[RECEIVER];
            while let Some((slot, whole)) = end.arrived.pop_front() {
                let part = whole.saturating_sub(HEADER.len()).min(length - received);
                let (block, start) = end.link.slot(SlotIndex(slot))?;
                block.copy_out(start + HEADER.len(), &mut self.sink[received..received + part])?;
                end.link.post_receive(SlotIndex(slot))?;
                (received, in_flight) = (received + part, in_flight - 1);
            }
        }
        Ok(start.elapsed())
    }

    /// Offers `length` bytes in chunks, and reads, copies out and acknowledges them at the other end. Returns the time until the
    /// last byte was copied out, and the part of this time for copies into registered memory.
    pub(super) fn rendezvous(
        &mut self,
        length: usize,
        chunk: usize,
    ) -> Result<(Duration, Duration), CalibrationError> {
        let start = Instant::now();
        let mut copying = Duration::ZERO;
        let (mut offered, mut delivered, mut reads, mut acknowledged) = (0, 0, 0_u32, 0);
        let (mut finished, mut sources) = (0, VecDeque::new());
        let mut waiting: VecDeque<Chunk> = VecDeque::new();
        let mut landings: VecDeque<Landing> = VecDeque::new();
        let mut took = None;
        while delivered < length || !sources.is_empty() {
            while offered < length && sources.len() + MAX_CHUNKS <= Self::SOURCES {
                let (bytes, time) = self.offer(offered, length, chunk, &mut sources)?;
                (offered, copying) = (offered + bytes, copying + time);
            }
            self.poll()?;
            let end = &mut self.ends[RECEIVER];
            while let Some(body) = end.message()? {
                waiting.extend(Chunk::decode_all(&body)?);
            }
            while landings.iter().filter(|landing| !landing.landed).count() < self.reads
                && let Some(chunk) = waiting.pop_front()
            {
                landings.push_back(end.read(reads, &chunk)?);
                reads += 1;
            }
            for read in end.landed.drain(..) {
                landings
                    .iter_mut()
                    .filter(|landing| landing.read == read)
                    .for_each(|landing| landing.landed = true);
                finished += 1;
            }
            if finished > acknowledged {
                end.post(&[IoSlice::new(&HEADER), IoSlice::new(&u32::to_le_bytes(finished - acknowledged))])?;
                acknowledged = finished;
            }
            while landings.front().is_some_and(|landing| landing.landed)
                && let Some(Landing { block, length: part, .. }) = landings.pop_front()
            {
                block.copy_out(0, &mut self.sink[delivered..delivered + part])?;
                delivered += part;
            }
            if delivered >= length && took.is_none() {
                took = Some(start.elapsed());
            }
            while let Some(body) = self.ends[SENDER].message()? {
                let count = body.first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes) as usize);
                drop(sources.drain(..count.min(sources.len())));
            }
        }
        Ok((took.unwrap_or_else(|| start.elapsed()), copying))
    }

    /// Sends `count` messages of `bytes` bytes, one after the other. Returns the time of a post, and the whole time of a
    /// message.
    pub(super) fn messages(
        &mut self,
        count: u32,
        bytes: usize,
    ) -> Result<(Duration, Duration), CalibrationError> {
        let count = count.clamp(1, Self::SLOTS);
        let start = Instant::now();
        for _ in 0..count {
            self.ends[SENDER].post(&[IoSlice::new(&HEADER), IoSlice::new(&self.source[..bytes])])?;
        }
        let posted = start.elapsed();
        let mut received = 0;
        while received < count {
            self.poll()?;
            while self.ends[RECEIVER].message()?.is_some() {
                received += 1;
            }
        }
        Ok((posted / count, start.elapsed() / count))
    }

    /// Sends a message of `bytes` bytes there and another back. Returns the time.
    pub(super) fn round_trip(&mut self, bytes: usize) -> Result<Duration, CalibrationError> {
        let start = Instant::now();
        for (from, to) in [(SENDER, RECEIVER), (RECEIVER, SENDER)] {
            self.ends[from].post(&[IoSlice::new(&HEADER), IoSlice::new(&self.source[..bytes])])?;
            while self.ends[to].message()?.is_none() {
                self.poll()?;
            }
        }
        Ok(start.elapsed())
    }

    /// Returns the bytes that were received last.
    #[cfg(test)]
    fn sink(&self, length: usize) -> &[u8] {
        &self.sink[..length]
    }

    /// Copies as many chunks as fit into one offer into registered memory, and offers them. Returns the number of bytes, and the
    /// time of the copies.
    fn offer(
        &mut self,
        from: usize,
        to: usize,
        chunk: usize,
        sources: &mut VecDeque<Block>,
    ) -> Result<(usize, Duration), CalibrationError> {
        let sender = &mut self.ends[SENDER];
        let (mut body, mut at) = (Vec::with_capacity(MAX_CHUNKS * Chunk::LENGTH), from);
        let start = Instant::now();
        while at < to && body.len() < MAX_CHUNKS * Chunk::LENGTH {
            let part = chunk.min(to - at);
            let mut block = sender.link.pool().lease(part, Quota::Send)?;
            block.copy_in(0, &self.source[at..at + part])?;
            let remote = block.remote(0);
            let chunk = Chunk { address: remote.address, rkey: remote.rkey.0, length: part as u64 };
            body.extend_from_slice(&chunk.encode());
            sources.push_back(block);
            at += part;
        }
        let copying = start.elapsed();
        sender.post(&[IoSlice::new(&HEADER), IoSlice::new(&body)])?;
        Ok((at - from, copying))
    }

    /// Waits for completions, and handles them.
    fn poll(&mut self) -> Result<(), CalibrationError> {
        const LOOK_EVERY: u32 = 64;
        let mut completions = [WorkCompletion::EMPTY; 32];
        let (mut idle, mut since) = (0_u32, None);
        let count = loop {
            let count = self.queue.poll(&mut completions);
            if count > 0 {
                break count;
            }
            idle += 1;
            if idle.is_multiple_of(LOOK_EVERY) {
                let since = since.get_or_insert_with(Instant::now);
                if since.elapsed() > Self::PATIENCE {
                    return Err(CalibrationError::Stalled(Self::PATIENCE));
                }
                std::thread::yield_now();
            }
            std::hint::spin_loop();
        };
        completions[..count].iter().try_for_each(|completion| self.note(completion))
    }

    /// Handles one completion.
    fn note(&mut self, completion: &WorkCompletion) -> Result<(), CalibrationError> {
        if completion.status != CompletionStatus::Success {
            let (opcode, status) = (completion.opcode, completion.status);
            return Err(CalibrationError::Request { opcode, status });
        }
        let id = WorkId::from_bits(completion.wr_id);
        let end = &mut self.ends[id.connection as usize % 2];
        match id.kind {
            WorkKind::Receive | WorkKind::SharedReceive => {
                end.arrived.push_back((id.value, completion.byte_len as usize));
            }
            WorkKind::Send => end.link.sends_completed(id.value),
            WorkKind::Read => end.landed.push(id.value),
        }
        Ok(())
    }
}

impl LoopbackEnd {
    /// Posts one message.
    fn post(&mut self, slices: &[IoSlice<'_>]) -> Result<(), CalibrationError> {
        self.link.post_message(slices)?;
        Ok(())
    }

    /// Copies the body of a short message out of its receive buffer, if a message has come.
    fn message(&mut self) -> Result<Option<Vec<u8>>, CalibrationError> {
        let Some((slot, length)) = self.arrived.pop_front() else { return Ok(None) };
        let mut body = vec![0; length.saturating_sub(HEADER.len())];
        self.link.body(slot, &mut body)?;
        self.link.post_receive(SlotIndex(slot))?;
        Ok(Some(body))
    }

    /// Posts a READ of a chunk.
    fn read(&mut self, read: u32, chunk: &Chunk) -> Result<Landing, CalibrationError> {
        let length = chunk.length as usize;
        let block = self.link.pool().lease(length, Quota::Receive)?;
        let Chunk { address, rkey, length: bytes } = *chunk;
        self.link.post_read(&ReadRequest { id: ReadId(read), address, rkey, length: bytes }, &block)?;
        Ok(Landing { read, block, length, landed: false })
    }
}

type Unconnected = (Arc<dyn QueuePair>, Arc<dyn ProtectionDomain>, Pool);

/// Creates a queue pair in Init with a pool of its domain, as connections have them.
fn unconnected(
    context: &dyn Context,
    queue: &Arc<dyn CompletionQueue>,
    capacity: &QueuePairCapacity,
    budget: &Arc<Budget>,
) -> Result<Unconnected, CalibrationError> {
    let access = Access::LOCAL_WRITE | Access::REMOTE_READ;
    let make = || {
        let domain = context.alloc_protection_domain()?;
        let pair = domain.create_queue_pair(queue, queue, capacity)?;
        pair.to_init(access)?;
        Ok((pair, domain))
    };
    let made: Result<_, tonic_rdma_verbs::VerbsError> = make();
    let (pair, domain) = made.map_err(CalibrationError::NoLoopback)?;
    let pool = Pool::new(
        Arc::clone(&domain),
        PoolSettings { access, ..PoolSettings::default() },
        Arc::clone(budget),
    );
    Ok((pair, domain, pool))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loopback(slot_size: u32) -> Loopback {
        let context = tonic_rdma_verbs::soft::open().unwrap();
        Loopback::new(&context, &Config::default().receive_buffers(64, slot_size), 3 << 20).unwrap()
    }

    #[test]
    fn both_modes_carry_every_byte() {
        for slot_size in [1024, 17_408, 65_536] {
            let mut loopback = loopback(slot_size);
            for length in [1, 1000, 17_376, 17_377, 100_000, 3 << 20] {
                loopback.sink.fill(0);
                loopback.eager(length).unwrap();
                assert!(loopback.sink(length) == &loopback.source[..length], "{length} eagerly");
                for chunk in [65_536, 1 << 20] {
                    loopback.sink.fill(0);
                    let (took, copying) = loopback.rendezvous(length, chunk).unwrap();
                    assert!(loopback.sink(length) == &loopback.source[..length], "{length} in {chunk}");
                    assert!(copying <= took);
                }
            }
        }
    }

    #[test]
    fn small_messages_go_there_and_back() {
        let mut loopback = loopback(17_408);
        for _ in 0..1000 {
            let (posted, took) = loopback.messages(16, 64).unwrap();
            assert!(posted <= took);
            assert!(!loopback.round_trip(64).unwrap().is_zero());
        }
    }

    #[test]
    fn chunks_beyond_the_limit_of_offers_wait() {
        let mut loopback = loopback(17_408);
        loopback.rendezvous(3 << 20, 4096).unwrap();
        assert!(loopback.sink == loopback.source);
    }
}
