//! Measuring a device: both transfer modes, size by size, in a bounded time.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::calibration::{Calibration, ChunkPoint, DEFAULT_CHUNK, Point};
use super::error::CalibrationError;
use super::key::CalibrationKey;
use super::loopback::Loopback;
use crate::endpoint::config::Config;
use tonic_rdma_verbs::Context;

/// Sizes that are measured, in bytes: powers of two from the first to the last.
const SIZES: std::ops::RangeInclusive<u32> = 10..=22;
/// Chunk sizes that are measured, in bytes.
const CHUNKS: [usize; 5] = [64 << 10, 128 << 10, DEFAULT_CHUNK, 512 << 10, 1 << 20];
/// Fewest and most measurements of one kind. Between these limits, the time that is left decides.
const SAMPLES: std::ops::RangeInclusive<usize> = 3..=25;
/// Length of a small message, in bytes.
const SMALL: usize = 64;

/// Measures a device by sending from the device to itself, with the receive buffers and path settings of `config`, in about
/// `budget` of time. Blocks the thread for that time. A slow device is measured at fewer sizes.
///
/// ```no_run
/// use std::time::Duration;
/// use tonic_rdma::Config;
/// use tonic_rdma::internal::tuner::calibrate;
///
/// let device = tonic_rdma_verbs::open("soft0")?;
/// let calibration = calibrate(&device, &Config::default(), Duration::from_millis(100))?;
/// println!("{:?}: {}", calibration.threshold(), calibration.reason());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// The configuration has a value that can't be used, or the device can't be connected to itself, or fails.
pub fn calibrate(
    context: &Arc<dyn Context>,
    config: &Config,
    budget: Duration,
) -> Result<Calibration, CalibrationError> {
    config.validate()?;
    let key = CalibrationKey::new(context.attributes(), config.slot_size);
    let mut loopback = Loopback::new(context, config, 1 << *SIZES.end())?;
    let end = Instant::now() + budget;
    loopback.eager(1 << 20)?;
    let small = small_messages(&mut loopback, budget / 16)?;
    let chunks = chunks(&mut loopback, Instant::now() + budget / 5)?;
    let mut calibration = Calibration {
        key,
        points: Vec::new(),
        chunks,
        post_cost: small.post,
        message_cost: small.whole,
        round_trip: small.round_trip,
        steady: true,
    };
    let chunk = calibration.chunk();
    let mut unsteady = 0;
    for exponent in SIZES {
        let now = Instant::now();
        if now >= end {
            break;
        }
        let share = (end - now) / (SIZES.end() - exponent + 1);
        let (point, steady) = point(&mut loopback, 1 << exponent, chunk, now + share)?;
        calibration.points.push(point);
        unsteady += usize::from(!steady);
    }
    calibration.steady = unsteady * 3 <= calibration.points.len() && !calibration.points.is_empty();
    Ok(calibration)
}

/// Times of a small message.
struct Small {
    post: Duration,
    whole: Duration,
    round_trip: Duration,
}

/// Measures small messages.
fn small_messages(loopback: &mut Loopback, budget: Duration) -> Result<Small, CalibrationError> {
    let until = Instant::now() + budget;
    let (mut post, mut whole, mut round_trip) = (Samples::default(), Samples::default(), Samples::default());
    // Memory is slow at its first use, so every receive buffer gets a message before the measurement.
    for _ in 0..2 * Loopback::SLOTS {
        loopback.messages(1, SMALL)?;
        loopback.round_trip(SMALL)?;
    }
    while round_trip.wants_more(until) {
        let (posted, all) = loopback.messages(Loopback::SLOTS, SMALL)?;
        post.add(posted);
        whole.add(all);
        round_trip.add(loopback.round_trip(SMALL)?);
    }
    Ok(Small { post: post.median(), whole: whole.median(), round_trip: round_trip.median() })
}

/// Measures the chunk sizes in turn, with the largest message that the time allows.
fn chunks(loopback: &mut Loopback, until: Instant) -> Result<Vec<ChunkPoint>, CalibrationError> {
    let mut bytes = 1 << SIZES.end();
    let first = Instant::now();
    loopback.rendezvous(1 << 20, DEFAULT_CHUNK)?;
    // The first pass uses new memory, and takes about twice as long as later passes.
    let pass = first.elapsed() / 2 * (CHUNKS.len() * (SAMPLES.start() + 1)) as u32;
    let left = until.saturating_duration_since(Instant::now());
    if pass * (bytes >> 20) as u32 > left {
        bytes = 1 << 20;
    }
    if pass > 4 * left {
        return Ok(Vec::new());
    }
    let mut samples = CHUNKS.map(|_| Samples::default());
    for chunk in CHUNKS {
        loopback.rendezvous(bytes, chunk)?;
    }
    while samples[0].wants_more(until) {
        for (samples, chunk) in samples.iter_mut().zip(CHUNKS) {
            samples.add(loopback.rendezvous(bytes, chunk)?.0);
        }
    }
    let point =
        |(chunk, samples): (usize, Samples)| ChunkPoint { chunk, bytes, rendezvous: samples.median() };
    Ok(CHUNKS.into_iter().zip(samples).map(point).collect())
}

/// Measures both modes in turn at one size. Returns the medians, and whether the measurements agree.
fn point(
    loopback: &mut Loopback,
    bytes: usize,
    chunk: usize,
    until: Instant,
) -> Result<(Point, bool), CalibrationError> {
    let (mut eager, mut rendezvous, mut copying) =
        (Samples::default(), Samples::default(), Samples::default());
    loopback.eager(bytes)?;
    loopback.rendezvous(bytes, chunk)?;
    while eager.wants_more(until) {
        eager.add(loopback.eager(bytes)?);
        let (took, copied) = loopback.rendezvous(bytes, chunk)?;
        rendezvous.add(took);
        copying.add(copied);
    }
    let steady = eager.agree() && rendezvous.agree();
    let (eager, rendezvous) = (eager.median(), rendezvous.median());
    Ok((Point { bytes, eager, rendezvous, copying: copying.median().min(rendezvous) }, steady))
}

/// Repeated measurements of one time.
#[derive(Debug, Default)]
struct Samples(Vec<Duration>);

impl Samples {
    fn add(&mut self, sample: Duration) {
        self.0.push(sample);
    }

    fn wants_more(&self, until: Instant) -> bool {
        self.0.len() < *SAMPLES.start() || (self.0.len() < *SAMPLES.end() && Instant::now() < until)
    }

    fn median(&self) -> Duration {
        self.quantile(2)
    }

    /// Returns whether the third quartile is less than one and a half times the first.
    fn agree(&self) -> bool {
        self.quantile(3) < self.quantile(1) * 3 / 2
    }

    /// Returns the value below which this many quarters of the samples are.
    fn quantile(&self, quarters: usize) -> Duration {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        let at = (sorted.len() * quarters / 4).min(sorted.len().saturating_sub(1));
        sorted.get(at).copied().unwrap_or_default().max(Duration::from_nanos(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_software_device_is_calibrated_at_every_size() {
        let context = tonic_rdma_verbs::soft::open().unwrap();
        // Enough time for the most measurements of each size, even on a busy machine, which is measured at fewer sizes otherwise.
        let calibration = calibrate(&context, &Config::default(), Duration::from_secs(600)).unwrap();
        let sizes: Vec<usize> = calibration.points().iter().map(|point| point.bytes).collect();
        assert_eq!(sizes, SIZES.map(|exponent| 1 << exponent).collect::<Vec<usize>>());
        assert!(calibration.points().iter().all(|point| point.copying <= point.rendezvous));
        assert!(CHUNKS.contains(&calibration.chunk()));
        assert!(calibration.post_cost() <= calibration.message_cost() && !calibration.round_trip().is_zero());
    }

    #[test]
    fn no_time_at_all_is_no_error() {
        let context = tonic_rdma_verbs::soft::open().unwrap();
        let calibration = calibrate(&context, &Config::default(), Duration::ZERO).unwrap();
        assert!(calibration.points().len() <= 1 && calibration.threshold().is_none(), "{calibration:?}");
    }

    #[test]
    fn medians_and_agreement() {
        let of =
            |micros: &[u64]| Samples(micros.iter().map(|&micros| Duration::from_micros(micros)).collect());
        assert_eq!(of(&[9, 1, 5]).median(), Duration::from_micros(5));
        assert!(of(&[10, 10, 11, 11, 900]).agree());
        assert!(!of(&[10, 11, 20, 30, 30]).agree());
    }
}
