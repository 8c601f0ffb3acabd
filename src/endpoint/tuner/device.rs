//! The calibration of each device that this process uses: read from disk, or measured in the background at first use.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, LazyLock, Mutex, OnceLock};
use std::time::Duration;

use super::cache;
use super::calibrate::calibrate;
use super::calibration::{Calibration, DEFAULT_CHUNK};
use super::decision::{Bytes, NEVER};
use super::error::{CacheError, CalibrationError};
use super::key::CalibrationKey;
use crate::endpoint::config::Config;
use tonic_rdma_verbs::Context;
use tonic_rdma_verbs::internal::lock;

/// The calibration of one device, once it is available.
#[derive(Debug)]
pub(in crate::endpoint) struct DeviceTuner {
    pub(super) device: Arc<str>,
    /// The threshold without a calibration.
    pub(super) default_threshold: usize,
    outcome: OnceLock<Outcome>,
}

/// A calibration, or the reason why there is none.
pub(super) type Outcome = Result<Arc<Calibration>, Arc<str>>;

static DEVICES: LazyLock<Mutex<HashMap<Key, Arc<DeviceTuner>>>> = LazyLock::new(Mutex::default);

/// Provider, device, length of receive buffers, limit on inline bytes.
type Key = (&'static str, String, u32, Option<u32>);

/// Time for a calibration in the background.
const BACKGROUND: Duration = Duration::from_millis(120);

impl DeviceTuner {
    /// Returns the tuner of this device. The first call in a process reads the cache, or starts a thread that measures the
    /// device; no call waits for the thread.
    pub(in crate::endpoint) fn of(context: &Arc<dyn Context>, config: &Config) -> Arc<Self> {
        let attributes = context.attributes();
        let key = (attributes.provider, attributes.name.clone(), config.slot_size, config.max_inline);
        let mut devices = lock(&DEVICES);
        if let Some(tuner) = devices.get(&key) {
            return Arc::clone(tuner);
        }
        let tuner = Arc::new(Self::unknown(&attributes.name, default_threshold(attributes.provider)));
        devices.insert(key, Arc::clone(&tuner));
        drop(devices);
        if let Some(calibration) = cached(config, &CalibrationKey::new(attributes, config.slot_size)) {
            tuner.settle(Ok(calibration));
        } else {
            tuner.measure(context, config);
        }
        tuner
    }

    /// Makes a tuner without a calibration.
    pub(super) fn unknown(device: &str, default_threshold: usize) -> Self {
        Self { device: device.into(), default_threshold, outcome: OnceLock::new() }
    }

    /// Returns the result of the calibration; `None` while it is in progress.
    pub(super) fn outcome(&self) -> Option<&Outcome> {
        self.outcome.get()
    }

    /// Sets the result.
    pub(super) fn settle(&self, outcome: Result<Calibration, Arc<str>>) {
        match &outcome {
            Ok(calibration) => {
                let (threshold, chunk) = (calibration.threshold(), calibration.chunk());
                tracing::debug!(
                    device = &*self.device,
                    threshold,
                    chunk,
                    reason = calibration.reason(),
                    "rendezvous threshold set by calibration"
                );
                let gauge = threshold.map_or(f64::INFINITY, |bytes| bytes as f64);
                metrics::gauge!("tonic_rdma_rendezvous_threshold_bytes", "device" => self.device.to_string())
                    .set(gauge);
            }
            Err(reason) => tracing::debug!(device = &*self.device, %reason, "no calibration"),
        }
        let _ = self.outcome.set(outcome.map(Arc::new));
    }

    /// Starts a thread that measures the device.
    fn measure(self: &Arc<Self>, context: &Arc<dyn Context>, config: &Config) {
        let (tuner, context, config) = (Arc::clone(self), Arc::clone(context), config.clone());
        let work = move || match calibrate(&context, &config, BACKGROUND) {
            Ok(calibration) => {
                // Stored before the outcome is set, so that a reader of the outcome finds the file, too.
                if let Err(reason) = keep(&config, &calibration) {
                    tracing::debug!(device = &*tuner.device, %reason, "the calibration is not kept on disk");
                }
                tuner.settle(Ok(calibration));
            }
            Err(error) => tuner.settle(Err(error.to_string().into())),
        };
        let started = std::thread::Builder::new().name("rdma-tune".into()).spawn(work);
        if let Err(error) = started {
            self.settle(Err(CalibrationError::NoThread(error).to_string().into()));
        }
    }
}

/// Returns the threshold for devices that were not measured. The software device copies an eager message twice, in
/// pieces that stay in the caches. It copies a rendezvous twice, too, and needs a message to the peer first, so rendezvous never
/// pays there. Other devices copy into registered memory in both modes, and a rendezvous takes fewer messages.
fn default_threshold(provider: &str) -> usize {
    const OTHERS: usize = 64 * 1024;
    if provider == "soft" { NEVER } else { OTHERS }
}

/// Reads the calibration from disk, if there is one.
fn cached(config: &Config, key: &CalibrationKey) -> Option<Calibration> {
    let loaded = directory(config).and_then(|directory| cache::load(&directory, key));
    loaded.unwrap_or_else(|reason| {
        tracing::debug!(device = key.device, %reason, "no calibration from disk");
        None
    })
}

/// Returns the directory of calibrations.
fn directory(config: &Config) -> Result<PathBuf, CacheError> {
    match config.max_inline {
        None => Ok(config.tune_cache.directory()?),
        Some(_) => Err(CacheError::InlineLimit),
    }
}

/// Writes a calibration to disk; returns the file.
fn keep(config: &Config, calibration: &Calibration) -> Result<PathBuf, CacheError> {
    if !calibration.is_steady() {
        return Err(CacheError::Unsteady);
    }
    cache::store(&directory(config)?, calibration)
}

/// A calibration, its origin, and the file that has it.
#[derive(Debug)]
#[non_exhaustive]
pub struct Tuned {
    /// The calibration.
    pub calibration: Calibration,
    /// Measured now, or read from disk.
    pub origin: Origin,
    /// The file that has the calibration, or the reason why there is none.
    pub kept: Result<PathBuf, CacheError>,
}

/// The origin of a calibration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Measured now.
    Measured,
    /// Read from disk.
    Disk,
}

impl Tuned {
    /// Returns threshold and length of chunks with their reasons, in words.
    pub fn summary(&self) -> String {
        let calibration = &self.calibration;
        let threshold =
            calibration.threshold().map_or("never".into(), |bytes| format!("from {}", Bytes(bytes)));
        let chunk = calibration.chunk();
        let why =
            if chunk == DEFAULT_CHUNK { "no other is clearly better" } else { "clearly better than 256 KiB" };
        format!("rendezvous {threshold} ({}); chunks of {} ({why})", calibration.reason(), Bytes(chunk))
    }
}

/// Returns the calibration that connections with this configuration use on a device. Reads it from disk; if there is none, or
/// if `fresh` is set, measures the device in about `budget` of time and keeps the result. Blocks the thread for that time.
///
/// ```no_run
/// use std::time::Duration;
/// use tonic_rdma::Config;
/// use tonic_rdma::internal::tuner::tune;
///
/// let device = tonic_rdma_verbs::open("soft0")?;
/// let tuned = tune(&device, &Config::default(), false, Duration::from_millis(100))?;
/// println!("{}", tuned.summary());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// The device has to be measured, and that fails.
pub fn tune(
    context: &Arc<dyn Context>,
    config: &Config,
    fresh: bool,
    budget: Duration,
) -> Result<Tuned, CalibrationError> {
    let key = CalibrationKey::new(context.attributes(), config.slot_size);
    if !fresh && let Some(calibration) = cached(config, &key) {
        let kept = directory(config).map(|directory| cache::file(&directory, &key));
        return Ok(Tuned { calibration, origin: Origin::Disk, kept });
    }
    let calibration = calibrate(context, config, budget)?;
    let kept = keep(config, &calibration);
    Ok(Tuned { calibration, origin: Origin::Measured, kept })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::endpoint::config::TuneCache;

    #[test]
    fn a_calibration_is_measured_once_and_then_read() {
        let place = std::env::temp_dir().join(format!("tonic-rdma-tune-once-{}", std::process::id()));
        let context = tonic_rdma_verbs::soft::open().unwrap();
        let config = Config::default().tune_cache(TuneCache::Directory(place.clone()));
        // Enough for every size, because a calibration without a size is not kept.
        let budget = Duration::from_secs(600);
        let first = tune(&context, &config, false, budget).unwrap();
        assert_eq!(first.origin, Origin::Measured);
        // Stored by hand, because measurements on a busy machine may not agree.
        cache::store(&place, &Calibration { steady: true, ..first.calibration.clone() }).unwrap();
        let second = tune(&context, &config, false, Duration::ZERO).unwrap();
        assert_eq!(second.origin, Origin::Disk);
        assert_eq!(second.calibration.points(), first.calibration.points());
        assert!(second.kept.is_ok() && second.summary().starts_with("rendezvous "), "{}", second.summary());
        assert_eq!(tune(&context, &config, true, budget).unwrap().origin, Origin::Measured);
        std::fs::remove_dir_all(&place).unwrap();
    }

    #[test]
    fn a_process_measures_in_the_background_once() {
        let context = tonic_rdma_verbs::soft::open().unwrap();
        // A length that no other test uses.
        let config = Config::default().receive_buffers(16, 2000).tune_cache(TuneCache::Off);
        let tuner = DeviceTuner::of(&context, &config);
        assert!(Arc::ptr_eq(&tuner, &DeviceTuner::of(&context, &config)));
        let outcome = loop {
            match tuner.outcome() {
                Some(outcome) => break outcome,
                None => std::thread::sleep(Duration::from_millis(5)),
            }
        };
        assert_eq!(outcome.as_ref().unwrap().key().slot_size, 2000);
    }
}
