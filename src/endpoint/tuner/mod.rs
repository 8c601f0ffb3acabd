//! The tuner: the length from which on writes go by rendezvous, the length up to which they are gathered, and
//! the length of the chunks.
//!
//! ```text
//!  RDMA_EAGER_THRESHOLD=bytes ───────────────────▶ Configured
//!  auto:  the software device ───────────────────▶ Default      no threshold; nothing is measured
//!         another device: built-in default ──────▶ Default      until the next line is there, or for good
//!         a measurement of the device ───────────▶ Calibration  once for each process and device, in a thread
//! ```
//!
//! All connections of a device follow its one measurement. [`Calibration::threshold`] chooses the length from
//! the measured times. The book's page on the tuner describes each step.

mod calibration;

use std::fmt;
use std::sync::{Arc, OnceLock};

pub(super) use calibration::DEFAULT_CHUNK;
pub use calibration::{Calibration, Point, Times};

use super::config::{Config, EagerThreshold};
use calibration::SOFTWARE;
use tonic_rdma_verbs::Context;
use tonic_rdma_verbs::unstable::units::size;

/// The threshold of a device until it was measured, in bytes. A rendezvous copies as often as eager messages
/// do there, and takes fewer messages.
const DEFAULT_THRESHOLD: usize = 64 * 1024;

/// Chooses the transfer mode of a connection's writes, and the length of the chunks. It explains the choice
/// after the connection has ended, too.
#[derive(Clone, Debug)]
pub(crate) struct Chooser {
    /// The choice until the device was measured, or for good.
    first: Choice,
    /// The choice by the measurement of the device; `None` if there is to be no measurement.
    measured: Option<Measured>,
    /// Length of a chunk by configuration.
    chunk: Option<usize>,
    /// Most bytes that are offered and not read yet.
    memory: usize,
    /// The software device, where a message costs less than to gather a long write.
    is_software: bool,
}

#[derive(Clone, Debug)]
pub(super) struct Choice {
    threshold: Option<usize>,
    /// The threshold for registered memory.
    registered: Option<usize>,
    chunk: usize,
    pub(super) set_by: ThresholdSource,
}

impl Choice {
    /// Returns the choice without a measurement.
    fn unmeasured(threshold: Option<usize>, reason: &str) -> Self {
        let set_by = ThresholdSource::Default { reason: reason.into() };
        Self { threshold, registered: None, chunk: DEFAULT_CHUNK, set_by }
    }

    /// Returns the choice after the measurement of the device of this name, and publishes it.
    pub(super) fn measured(device: &str, calibration: Result<Calibration, String>) -> Self {
        match calibration {
            Ok(calibration) => {
                let (threshold, registered) = (calibration.threshold(), calibration.registered_threshold());
                let chunk = calibration.chunk();
                tracing::debug!(
                    device,
                    threshold,
                    registered,
                    chunk,
                    "rendezvous threshold set by calibration"
                );
                metrics::gauge!("tonic_rdma_rendezvous_threshold_bytes", "device" => device.to_owned())
                    .set(threshold.map_or(f64::INFINITY, |bytes| bytes as f64));
                let set_by = ThresholdSource::Calibration { device: device.into() };
                Self { threshold, registered, chunk, set_by }
            }
            Err(reason) => {
                tracing::debug!(device, reason, "no calibration");
                Self::unmeasured(Some(DEFAULT_THRESHOLD), &reason)
            }
        }
    }
}

impl Chooser {
    /// Rendezvous memory of a connection in each direction, in chunks.
    const CHUNKS: u64 = 32;
    /// Most chunks that are offered and not read yet, as the protocol allows.
    const MOST_SOURCES: usize = crate::protocol::MAX_UNREAD_CHUNKS as usize;
    /// Writes up to this length are gathered on every device, in bytes: that costs less than a message for
    /// each, measured on the software device.
    pub(super) const LEAST_GATHERED: usize = 4096;

    /// Returns the rendezvous memory of a connection in each direction, in bytes.
    pub(super) fn memory(config: &Config) -> u64 {
        Self::CHUNKS * config.chunk_size.unwrap_or(DEFAULT_CHUNK) as u64
    }

    /// Makes the chooser of a connection over a device. `measured` begins to measure the device, unless it has
    /// begun before.
    pub(super) fn new(
        config: &Config,
        context: &Arc<dyn Context>,
        measured: impl FnOnce(&Arc<dyn Context>, &Config) -> Measured,
    ) -> Self {
        let is_software = context.attributes().provider == SOFTWARE;
        let (first, measured) = match config.eager_threshold {
            EagerThreshold::Bytes(bytes) => {
                let threshold = usize::try_from(bytes).ok().filter(|bytes| *bytes < usize::MAX);
                let (registered, set_by) = (threshold, ThresholdSource::Configured);
                (Choice { threshold, registered, chunk: DEFAULT_CHUNK, set_by }, None)
            }
            EagerThreshold::Auto if is_software => {
                (Choice::unmeasured(None, "rendezvous is never faster on the software device"), None)
            }
            EagerThreshold::Auto => {
                let first = Choice::unmeasured(Some(DEFAULT_THRESHOLD), "the calibration is under way");
                (first, Some(measured(context, config)))
            }
        };
        let memory = usize::try_from(Self::memory(config)).unwrap_or(usize::MAX);
        Self { first, measured, chunk: config.chunk_size, memory, is_software }
    }

    fn choice(&self) -> &Choice {
        self.measured.as_ref().and_then(|measured| measured.get()).unwrap_or(&self.first)
    }

    /// Returns whether a write of `length` bytes goes by rendezvous.
    pub(super) fn by_rendezvous(&self, length: usize) -> bool {
        self.choice().threshold.is_some_and(|threshold| length >= threshold)
    }

    /// Returns the length from which on a write from registered memory goes by rendezvous, in bytes; `None` if
    /// no write does. Such a rendezvous copies nothing, but eager messages from that memory do not either.
    pub(super) fn registered_threshold(&self) -> Option<usize> {
        self.choice().registered
    }

    /// Returns the length up to which writes are gathered, in bytes: shorter than those that go by rendezvous.
    pub(super) fn gathered(&self) -> usize {
        if self.is_software {
            return Self::LEAST_GATHERED;
        }
        let longest = self.choice().threshold.map_or(usize::MAX, |threshold| threshold.saturating_sub(1));
        longest.max(Self::LEAST_GATHERED)
    }

    /// Sets the length of a chunk, instead of that of the configuration.
    pub(super) fn fix_chunk(&mut self, chunk: Option<usize>) {
        self.chunk = chunk;
    }

    /// Returns the length of a chunk, in bytes.
    pub(super) fn chunk(&self) -> usize {
        self.chunk.unwrap_or_else(|| self.choice().chunk)
    }

    /// Returns how many chunks may be offered and not read yet.
    pub(super) fn sources(&self) -> usize {
        (self.memory / self.chunk()).clamp(1, Self::MOST_SOURCES)
    }

    /// Returns how a write of `size` bytes would be transferred now, and why.
    pub(super) fn why(&self, size: usize) -> TransferDecision {
        let Choice { threshold, set_by, .. } = self.choice().clone();
        TransferDecision { size, threshold, chunk: self.chunk(), set_by }
    }
}

/// The choice by the measurement of a device, once it is there. All connections of the device follow it.
pub(super) type Measured = Arc<OnceLock<Choice>>;

/// The transfer mode of a write, and its reason.
///
/// ```text
/// 64 KiB by rendezvous: threshold 32 KiB, set by calibration of rxe0
/// ```
///
/// ```
/// use tonic_rdma::{RdmaConnectInfo, TransferDecision};
///
/// fn goes_by_rendezvous(info: &RdmaConnectInfo, size: usize) -> bool {
///     let decision: Option<TransferDecision> = info.why(size);
///     decision.is_some_and(|decision| decision.by_rendezvous())
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TransferDecision {
    /// Length of the write, in bytes.
    pub size: usize,
    /// Writes of this many bytes and more go by rendezvous; `None` if no write does.
    pub threshold: Option<usize>,
    /// Length of the chunks of a rendezvous, in bytes.
    pub chunk: usize,
    /// Source of the threshold.
    pub set_by: ThresholdSource,
}

impl TransferDecision {
    /// Returns whether the write goes by rendezvous: this side sends an RTS, and the peer reads the bytes.
    /// Otherwise it goes eagerly, into receive buffers that the peer has posted.
    pub fn by_rendezvous(&self) -> bool {
        self.threshold.is_some_and(|threshold| self.size >= threshold)
    }
}

impl fmt::Display for TransferDecision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mode = if self.by_rendezvous() { "by rendezvous" } else { "eagerly" };
        write!(f, "{} {mode}: ", size(self.size as u64))?;
        match self.threshold {
            Some(threshold) => write!(f, "threshold {}, {}", size(threshold as u64), self.set_by),
            None => write!(f, "no threshold, {}", self.set_by),
        }
    }
}

/// The source of a threshold.
///
/// ```
/// use tonic_rdma::{RdmaConnectInfo, ThresholdSource};
///
/// fn is_measured(info: &RdmaConnectInfo) -> bool {
///     let decision = info.why(64 << 10);
///     decision.is_some_and(|decision| matches!(decision.set_by, ThresholdSource::Calibration { .. }))
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ThresholdSource {
    /// The user, by `RDMA_EAGER_THRESHOLD` or [`Config::eager_threshold`](crate::Config::eager_threshold).
    Configured,
    /// The device's calibration.
    Calibration {
        /// Name of the device.
        device: Arc<str>,
    },
    /// The default for devices of this kind.
    Default {
        /// The reason why there is no calibration.
        reason: Arc<str>,
    },
}

impl fmt::Display for ThresholdSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Configured => f.write_str("set by configuration"),
            Self::Calibration { device } => write!(f, "set by calibration of {device}"),
            Self::Default { reason } => write!(f, "the default ({reason})"),
        }
    }
}

#[cfg(test)]
mod tests;
