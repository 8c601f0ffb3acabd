//! The tuner: from which length on a write goes by rendezvous, in chunks of which length, and why.
//!
//! Owns what is known of a device ([`Calibration`], measured in a moment at first use and kept on disk), what each
//! connection makes of it, and the answer to "why" ([`TransferDecision`]). Never moves a connection's data; the write path asks
//! `Chooser` which way to take.
//!
//! ```text
//!  RDMA_EAGER_THRESHOLD=bytes ──────────────────────────────▶ Configured   (nothing is measured)
//!  auto:  built-in default ─────────────────────────────────▶ Default      until the next line is there, or for good
//!         cache on disk, else a calibration in a thread ────▶ Calibration  once for each process and device
//!         trials on the connection, one size at a time ─────▶ Online       where they say otherwise, clearly
//! ```
//!
//! The book's page on the tuner says how each works, and what it was measured to be worth.

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
pub(super) use chooser::{Chooser, Explained};
pub use decision::{ThresholdSource, TransferDecision, TransferMode, WriteLoad};
pub(super) use device::DeviceTuner;
pub use device::{Origin, Tuned, tune};
pub use error::{CacheError, CalibrationError};
pub use format::FormatError;
pub use key::CalibrationKey;
