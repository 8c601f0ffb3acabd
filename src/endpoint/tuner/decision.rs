//! Which way a write goes, and who decided that.

use std::fmt;
use std::sync::Arc;

/// A threshold that no write reaches.
pub(super) const NEVER: usize = usize::MAX;

/// How the bytes of a write get to the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TransferMode {
    /// Sent into receive buffers that the peer has posted.
    Eager,
    /// Offered, and read by the peer.
    Rendezvous,
}

impl TransferMode {
    /// The way of a write of `size` bytes, if those of `threshold` bytes and more go by rendezvous.
    pub(super) fn of(size: usize, threshold: usize) -> Self {
        if size >= threshold { Self::Rendezvous } else { Self::Eager }
    }

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

/// What a connection is like when a write begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WriteLoad {
    /// The peer has been heard of since the last large write began: question and answer.
    Light,
    /// It has not: one write after the other.
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

/// Who set a threshold.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ThresholdSource {
    /// The user, by `RDMA_EAGER_THRESHOLD` or [`Config::eager_threshold`](crate::Config::eager_threshold).
    Configured,
    /// The calibration of a device.
    Calibration {
        /// Its name.
        device: Arc<str>,
    },
    /// Trials on this very connection.
    Online {
        /// What this way took, in hundredths of what the other did.
        percent: u32,
    },
    /// Nobody: it is what suits devices of this kind.
    Default {
        /// Why there is nothing better.
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

/// Which way a write goes and why.
///
/// ```text
/// 64 KiB by rendezvous: threshold 32 KiB, set by calibration of rxe0
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TransferDecision {
    /// Bytes of the write.
    pub size: usize,
    /// How it goes.
    pub mode: TransferMode,
    /// Writes of this many bytes and more go by rendezvous; none if `None`. What is set online says otherwise for some
    /// sizes.
    pub threshold: Option<usize>,
    /// Bytes that the peer reads at a time, where writes go by rendezvous.
    pub chunk: usize,
    /// Who decided.
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

/// A length as people write it.
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
