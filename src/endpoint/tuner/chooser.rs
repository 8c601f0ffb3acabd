//! The choice of the transfer mode for each write of a connection, and of the length of chunks.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use super::calibration::{Calibration, DEFAULT_CHUNK};
use super::decision::{NEVER, ThresholdSource, TransferDecision, TransferMode, WriteLoad};
use super::device::DeviceTuner;
use super::online::{Change, Class, Online};
use crate::endpoint::config::{Config, EagerThreshold};
use tonic_rdma_verbs::internal::lock;

/// Chooses the transfer mode of one connection's writes.
#[derive(Debug)]
pub(in crate::endpoint) struct Chooser {
    threshold: usize,
    chunk: usize,
    /// Most bytes that are offered and not read yet.
    memory: usize,
    /// Follows the device and the trials; `None` where the configuration sets the threshold.
    auto: Option<AutoThreshold>,
    /// The write in progress.
    write: Write,
    explanation: Arc<Explanation>,
}

#[derive(Debug)]
struct AutoThreshold {
    device: Arc<DeviceTuner>,
    calibration: Option<Arc<Calibration>>,
    /// The result of the calibration, or its failure, was taken over.
    settled: bool,
    chunk_is_fixed: bool,
    online: Box<Online>,
    /// Number of messages and READs received from the peer when the last write began.
    received: u64,
}

/// A write. The caller repeats it with the bytes that were not taken.
#[derive(Clone, Copy, Debug)]
struct Write {
    left: usize,
    mode: TransferMode,
}

impl Chooser {
    /// Rendezvous memory of a connection in each direction, in chunks.
    const CHUNKS: u64 = 32;
    /// Most chunks that are offered and not read yet, as the protocol allows.
    const MOST_SOURCES: usize = crate::protocol::MAX_OFFERED as usize;

    /// Returns the rendezvous memory of a connection in each direction, in bytes.
    pub(in crate::endpoint) fn memory(config: &Config) -> u64 {
        Self::CHUNKS * config.chunk_size.unwrap_or(DEFAULT_CHUNK) as u64
    }

    /// Makes the chooser of a connection over `device`.
    pub(in crate::endpoint) fn new(config: &Config, device: impl FnOnce() -> Arc<DeviceTuner>) -> Self {
        let chunk = config.chunk_size.unwrap_or(DEFAULT_CHUNK);
        let (threshold, auto, set_by) = match config.eager_threshold {
            EagerThreshold::Bytes(bytes) => {
                (usize::try_from(bytes).unwrap_or(NEVER), None, ThresholdSource::Configured)
            }
            EagerThreshold::Auto => {
                let device = device();
                let reason = "the calibration is under way".into();
                let auto = AutoThreshold {
                    calibration: None,
                    settled: false,
                    chunk_is_fixed: config.chunk_size.is_some(),
                    online: Box::default(),
                    received: 0,
                    device: Arc::clone(&device),
                };
                (device.default_threshold, Some(auto), ThresholdSource::Default { reason })
            }
        };
        let explanation = Explanation(Mutex::new(Choice { threshold, chunk, set_by, switched: Vec::new() }));
        let write = Write { left: 0, mode: TransferMode::Eager };
        let memory = usize::try_from(Self::memory(config)).unwrap_or(usize::MAX);
        let mut chooser = Self { threshold, chunk, memory, auto, write, explanation: Arc::new(explanation) };
        chooser.adopt();
        chooser
    }

    /// Returns whether a write of `length` bytes goes by rendezvous. `received` counts the messages and READs from the peer.
    pub(in crate::endpoint) fn by_rendezvous(&mut self, length: usize, received: u64, now: Instant) -> bool {
        if self.auto.is_none() {
            return length >= self.threshold;
        }
        if length < Class::SMALLEST || self.never() {
            return false;
        }
        if length != self.write.left {
            let mode = self.begin(length, received, now);
            self.write = Write { left: length, mode };
        }
        self.write.mode == TransferMode::Rendezvous
    }

    /// Returns whether no write will go by rendezvous, trials included.
    fn never(&self) -> bool {
        self.threshold == NEVER && self.auto.as_ref().is_none_or(|auto| auto.settled)
    }

    /// Notes that `count` bytes of a write were sent or gathered.
    pub(in crate::endpoint) fn written(&mut self, count: usize) {
        self.write.left = self.write.left.saturating_sub(count);
    }

    /// Returns the length of a chunk, in bytes.
    pub(in crate::endpoint) fn chunk(&self) -> usize {
        self.chunk
    }

    /// Returns how many chunks may be offered and not read yet.
    pub(in crate::endpoint) fn sources(&self) -> usize {
        (self.memory / self.chunk).clamp(1, Self::MOST_SOURCES)
    }

    /// Returns the explanation of the current choice. It stays valid after the connection has ended.
    pub(in crate::endpoint) fn explanation(&self) -> &Arc<Explanation> {
        &self.explanation
    }

    /// Chooses the mode of a new write.
    fn begin(&mut self, size: usize, received: u64, now: Instant) -> TransferMode {
        self.adopt();
        let usual = TransferMode::of(size, self.threshold);
        let Some(auto) = &mut self.auto else { return usual };
        let load = if received == auto.received { WriteLoad::Heavy } else { WriteLoad::Light };
        auto.received = received;
        let (mode, change) = auto.online.begin(size, load, usual, auto.expected(size, self.threshold), now);
        if let Some(change) = change {
            self.explanation.switch(change);
            let Change { class, mode, ratio } = change;
            tracing::debug!(
                device = &*auto.device.device,
                from_bytes = 1_u64 << class.exponent,
                %class.load, way = %mode, ratio, "rendezvous threshold changed online"
            );
        }
        mode
    }

    /// Takes over the device's calibration, once it is available.
    fn adopt(&mut self) {
        let Some(auto) = self.auto.as_mut().filter(|auto| !auto.settled) else { return };
        let Some(outcome) = auto.device.outcome() else { return };
        auto.settled = true;
        let set_by = match outcome {
            Ok(calibration) => {
                self.threshold = calibration.threshold().unwrap_or(NEVER);
                if !auto.chunk_is_fixed {
                    self.chunk = calibration.chunk();
                }
                auto.calibration = Some(Arc::clone(calibration));
                auto.online.reset();
                ThresholdSource::Calibration { device: Arc::clone(&auto.device.device) }
            }
            Err(reason) => ThresholdSource::Default { reason: Arc::clone(reason) },
        };
        let choice = Choice { threshold: self.threshold, chunk: self.chunk, set_by, switched: Vec::new() };
        tracing::trace!(decision = %choice.why(Class::SMALLEST, WriteLoad::Light), "rendezvous threshold of a connection");
        *lock(&self.explanation.0) = choice;
    }
}

impl AutoThreshold {
    /// Returns the expected time of the other mode, as a multiple of the time of the usual mode. Returns infinity, which allows no
    /// trial, far from the threshold and without a threshold: a trial of rendezvous would take registered memory at both ends,
    /// which such a connection does not need otherwise.
    fn expected(&self, size: usize, threshold: usize) -> f64 {
        /// The multiple without a measurement. It is small enough for trials, and large enough to make them rare.
        const UNKNOWN: f64 = 2.0;
        const NEAR: usize = 16;
        let near = threshold != NEVER && size >= threshold / NEAR && size / NEAR <= threshold;
        let ratio = self.calibration.as_ref().map(|calibration| calibration.ratio(size));
        match (ratio, TransferMode::of(size, threshold)) {
            _ if !near => f64::INFINITY,
            (None, _) => UNKNOWN,
            (Some(ratio), TransferMode::Eager) => ratio,
            (Some(ratio), TransferMode::Rendezvous) => 1.0 / ratio.max(1e-3),
        }
    }
}

/// The current choice of a connection, readable after its end, too.
#[derive(Debug)]
pub(crate) struct Explanation(Mutex<Choice>);

#[derive(Debug)]
struct Choice {
    threshold: usize,
    chunk: usize,
    set_by: ThresholdSource,
    /// Classes of writes whose mode a trial has switched.
    switched: Vec<Change>,
}

impl Explanation {
    /// Returns how a write of `size` bytes would be transferred, and why.
    pub(in crate::endpoint) fn why(&self, size: usize, load: WriteLoad) -> TransferDecision {
        lock(&self.0).why(size, load)
    }

    fn switch(&self, change: Change) {
        let mut choice = lock(&self.0);
        let before = choice.switched.len();
        choice.switched.retain(|switched| switched.class != change.class);
        if choice.switched.len() == before {
            choice.switched.push(change);
        }
    }
}

impl Choice {
    fn why(&self, size: usize, load: WriteLoad) -> TransferDecision {
        let decided = |mode, set_by| TransferDecision::new(size, mode, self.threshold, self.chunk, set_by);
        let class = Class::of(size, load);
        match self.switched.iter().find(|switched| switched.class == class && size >= Class::SMALLEST) {
            Some(switched) => decided(
                switched.mode,
                ThresholdSource::Online { percent: (switched.ratio * 100.0).round() as u32 },
            ),
            None => decided(TransferMode::of(size, self.threshold), self.set_by.clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::calibration::ChunkPoint;
    use super::super::calibration::tests::sample;
    use super::*;

    fn device() -> Arc<DeviceTuner> {
        Arc::new(DeviceTuner::unknown("rxe0", 1 << 16))
    }

    fn calibration() -> Calibration {
        let mut calibration = sample(&[(4096, 10, 30), (16_384, 40, 30), (1 << 20, 2000, 1000)]);
        let point =
            |chunk, micros| ChunkPoint { chunk, bytes: 1 << 22, rendezvous: Duration::from_micros(micros) };
        calibration.chunks = vec![point(DEFAULT_CHUNK, 1000), point(1 << 20, 800)];
        calibration
    }

    fn why(chooser: &Chooser, size: usize) -> String {
        chooser.explanation().why(size, WriteLoad::Light).to_string()
    }

    #[test]
    fn a_configured_threshold_is_fixed() {
        let config = Config::default().eager_threshold(EagerThreshold::Bytes(5000)).chunk_size(8192);
        let mut chooser = Chooser::new(&config, || unreachable!("the device is not used"));
        let now = Instant::now();
        assert!(!chooser.by_rendezvous(4999, 0, now) && chooser.by_rendezvous(5000, 0, now));
        assert_eq!((chooser.chunk(), chooser.sources()), (8192, 32));
        assert_eq!(why(&chooser, 100), "100 B eagerly: threshold 5000 B, set by configuration");
    }

    #[test]
    fn a_calibration_is_adopted_when_it_is_available() {
        let device = device();
        let mut chooser = Chooser::new(&Config::default(), || Arc::clone(&device));
        let now = Instant::now();
        assert!(!chooser.by_rendezvous(32_768, 0, now) && chooser.by_rendezvous(65_536, 0, now));
        assert!(why(&chooser, 32_768).ends_with("the default (the calibration is under way)"));
        device.settle(Ok(calibration()));
        assert!(chooser.by_rendezvous(32_768, 0, now) && !chooser.by_rendezvous(4096, 0, now));
        assert_eq!(
            why(&chooser, 32_768),
            "32 KiB by rendezvous: threshold 16 KiB, set by calibration of rxe0"
        );
        assert_eq!((chooser.chunk(), chooser.sources()), (1 << 20, 8), "the same memory in larger pieces");
        let fixed = Chooser::new(&Config::default().chunk_size(65_536), || Arc::clone(&device));
        assert_eq!(fixed.chunk(), 65_536);
    }

    #[test]
    fn a_device_without_calibration_has_the_default_threshold() {
        let device = device();
        device.settle(Err("no loopback".into()));
        let chooser = Chooser::new(&Config::default(), || device);
        assert_eq!(
            why(&chooser, 1 << 16),
            "64 KiB by rendezvous: threshold 64 KiB, the default (no loopback)"
        );
    }

    #[test]
    fn the_rest_of_a_write_has_the_mode_of_its_start() {
        let mut chooser = Chooser::new(&Config::default(), device);
        let now = Instant::now();
        assert!(chooser.by_rendezvous(100_000, 0, now));
        chooser.written(90_000);
        assert!(chooser.by_rendezvous(10_000, 0, now), "the rest of it");
        chooser.written(10_000);
        assert!(!chooser.by_rendezvous(10_000, 0, now), "another");
    }

    #[test]
    fn a_mode_switched_by_trials_is_explained() {
        let device = device();
        let crossing = sample(&[(1 << 15, 50, 65), (1 << 16, 100, 80)]);
        device.settle(Ok(crossing));
        let mut chooser = Chooser::new(&Config::default(), || device);
        assert_eq!(why(&chooser, 40_000), "40000 B eagerly: threshold 64 KiB, set by calibration of rxe0");
        let mut now = Instant::now();
        for write in 1..200_000 {
            // Here rendezvous is the faster mode.
            let rendezvous = chooser.by_rendezvous(40_000, write, now);
            chooser.written(40_000);
            now += Duration::from_micros(if rendezvous { 20 } else { 50 });
        }
        assert_eq!(
            why(&chooser, 40_000),
            "40000 B by rendezvous: threshold 64 KiB, set online: 40 % of the time that the other way took"
        );
        assert_eq!(
            chooser.explanation().why(40_000, WriteLoad::Heavy).mode,
            TransferMode::Eager,
            "not seen under this load"
        );
        assert_eq!(chooser.explanation().why(100, WriteLoad::Light).mode, TransferMode::Eager);
    }

    #[test]
    fn without_rendezvous_there_are_no_trials() {
        let device = device();
        device.settle(Ok(sample(&[(1 << 15, 50, 51), (1 << 16, 100, 101)])));
        let mut chooser = Chooser::new(&Config::default(), || device);
        let mut now = Instant::now();
        for write in 1..200_000 {
            assert!(!chooser.by_rendezvous(40_000, write, now));
            chooser.written(40_000);
            now += Duration::from_micros(50);
        }
    }

    #[test]
    fn trials_are_near_the_threshold() {
        let mut chooser = Chooser::new(&Config::default(), device);
        let mut now = Instant::now();
        let mut tried = |size: usize| {
            let usual = size >= 1 << 16;
            (1..20_000).any(|write| {
                now += Duration::from_micros(50);
                let mode = chooser.by_rendezvous(size, write, now);
                chooser.written(size);
                mode != usual
            })
        };
        assert!(tried(8192) && tried(32_768) && tried(1 << 20));
        assert!(!tried(4095) && !tried(2 << 20));
    }
}
