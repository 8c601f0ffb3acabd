//! Measuring a device: two queue pairs of this process, connected to one another, and the times of messages
//! between them.
//!
//! The code that connections use ([`Link`]) does the work, one side after the other on one thread. So the
//! measured time is the work of both sides together, and of the device. The protocol is left out, because its
//! cost is equal in both transfer modes.

use std::collections::VecDeque;
use std::error::Error;
use std::io::IoSlice;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::calibration::{Calibration, DEFAULT_CHUNK, Point, Times};
use crate::endpoint::config::Config;
use crate::endpoint::link::receive::{Receives, Ring};
use crate::endpoint::link::{Link, WorkId, WorkKind};
use crate::error::{RdmaError, RdmaErrorKind};
use crate::protocol::{ReadId, ReadRequest, SlotIndex};
use crate::wire::{Chunk, Header, MAX_CHUNKS};
use tonic_rdma_verbs::memory::{Budget, Pool, PoolSettings, Quota};
use tonic_rdma_verbs::unstable::{SlabRegistrations, find_sendable};
use tonic_rdma_verbs::{
    Access, CompletionQueue, CompletionStatus, Context, QueuePair, RemoteSegment, WorkCompletion,
};

/// Sizes that are measured, in bytes: powers of two from the first to the last. Shorter writes are gathered.
const SIZES: std::ops::RangeInclusive<u32> = 12..=22;
/// The largest of them, in bytes.
const LARGEST: usize = 1 << *SIZES.end();
/// Chunk sizes that are measured, in bytes.
const CHUNKS: [usize; 5] = [64 << 10, 128 << 10, DEFAULT_CHUNK, 512 << 10, 1 << 20];
/// Fewest and most measurements of one kind. Between these limits, the time that is left decides.
const SAMPLES: std::ops::Range<usize> = 3..25;

type Failure = Box<dyn Error + Send + Sync>;

/// Measures a device by sending from the device to itself, with the receive buffers and path settings of
/// `config`, in about `budget` of time. Blocks the thread for that time. A slow device is measured at fewer
/// sizes. Connections use such a measurement, and none on the software device.
///
/// ```no_run
/// use std::time::Duration;
/// use tonic_rdma::Config;
/// use tonic_rdma::unstable::tuner::calibrate;
///
/// let device = tonic_rdma_verbs::open("rxe0")?;
/// let calibration = calibrate(&device, &Config::default(), Duration::from_millis(100))?;
/// println!("writes go by rendezvous from {:?} bytes", calibration.threshold());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// The configuration has a value that can't be used, or the device can't be connected to itself, or fails.
pub fn calibrate(
    context: &Arc<dyn Context>,
    config: &Config,
    budget: Duration,
) -> Result<Calibration, RdmaError> {
    config.validate()?;
    let failed = |what: &'static str| {
        move |error: Failure| RdmaError::new(RdmaErrorKind::Device, format!("{what}: {error}"))
    };
    let loopback = Loopback::new(context, config);
    let mut loopback = loopback.map_err(failed("the device can't be connected to itself"))?;
    let measured = loopback.measure(context.attributes().provider, budget);
    measured.map_err(failed("the device failed while it was measured"))
}

/// Measures several times in turn, until the time or the number of samples is enough. The first turn does not
/// count, because its memory is new. Returns the median of each time.
fn medians<const TIMES: usize>(
    until: Instant,
    mut turn: impl FnMut() -> Result<[Duration; TIMES], Failure>,
) -> Result<[Duration; TIMES], Failure> {
    turn()?;
    let mut samples = Vec::new();
    while samples.len() < SAMPLES.start || (samples.len() < SAMPLES.end && Instant::now() < until) {
        samples.push(turn()?);
    }
    Ok(std::array::from_fn(|kind| {
        samples.sort_unstable_by_key(|times| times[kind]);
        samples[samples.len() / 2][kind]
    }))
}

/// A device that is connected to itself.
#[derive(Debug)]
struct Loopback {
    /// Declared before the queue, so that the ends are dropped first.
    sender: LoopbackEnd,
    receiver: LoopbackEnd,
    queue: Arc<dyn CompletionQueue>,
    /// Bytes that fit into one eager message.
    room: usize,
    /// Most outstanding READs.
    reads: usize,
    source: Vec<u8>,
    /// The same bytes as `source`, in memory of a pool for sending.
    registered: Bytes,
    sink: Vec<u8>,
}

#[derive(Debug)]
struct LoopbackEnd {
    link: Link,
    /// Slots with messages, and the messages' lengths.
    arrived: VecDeque<(u32, usize)>,
    /// READs that have completed. They complete in the order in which they were posted.
    landed: usize,
}

/// Bytes in place of the header of a message.
const HEADER: [u8; Header::LENGTH] = [0; Header::LENGTH];

impl Loopback {
    /// Receive buffers of each side, which limit the messages in flight.
    const SLOTS: u32 = 16;
    /// Most outstanding sends.
    const SENDS: u32 = 128;
    /// Most registered memory.
    const MEMORY: u64 = 64 << 20;
    /// Longest time without a completion. A thread that drives the device may not get a core for a second.
    const TIMEOUT: Duration = Duration::from_secs(10);

    /// Connects the device to itself. Fails with some iWARP devices, and if there is too little memory.
    fn new(context: &Arc<dyn Context>, config: &Config) -> Result<Self, Failure> {
        let (slot_size, attributes) = (config.slot_size as usize, context.attributes());
        let queue = context.create_completion_queue(1024)?;
        let budget = Budget::for_process(attributes.locks_memory, Some(Self::MEMORY));
        let capacity = Link::capacity(attributes, Self::SENDS, Self::SLOTS, config.max_inline);
        let access = Access::LOCAL_WRITE | Access::REMOTE_READ;
        let end = |number| -> Result<(Arc<dyn QueuePair>, LoopbackEnd), Failure> {
            let domain = context.alloc_protection_domain()?;
            let pair = domain.create_queue_pair(&queue, &queue, &capacity)?;
            pair.to_init(access)?;
            let settings = PoolSettings { access, ..PoolSettings::default() };
            let pool = Pool::new(Arc::clone(&domain), settings, Arc::clone(&budget));
            let block = pool.lease(slot_size * Self::SLOTS as usize, Quota::Receive)?;
            let receives = Receives::Own(Ring::new(block, Self::SLOTS, slot_size)?);
            let registrations = SlabRegistrations::new(domain, Arc::clone(&budget));
            let link = Link::new(Arc::clone(&pair), number, pool, registrations, receives)?;
            Ok((pair, LoopbackEnd { link, arrived: VecDeque::new(), landed: 0 }))
        };
        let ((first, sender), (second, receiver)) = (end(0)?, end(1)?);
        for (pair, peer) in [(&first, &second), (&second, &first)] {
            pair.to_rtr(&peer.local_address(), &config.path)?;
            pair.to_rts(&config.path)?;
        }
        let source: Vec<u8> = (0..LARGEST).map(|at| (at % 251) as u8).collect();
        let mut registered = Pool::for_sending(Self::MEMORY).allocate(LARGEST)?;
        registered.copy_from_slice(&source);
        let (registered, sink) = (registered.freeze(), vec![0; LARGEST]);
        let (room, reads) = (slot_size - Header::LENGTH, Link::reads(attributes) as usize);
        Ok(Self { sender, receiver, queue, room, reads, source, registered, sink })
    }

    /// Measures the times by size, and the time of a rendezvous by length of the chunks.
    fn measure(&mut self, provider: &'static str, budget: Duration) -> Result<Calibration, Failure> {
        // Memory is slow at its first use, so every receive buffer gets a message before the measurement.
        self.eager(1 << 20, false)?;
        // A device that is short of windows is measured without them.
        let lends = self.sender.link.can_lend() && self.rendezvous(LARGEST, DEFAULT_CHUNK, true).is_ok();
        let end = Instant::now() + budget;
        let mut calibration = Calibration { provider, points: Vec::new(), chunks: Vec::new() };
        for exponent in SIZES {
            let now = Instant::now();
            if now >= end {
                return Ok(calibration);
            }
            // Each size has an equal share of the time that is left, and the chunk sizes have the last share.
            let until = now + (end - now) / (SIZES.end() - exponent + 2);
            let bytes = 1 << exponent;
            let [eager, rendezvous, registered, granted] = medians(until, || {
                let mut times = |in_place| -> Result<[Duration; 2], Failure> {
                    Ok([self.eager(bytes, in_place)?, self.rendezvous(bytes, DEFAULT_CHUNK, in_place)?])
                };
                let [eager, rendezvous] = times(false)?;
                let [registered, granted] = if lends { times(true)? } else { [Duration::ZERO; 2] };
                Ok([eager, rendezvous, registered, granted])
            })?;
            let registered = lends.then_some(Times { eager: registered, rendezvous: granted });
            calibration.points.push(Point { bytes, copied: Times { eager, rendezvous }, registered });
        }
        if Instant::now() < end {
            let times = medians(end, || {
                let mut times = [Duration::ZERO; CHUNKS.len()];
                for (time, chunk) in times.iter_mut().zip(CHUNKS) {
                    *time = self.rendezvous(LARGEST, chunk, false)?;
                }
                Ok(times)
            })?;
            calibration.chunks.extend(CHUNKS.into_iter().zip(times));
        }
        Ok(calibration)
    }

    /// Sends `length` bytes eagerly, and copies them out at the peer. `in_place`: from registered memory. Returns
    /// the time.
    fn eager(&mut self, length: usize, in_place: bool) -> Result<Duration, Failure> {
        let start = Instant::now();
        let (mut sent, mut received, mut in_flight) = (0, 0, 0);
        while received < length {
            while sent < length && in_flight < Self::SLOTS {
                let part = self.room.min(length - sent);
                let source: &[u8] = if in_place { &self.registered } else { &self.source };
                self.sender.post(&source[sent..sent + part])?;
                (sent, in_flight) = (sent + part, in_flight + 1);
            }
            self.poll()?;
            while let Some((slot, whole)) = self.receiver.arrived.pop_front() {
                let part = whole.saturating_sub(HEADER.len()).min(length - received);
                self.receiver.link.body(slot, &mut self.sink[received..received + part])?;
                self.receiver.link.post_receive(SlotIndex(slot))?;
                (received, in_flight) = (received + part, in_flight - 1);
            }
        }
        Ok(start.elapsed())
    }

    /// Offers `length` bytes in chunks, and reads, copies out and acknowledges them at the peer. `in_place`: from
    /// registered memory, by grants. Returns the time until the last byte was copied out, and all grants were
    /// ended. The receiver finds the addresses in `sources`, so offers and acknowledgements have the length of
    /// real ones, and no content.
    fn rendezvous(&mut self, length: usize, chunk: usize, in_place: bool) -> Result<Duration, Failure> {
        let start = Instant::now();
        let (mut sources, mut blocks, mut grants) = (Vec::new(), Vec::new(), Vec::new());
        if in_place {
            for part in self.registered[..length].chunks(chunk * MAX_CHUNKS) {
                let grant = find_sendable(part).and_then(|lease| self.sender.link.grant(&lease));
                let grant = grant.ok_or("the device makes no grant")?;
                let start = grant.range().start;
                let remote = |at| RemoteSegment { address: start.address + at as u64, ..start };
                let offsets = (0..part.len()).step_by(chunk);
                sources.extend(offsets.map(|at| (remote(at), chunk.min(part.len() - at))));
                grants.push(grant);
            }
        } else {
            for part in self.source[..length].chunks(chunk) {
                let mut block = self.sender.link.pool.lease(part.len(), Quota::Send)?;
                block.copy_in(0, part)?;
                sources.push((block.remote(0), part.len()));
                blocks.push(block);
            }
        }
        for chunks in sources.chunks(MAX_CHUNKS) {
            self.sender.post(&[0; MAX_CHUNKS * Chunk::LENGTH][..chunks.len() * Chunk::LENGTH])?;
        }
        let (mut offered, mut unacknowledged, mut landings) = (0, 0, VecDeque::new());
        let (mut posted, mut delivered, mut took) = (0, 0, Duration::ZERO);
        while delivered < length || unacknowledged > 0 {
            self.poll()?;
            offered += MAX_CHUNKS * self.receiver.take_messages()?;
            let landed = std::mem::take(&mut self.receiver.landed);
            while landings.len() - landed < self.reads
                && let Some(&(source, part)) = sources[..offered.min(sources.len())].get(posted)
            {
                let link = &mut self.receiver.link;
                let block = link.pool.lease(part, Quota::Receive)?;
                let (id, length) = (ReadId(posted as u32), part as u64);
                let (address, rkey) = (source.address, source.rkey.0);
                link.post_read(&ReadRequest { id, address, rkey, length }, &block)?;
                landings.push_back((block, part));
                posted += 1;
            }
            if landed > 0 {
                self.receiver.post(&[0; 4])?;
                unacknowledged += 1;
            }
            for (block, part) in landings.drain(..landed) {
                block.copy_out(0, &mut self.sink[delivered..delivered + part])?;
                delivered += part;
                took = start.elapsed();
            }
            unacknowledged -= self.sender.take_messages()?;
        }
        let last = Instant::now();
        drop(grants);
        Ok(took + last.elapsed())
    }

    /// Waits for completions, and handles them.
    fn poll(&mut self) -> Result<(), Failure> {
        const CHECK_EVERY: u32 = 64;
        let mut completions = [WorkCompletion::EMPTY; 32];
        let (mut count, mut idle, mut since) = (0, 0_u32, None);
        while count == 0 {
            count = self.queue.poll(&mut completions);
            idle += 1;
            if idle.is_multiple_of(CHECK_EVERY) {
                if since.get_or_insert_with(Instant::now).elapsed() > Self::TIMEOUT {
                    return Err(format!("nothing arrived for {:?}", Self::TIMEOUT).into());
                }
                std::thread::yield_now();
            }
        }
        for completion in &completions[..count] {
            if completion.status != CompletionStatus::Success {
                return Err(format!("{:?}: {}", completion.opcode, completion.status).into());
            }
            let id = WorkId::from_bits(completion.wr_id);
            let end = if id.connection == 0 { &mut self.sender } else { &mut self.receiver };
            match id.kind {
                WorkKind::Send => end.link.sends_completed(id.value),
                WorkKind::Read => end.landed += 1,
                _ => end.arrived.push_back((id.value, completion.byte_len as usize)),
            }
        }
        Ok(())
    }
}

impl LoopbackEnd {
    /// Posts one message.
    fn post(&mut self, body: &[u8]) -> Result<(), Failure> {
        self.link.post_message(&[IoSlice::new(&HEADER), IoSlice::new(body)])?;
        Ok(())
    }

    /// Posts the receive buffers of all messages that have come again, and returns their number.
    fn take_messages(&mut self) -> Result<usize, Failure> {
        let count = self.arrived.len();
        for (slot, _) in self.arrived.drain(..) {
            self.link.post_receive(SlotIndex(slot))?;
        }
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loopback(slot_size: u32) -> Loopback {
        let context = tonic_rdma_verbs::soft::open().unwrap();
        Loopback::new(&context, &Config::default().receive_slots(64).slot_size(slot_size)).unwrap()
    }

    #[test]
    fn both_modes_carry_every_byte() {
        for slot_size in [1024, 17_408, 65_536] {
            let mut loopback = loopback(slot_size);
            let lengths = [1, 1000, 17_376, 17_377, 100_000, 3 << 20];
            for (length, in_place) in lengths.into_iter().flat_map(|length| [(length, false), (length, true)])
            {
                loopback.sink.fill(0);
                loopback.eager(length, in_place).unwrap();
                assert!(loopback.sink[..length] == loopback.source[..length], "{length} eagerly");
                for chunk in [65_536, 1 << 20] {
                    loopback.sink.fill(0);
                    loopback.rendezvous(length, chunk, in_place).unwrap();
                    assert!(loopback.sink[..length] == loopback.source[..length], "{length} in {chunk}");
                }
            }
        }
    }

    #[test]
    fn the_software_device_is_calibrated_at_every_size() {
        let context = tonic_rdma_verbs::soft::open().unwrap();
        // Enough time for the most measurements of each size, even on a busy machine, which is measured at
        // fewer sizes otherwise.
        let calibration = calibrate(&context, &Config::default(), Duration::from_secs(600)).unwrap();
        let sizes: Vec<usize> = calibration.points.iter().map(|point| point.bytes).collect();
        assert_eq!(sizes, SIZES.map(|exponent| 1 << exponent).collect::<Vec<usize>>());
        assert!(calibration.points.iter().all(|point| point.registered.is_some()), "it grants");
        assert!(CHUNKS.contains(&calibration.chunk()) && calibration.chunks.len() == CHUNKS.len());
    }

    #[test]
    fn no_time_at_all_is_no_error() {
        let context = tonic_rdma_verbs::soft::open().unwrap();
        let calibration = calibrate(&context, &Config::default(), Duration::ZERO).unwrap();
        assert!(calibration.points.len() <= 1 && calibration.threshold().is_none(), "{calibration:?}");
    }
}
