//! The transfer mode of a write, with the reason for the choice.

use std::fmt;
use std::sync::Arc;

/// A threshold that no write reaches.
pub(super) const NEVER: usize = usize::MAX;

/// The way in which the bytes of a write get to the peer.
///
/// ```
/// use tonic_rdma::{RdmaConnectInfo, TransferMode, WriteLoad};
///
/// fn goes_by_rendezvous(info: &RdmaConnectInfo, size: usize) -> bool {
///     info.why(size, WriteLoad::Heavy).is_some_and(|decision| decision.mode == TransferMode::Rendezvous)
/// }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TransferMode {
    /// This end sends the bytes into receive buffers that the peer has posted.
    Eager,
    /// This end offers the bytes, and the peer reads them.
    Rendezvous,
}

impl TransferMode {
    /// Returns the mode of a write of `size` bytes, if writes of `threshold` bytes and more go by rendezvous.
    pub(super) fn of(size: usize, threshold: usize) -> Self {
        if size >= threshold { Self::Rendezvous } else { Self::Eager }
    }

    /// Returns the other mode.
    pub(super) fn other(self) -> Self {
        match self {
            Self::Eager => Self::Rendezvous,
            Self::Rendezvous => Self::Eager,
        }
    }
}

impl fmt::Display for TransferMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Eager => "eagerly",
            Self::Rendezvous => "by rendezvous",
        })
    }
}

/// The state of a connection when a large write begins.
///
/// ```
/// use tonic_rdma::WriteLoad;
///
/// assert_eq!(WriteLoad::Light.to_string(), "light load");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WriteLoad {
    /// A message of the peer has arrived since the last large write began: requests and answers.
    Light,
    /// No message of the peer has arrived since then: one write after the other.
    Heavy,
}

impl fmt::Display for WriteLoad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Light => "light load",
            Self::Heavy => "heavy load",
        })
    }
}

/// The source of a threshold.
///
/// ```
/// use tonic_rdma::{RdmaConnectInfo, ThresholdSource, WriteLoad};
///
/// fn is_measured(info: &RdmaConnectInfo) -> bool {
///     let decision = info.why(64 << 10, WriteLoad::Light);
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
    /// Trials on this connection.
    Online {
        /// Time of this mode, in percent of the time of the other mode.
        percent: u32,
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
            Self::Online { percent } => {
                write!(f, "set online: {percent} % of the time that the other way took")
            }
            Self::Default { reason } => write!(f, "the default ({reason})"),
        }
    }
}

/// The transfer mode of a write, and its reason.
///
/// ```text
/// 64 KiB by rendezvous: threshold 32 KiB, set by calibration of rxe0
/// ```
///
/// ```
/// use tonic_rdma::{RdmaConnectInfo, TransferDecision, WriteLoad};
///
/// fn print(info: &RdmaConnectInfo) {
///     let decision: Option<TransferDecision> = info.why(64 << 10, WriteLoad::Light);
///     if let Some(decision) = decision {
///         println!("{decision}");
///     }
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TransferDecision {
    /// Length of the write, in bytes.
    pub size: usize,
    /// Transfer mode of the write.
    pub mode: TransferMode,
    /// Writes of this many bytes and more go by rendezvous; `None` if no write does. Trials may have switched the mode for some
    /// sizes.
    pub threshold: Option<usize>,
    /// Length of the chunks of a rendezvous, in bytes.
    pub chunk: usize,
    /// Source of the threshold.
    pub set_by: ThresholdSource,
}

impl TransferDecision {
    pub(super) fn new(
        size: usize,
        mode: TransferMode,
        threshold: usize,
        chunk: usize,
        set_by: ThresholdSource,
    ) -> Self {
        Self { size, mode, threshold: (threshold != NEVER).then_some(threshold), chunk, set_by }
    }
}

impl fmt::Display for TransferDecision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: ", Bytes(self.size), self.mode)?;
        match self.threshold {
            Some(threshold) => write!(f, "threshold {}, {}", Bytes(threshold), self.set_by),
            None => write!(f, "no threshold, {}", self.set_by),
        }
    }
}

/// Formats a length with a unit.
pub(super) struct Bytes(pub(super) usize);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            bytes if bytes > 0 && bytes % (1 << 20) == 0 => write!(f, "{} MiB", bytes >> 20),
            bytes if bytes > 0 && bytes % (1 << 10) == 0 => write!(f, "{} KiB", bytes >> 10),
            bytes => write!(f, "{bytes} B"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_decision_reads_like_a_sentence() {
        let decision = |size, threshold, set_by| {
            TransferDecision::new(size, TransferMode::of(size, threshold), threshold, 1 << 18, set_by)
                .to_string()
        };
        let calibration = || ThresholdSource::Calibration { device: "rxe0".into() };
        assert_eq!(
            decision(65_536, 32_768, calibration()),
            "64 KiB by rendezvous: threshold 32 KiB, set by calibration of rxe0"
        );
        assert_eq!(
            decision(1000, NEVER, ThresholdSource::Configured),
            "1000 B eagerly: no threshold, set by configuration"
        );
        let reason = "calibration is under way".into();
        assert_eq!(
            decision(1 << 20, 1 << 16, ThresholdSource::Default { reason }),
            "1 MiB by rendezvous: threshold 64 KiB, the default (calibration is under way)"
        );
    }
}
