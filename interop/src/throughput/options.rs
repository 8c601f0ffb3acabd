//! Options of `throughput`, and of the processes that it starts.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use crate::Failure;
use crate::transport::Transport;

/// Options of `throughput`.
#[derive(Debug, Args)]
pub(crate) struct ThroughputOptions {
    /// Payload sizes of request and reply, in bytes
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "64,65536", value_parser = size())]
    pub(crate) sizes: Vec<u32>,
    /// Numbers of calls in flight at a time
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "1,32", value_parser = inflight())]
    pub(crate) inflight: Vec<u32>,
    /// Seconds of each run
    #[arg(long, value_name = "SECS", default_value = "1", value_parser = seconds)]
    pub(crate) duration: Duration,
    /// Groups of four runs for each cell
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) rounds: u32,
    /// Program in place of our client. It takes --server_port, --bytes, --inflight and --seconds, calls
    /// TestService.UnaryCall, and prints the calls per second as its last line
    #[arg(long, value_name = "PROGRAM")]
    pub(crate) client: Option<PathBuf>,
    /// File for the results as JSON
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

/// Options of a server that `throughput` starts.
#[derive(Debug, Args)]
pub(crate) struct ServedOptions {
    /// Transport of the listener
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
    /// Calls in flight at a time
    #[arg(long, value_parser = inflight())]
    pub(crate) inflight: u32,
    /// Seconds to measure
    #[arg(long, value_parser = seconds)]
    pub(crate) seconds: Duration,
}

/// Returns the parser of payload sizes. The server takes requests of up to 16 MiB.
fn size() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(0..=16_000_000)
}

fn inflight() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..=4096)
}

fn seconds(text: &str) -> Result<Duration, Failure> {
    let seconds = text.parse().ok().filter(|seconds| (0.05..=3600.0).contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| Failure::new("accepted: 0.05 to 3600 seconds"))
}
