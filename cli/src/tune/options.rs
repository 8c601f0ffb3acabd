//! The options of `tune`, and its help text.

use std::path::PathBuf;

use clap::Args;

pub(crate) const HELP: &str = "\
A write goes eagerly, into buffers that the peer has posted, or, from a threshold on, by rendezvous: the peer reads it. \
Which is faster depends on the device; connections measure it at first use, in the background, and then follow what they see. \
This shows what they go by: kept in RDMA_TUNE_CACHE, or else in the user's cache directory. RDMA_EAGER_THRESHOLD and \
RDMA_CHUNK_SIZE fix what is chosen.";

/// Options of `tune`.
#[derive(Debug, Args)]
pub(crate) struct TuneOptions {
    /// The device, as `tonic-rdma devices` shows it [default: the first usable one]
    #[arg(long, value_name = "NAME", env = "RDMA_DEVICE", hide_env = true)]
    pub(crate) device: Option<String>,
    /// Write all of it as JSON to this file
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Draw the curve into this file, as SVG
    #[arg(long, value_name = "FILE.svg")]
    pub(crate) plot: Option<PathBuf>,
    /// Measure, even if there is a calibration on disk
    #[arg(long)]
    pub(crate) fresh: bool,
}
