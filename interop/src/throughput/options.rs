//! Options of `throughput`, and of the processes that it starts.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use crate::transport::Transport;

/// Options of `throughput`.
#[derive(Debug, Args)]
pub(crate) struct ThroughputOptions {
    /// Payload sizes of request and reply, in bytes
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "64,65536", value_parser = size())]
    pub(crate) sizes: Vec<u32>,
    /// Numbers of calls in flight at once
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "1,32", value_parser = inflight())]
    pub(crate) inflight: Vec<u32>,
    /// Seconds of each turn
    #[arg(long, value_name = "SECS", default_value = "1", value_parser = seconds)]
    pub(crate) duration: Duration,
    /// Fours of turns for each cell
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) rounds: u32,
    /// A program in place of our client. It is given --server_port, --bytes, --inflight and --seconds, calls
    /// TestService.UnaryCall, and prints calls a second as its last line
    #[arg(long, value_name = "PROGRAM")]
    pub(crate) client: Option<PathBuf>,
    /// File for the results as JSON
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

/// Options of a server that `throughput` starts.
#[derive(Debug, Args)]
pub(crate) struct ServedOptions {
    /// Whose listener
    #[arg(long)]
    pub(crate) transport: Transport,
    /// Core to run on
    #[arg(long)]
    pub(crate) core: Option<usize>,
}

/// Options of the client that `throughput` starts.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct LoadOptions {
    /// Port to call, on this machine
    #[arg(long = "server_port")]
    pub(crate) port: u16,
    /// Bytes of each payload
    #[arg(long, value_parser = size())]
    pub(crate) bytes: u32,
    /// Calls in flight at once
    #[arg(long, value_parser = inflight())]
    pub(crate) inflight: u32,
    /// Seconds to measure
    #[arg(long, value_parser = seconds)]
    pub(crate) seconds: Duration,
}

/// The server takes requests of up to 16 MiB.
fn size() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(0..=16_000_000)
}

fn inflight() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..=4096)
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|seconds| (0.05..=3600.0).contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| "accepted: 0.05 to 3600 seconds".to_owned())
}
