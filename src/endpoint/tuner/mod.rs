//! The tuner: the length from which on writes go by rendezvous, and the length of the chunks.
//!
//! This module has the calibrations of devices ([`Calibration`], measured at first use and kept on disk), the choice of each
//! connection (`Chooser`), and the explanation of the choice ([`TransferDecision`]). It does not move a connection's data.
//!
//! ```text
//!  RDMA_EAGER_THRESHOLD=bytes ──────────────────────────────▶ Configured   (nothing is measured)
//!  auto:  built-in default ─────────────────────────────────▶ Default      until the next line is there, or for good
//!         cache on disk, else a calibration in a thread ────▶ Calibration  once for each process and device
//!         trials on the connection, one size at a time ─────▶ Online       where they differ clearly
//! ```
//!
//! [`Calibration::threshold`] chooses the length from the measured times. The book's page on the tuner describes each step and its
//! measured gain.

mod cache;
mod calibrate;
mod calibration;
mod chooser;
mod decision;
mod device;
mod error;
mod format;
mod key;
mod loopback;
mod online;

pub use super::config::{NoDirectory, TuneCache};
pub use calibrate::calibrate;
pub use calibration::{Calibration, ChunkPoint, Point};
pub(super) use chooser::{Chooser, Explanation};
pub use decision::{ThresholdSource, TransferDecision, TransferMode, WriteLoad};
pub(super) use device::DeviceTuner;
pub use device::{Origin, Tuned, tune};
pub use error::{CacheError, CalibrationError};
pub use format::FormatError;
pub use key::CalibrationKey;
