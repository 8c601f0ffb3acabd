//! Measuring a device: two connections of this process to one another, and the times of messages between them.
//!
//! The connections are those that dialling and listening make, without the negotiation. One thread does the work
//! of both ends, one after the other. So the measured time is the work of both together, and of the device.

use std::collections::btree_map::{BTreeMap, Entry};
use std::error::Error;
use std::io::IoSlice;
use std::sync::{Arc, Mutex};
use std::task::{Context as TaskContext, Poll, Waker};
use std::time::{Duration, Instant};

use bytes::Bytes;
use metrics::NoopRecorder;
use tokio::io::ReadBuf;
use tokio::runtime::Builder;

use super::local_side::{Carried, Prepared};
use crate::endpoint::config::{Config, EagerThreshold, PollMode, SharedReceive};
use crate::endpoint::connection::{ByteStream, Connection, Member, Traffic as _};
use crate::endpoint::tuner::{Calibration, Choice, DEFAULT_CHUNK, Measured, Point, Times};
use crate::error::{RdmaError, RdmaErrorKind};
use tonic_rdma_verbs::Context;
use tonic_rdma_verbs::memory::{Budget, Pool};
use tonic_rdma_verbs::unstable::lock;

/// Sizes that are measured, in bytes: powers of two from the first to the last. Shorter writes are gathered.
const SIZES: std::ops::RangeInclusive<u32> = 12..=22;
/// The largest of them, in bytes.
const LARGEST: usize = 1 << *SIZES.end();
/// Chunk sizes that are measured, in bytes.
const CHUNKS: [usize; 5] = [64 << 10, 128 << 10, DEFAULT_CHUNK, 512 << 10, 1 << 20];
/// Fewest and most measurements of one kind. Between these limits, the time that is left decides.
const SAMPLES: std::ops::Range<usize> = 3..25;
/// Time for a measurement in the background.
const BACKGROUND: Duration = Duration::from_millis(120);

type Failure = Box<dyn Error + Send + Sync>;

/// Provider, device, length of receive buffers, limit on inline bytes.
type DeviceKey = (&'static str, String, u32, Option<u32>);

static DEVICES: Mutex<BTreeMap<DeviceKey, Measured>> = Mutex::new(BTreeMap::new());

/// Returns the choice for this device. The first call in a process starts a thread that measures the device; no
/// call waits for the thread.
pub(super) fn measured(context: &Arc<dyn Context>, config: &Config) -> Measured {
    let attributes = context.attributes();
    let key = (attributes.provider, attributes.name.clone(), config.slot_size, config.max_inline);
    let measured = match lock(&DEVICES).entry(key) {
        Entry::Occupied(known) => return Arc::clone(known.get()),
        Entry::Vacant(new) => Arc::clone(new.insert(Measured::default())),
    };
    let (context, config, result) = (Arc::clone(context), config.clone(), Arc::clone(&measured));
    let work = move || {
        let calibration = calibrate(&context, &config, BACKGROUND).map_err(|error| error.to_string());
        let _ = result.set(Choice::measured(&context.attributes().name, calibration));
    };
    if let Err(error) = std::thread::Builder::new().name("rdma-tune".into()).spawn(work) {
        let reason = format!("no thread to measure in: {error}");
        let _ = measured.set(Choice::measured(&attributes.name, Err(reason)));
    }
    measured
}

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
    // Nothing runs on it: its tasks would poll for the connections.
    let runtime = Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| failed("no runtime to measure in")(error.into()))?;
    let measure = || {
        let _entered = runtime.enter();
        let loopback = Loopback::new(context, config, Loopback::MEMORY);
        let mut loopback = loopback.map_err(failed("the device can't be connected to itself"))?;
        let measured = loopback.measure(context.attributes().provider, budget);
        measured.map_err(failed("the device failed while it was measured"))
    };
    // The metrics of the process are about the connections of the application.
    let measured = metrics::with_local_recorder(&NoopRecorder, measure);
    // This may be a thread of another runtime, which may not wait for this one.
    runtime.shutdown_background();
    measured
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
    writer: Arc<Connection<ByteStream>>,
    reader: Arc<Connection<ByteStream>>,
    /// Both ends are on the queue of the first.
    ends: [Member; 2],
    source: Vec<u8>,
    /// The same bytes as `source`, in memory of a pool for sending.
    registered: Bytes,
    sink: Vec<u8>,
}

impl Loopback {
    /// Most registered memory besides the receive buffers.
    const MEMORY: u64 = 64 << 20;
    /// Longest time without an arrival. A thread that drives the device may not get a core for a second.
    const TIMEOUT: Duration = Duration::from_secs(10);

    /// Connects the device to itself, with at most `memory` bytes of registered memory besides the receive
    /// buffers. Fails with some iWARP devices, and if there is too little memory.
    fn new(context: &Arc<dyn Context>, config: &Config, memory: u64) -> Result<Self, Failure> {
        let memory = memory + 2 * u64::from(config.receive_slots) * u64::from(config.slot_size);
        // `send` sets the mode and the length of the chunks, so nothing is measured for these connections.
        let config = config.clone().eager_threshold(EagerThreshold::Bytes(u64::MAX));
        let mut config =
            config.poll_mode(PollMode::Event).completion_queues(1).shared_receive(SharedReceive::Never);
        config.chunk_size = None;
        // The application's connections have the memory of the process.
        let budget = Budget::for_process(context.attributes().locks_memory, Some(memory));
        let prepare = || Prepared::new(Arc::clone(context), &config, false, Some(Arc::clone(&budget)));
        let (first, second) = (prepare()?, prepare()?);
        let (at_first, at_second) = (first.end(), second.end());
        let (first, second) = (first.connect(&at_second, None)?, second.connect(&at_first, None)?);
        let (Carried::Bytes(writer), Carried::Bytes(reader)) = (first.carried, second.carried) else {
            return Err("connections without calls carry bytes".into());
        };
        reader.read_greedily();
        let source: Vec<u8> = (0..LARGEST).map(|at| (at % 251) as u8).collect();
        let mut registered = Pool::for_sending(LARGEST as u64 * 2).allocate(LARGEST)?;
        registered.copy_from_slice(&source);
        let (registered, sink) = (registered.freeze(), vec![0; LARGEST]);
        Ok(Self { writer, reader, ends: [first.member, second.member], source, registered, sink })
    }

    /// Measures the times by size, and the time of a rendezvous by length of the chunks.
    fn measure(&mut self, provider: &'static str, budget: Duration) -> Result<Calibration, Failure> {
        // Memory is slow at its first use, so every receive buffer gets a message before the measurement.
        self.send(LARGEST, None, false)?;
        // A device that is short of windows is measured without them.
        let can_lend = self.writer.update(|stream| (stream.base().link.can_lend(), false));
        let lends = can_lend && self.send(LARGEST, Some(DEFAULT_CHUNK), true).is_ok();
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
                    Ok([self.send(bytes, None, in_place)?, self.send(bytes, Some(DEFAULT_CHUNK), in_place)?])
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
                    *time = self.send(LARGEST, Some(chunk), false)?;
                }
                Ok(times)
            })?;
            calibration.chunks.extend(CHUNKS.into_iter().zip(times));
        }
        Ok(calibration)
    }

    /// Sends `length` bytes, by rendezvous in chunks of the length `chunk` or eagerly, and copies them out at the
    /// peer. `in_place`: from registered memory. Returns the time until the peer has the last byte, and the writer
    /// has its memory back.
    fn send(&mut self, length: usize, chunk: Option<usize>, in_place: bool) -> Result<Duration, Failure> {
        const CHECK_EVERY: u32 = 64;
        let Self { writer, reader, ends: [first, _], source, registered, sink } = self;
        let source: &[u8] = if in_place { registered } else { source };
        let (start, context) = (Instant::now(), TaskContext::from_waker(Waker::noop()));
        let (mut sent, mut idle, mut since) = (0, 0_u32, None);
        let mut arrived = ReadBuf::new(&mut sink[..length]);
        while arrived.remaining() > 0 || writer.update(|stream| (stream.is_lending(), false)) {
            if sent < length {
                let slices = [IoSlice::new(&source[sent..length])];
                let write =
                    |stream: &mut ByteStream| (stream.write_by(&slices, chunk, &writer.counters), true);
                sent += writer.update(write)?;
            }
            let polled = first.queue.poll();
            let before = arrived.remaining();
            if before > 0
                && let Poll::Ready(Poll::Ready(read)) = reader.poll_read(&context, &mut arrived)
            {
                read?;
            }
            if polled.completions > 0 || arrived.remaining() < before {
                since = None;
                continue;
            }
            idle += 1;
            if idle.is_multiple_of(CHECK_EVERY) {
                // No other thread frees memory of this budget.
                if reader.update(|stream| (stream.is_starved(), false)) {
                    return Err("no memory to read a chunk into".into());
                }
                if since.get_or_insert_with(Instant::now).elapsed() > Self::TIMEOUT {
                    return Err(format!("nothing arrived for {:?}", Self::TIMEOUT).into());
                }
                std::thread::yield_now();
            }
        }
        Ok(start.elapsed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::endpoint::provider::budget;
    use crate::endpoint::tuner::ThresholdSource;

    /// Returns the software device, and a runtime for its connections.
    fn device() -> (Arc<dyn Context>, tokio::runtime::Runtime) {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        (tonic_rdma_verbs::soft::open().unwrap(), runtime)
    }

    #[test]
    fn both_modes_carry_every_byte() {
        let (context, runtime) = device();
        let _entered = runtime.enter();
        for slot_size in [1024, 17_408, 65_536] {
            let config = Config::default().receive_slots(64).slot_size(slot_size);
            let mut loopback = Loopback::new(&context, &config, Loopback::MEMORY).unwrap();
            let lengths = [1, 1000, 17_376, 17_377, 100_000, 3 << 20];
            for (length, in_place) in lengths.into_iter().flat_map(|length| [(length, false), (length, true)])
            {
                for chunk in [None, Some(65_536), Some(1 << 20)] {
                    loopback.sink.fill(0);
                    loopback.send(length, chunk, in_place).unwrap();
                    assert!(loopback.sink[..length] == loopback.source[..length], "{length} in {chunk:?}");
                }
            }
        }
    }

    #[test]
    fn without_memory_the_measurement_fails_at_once() {
        let (context, runtime) = device();
        let _entered = runtime.enter();
        let mut failed = 0;
        for chunks in 0..16 {
            let sent = Loopback::new(&context, &Config::default(), chunks << 20)
                .and_then(|mut loopback| loopback.send(LARGEST, Some(1 << 20), false));
            if let Err(error) = sent {
                failed += 1;
                assert!(error.to_string().contains("memory"), "{chunks} MiB: {error}");
            }
        }
        assert!((2..16).contains(&failed), "{failed} of 16");
    }

    #[test]
    fn the_memory_is_not_of_the_process() {
        let (context, runtime) = device();
        let _entered = runtime.enter();
        let loopback = Loopback::new(&context, &Config::default(), Loopback::MEMORY).unwrap();
        let used = loopback.writer.update(|stream| (Arc::clone(stream.base().link.pool.budget()), false));
        assert!(!Arc::ptr_eq(&used, &budget(false, &Config::default())));
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

    #[test]
    fn a_process_measures_a_device_once() {
        let context = tonic_rdma_verbs::soft::open().unwrap();
        // A length that no other test uses.
        let config = Config::default().receive_slots(16).slot_size(2000);
        let first = measured(&context, &config);
        assert!(Arc::ptr_eq(&first, &measured(&context, &config)));
        assert!(matches!(first.wait().set_by, ThresholdSource::Calibration { .. }), "{first:?}");
    }
}
