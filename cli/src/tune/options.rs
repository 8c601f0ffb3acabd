//! The options of `tune`, and its help text.

use std::path::PathBuf;

use clap::Args;

pub(crate) const HELP: &str = "\
Small writes are eager: they go into buffers that the peer has posted. From a threshold on, writes go by rendezvous: the \
peer reads them. Which way is faster depends on the device. Connections measure it at first use, in the background, and \
adapt to later measurements. This command shows the measured values. They are kept in RDMA_TUNE_CACHE, or else in the \
user's cache directory. RDMA_EAGER_THRESHOLD and RDMA_CHUNK_SIZE set fixed values.";

/// The options of `tune`.
#[derive(Debug, Args)]
pub(crate) struct TuneOptions {
    /// The device, as `tonic-rdma devices` shows it [default: the first usable one]
    #[arg(long, value_name = "NAME", env = "RDMA_DEVICE", hide_env = true)]
    pub(crate) device: Option<String>,
    /// Write the values as JSON to this file; - is stdout
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Draw the curve into this file, as SVG
    #[arg(long, value_name = "FILE.svg")]
    pub(crate) plot: Option<PathBuf>,
    /// Measure again, even if there is a calibration on disk
    #[arg(long)]
    pub(crate) fresh: bool,
}
