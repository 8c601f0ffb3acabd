//! Errors of calibrations and of their cache.

use std::error::Error;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use super::format::FormatError;
use crate::endpoint::config::{ConfigError, NoDirectory};
use crate::endpoint::fault::ConnectionFault;
use crate::wire::ChunkError;
use tonic_rdma_verbs::memory::PoolError;
use tonic_rdma_verbs::{CompletionOpcode, CompletionStatus, OutOfBounds, VerbsError};

/// The reason why a device was not calibrated.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CalibrationError {
    /// The configuration has a setting with a value that can't be used.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The device has no connection to itself.
    #[error("the device can't be connected to itself: {0}")]
    NoLoopback(VerbsError),
    /// A step of the measurement failed.
    #[error("the device failed while it was measured: {0}")]
    Failed(Box<dyn Error + Send + Sync>),
    /// A request of the measurement failed.
    #[error("the device failed while it was measured: {opcode:?}: {status}")]
    Request {
        /// The operation.
        opcode: CompletionOpcode,
        /// The status of its completion.
        status: CompletionStatus,
    },
    /// No completion came for this long.
    #[error("nothing arrived for {0:?} while the device was measured")]
    Stalled(Duration),
    /// No thread could be started for the measurement.
    #[error("no thread to measure in: {0}")]
    NoThread(io::Error),
}

macro_rules! failed {
    ($($error:ty),*) => {$(
        impl From<$error> for CalibrationError {
            fn from(error: $error) -> Self {
                Self::Failed(error.into())
            }
        }
    )*};
}

failed!(ConnectionFault, PoolError, OutOfBounds, ChunkError);

/// The reason why a calibration was not read from disk, or not kept there.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CacheError {
    /// There is no directory for calibrations.
    #[error(transparent)]
    NoDirectory(#[from] NoDirectory),
    /// A calibration with a limit on inline bytes holds for that limit only.
    #[error(
        "a limit on inline bytes is set (RDMA_MAX_INLINE), and the cache has no calibrations with a limit"
    )]
    InlineLimit,
    /// Repeated measurements differed too much.
    #[error("measurements did not agree: the machine was busy")]
    Unsteady,
    /// A file or directory can't be read or written.
    #[error("{}: {error}", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// The error of the system.
        error: io::Error,
    },
    /// A file or directory is not one that this user's process made.
    #[error("{}: {problem}", path.display())]
    Foreign {
        /// The file or directory.
        path: PathBuf,
        /// The problem with it.
        problem: &'static str,
    },
    /// A file does not contain a calibration that can be used.
    #[error("{}: {error}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// The problem with its text.
        error: FormatError,
    },
}
