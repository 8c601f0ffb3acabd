//! Options of `throughput`, and of the processes that it starts.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use tonic_rdma_commands::ValueError;
use tonic_rdma_commands::units::{SIZE_FORMS, parse_size, parse_time_within};

use crate::transport::Transport;

/// Options of `throughput`.
#[derive(Debug, Args)]
pub(crate) struct ThroughputOptions {
    /// Payload sizes of request and reply, such as 64,64k
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "64,65536", value_parser = size)]
    pub(crate) sizes: Vec<u32>,
    /// Numbers of calls in flight at a time
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "1,32", value_parser = inflight())]
    pub(crate) inflight: Vec<u32>,
    /// Time of each run, in seconds or with a unit (300ms, 2m)
    #[arg(long, value_name = "TIME", allow_negative_numbers = true, default_value = "1", value_parser = seconds)]
    pub(crate) duration: Duration,
    /// Groups of four runs for each cell
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) rounds: u32,
    /// Program in place of our client. It takes --server_port, --bytes, --inflight and --seconds, calls
    /// TestService.UnaryCall, and prints the calls per second as its last line
    #[arg(long, value_name = "PROGRAM")]
    pub(crate) client: Option<PathBuf>,
    /// File for the results as JSON; - is stdout
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
    #[arg(long, value_parser = size)]
    pub(crate) bytes: u32,
    /// Calls in flight at a time
    #[arg(long, value_parser = inflight())]
    pub(crate) inflight: u32,
    /// Seconds to measure
    #[arg(long, value_parser = seconds)]
    pub(crate) seconds: Duration,
}

/// Parses a payload size. The server takes requests of up to 16 MiB.
fn size(text: &str) -> Result<u32, ValueError> {
    let bytes = parse_size(text).ok().and_then(|bytes| u32::try_from(bytes).ok());
    bytes
        .filter(|bytes| *bytes <= 16_000_000)
        .ok_or_else(|| ValueError::number("size", text, format!("{SIZE_FORMS}, up to 16000000 bytes")))
}

fn inflight() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..=4096)
}

fn seconds(text: &str) -> Result<Duration, ValueError> {
    parse_time_within(text, 0.05..=3600.0)
}
