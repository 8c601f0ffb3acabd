//! Options of the command `client`.

use clap::Args;

use crate::tls::ClientTlsOptions;
use crate::transport::Transport;

/// Options of `client`.
#[derive(Debug, Args)]
pub(crate) struct ClientOptions {
    /// Host to connect to
    #[arg(long = "server_host", default_value = "127.0.0.1")]
    pub(crate) server_host: String,
    /// Port to connect to
    #[arg(long = "server_port", required_unless_present = "list")]
    pub(crate) server_port: Option<u16>,
    /// Host in certificates and in the requests' authority [default: the one of --server_host]
    #[arg(long = "server_host_override", value_name = "HOST")]
    pub(crate) server_host_override: Option<String>,
    /// Cases to run, in this order, or `all`; --list names them
    #[arg(
        long = "test_case",
        value_name = "NAME[,NAME...]",
        value_delimiter = ',',
        required_unless_present = "list"
    )]
    pub(crate) test_case: Vec<String>,
    /// List the cases, one on each line
    #[arg(long)]
    pub(crate) list: bool,
    /// With --list: also list the official cases that are missing here, with the reason
    #[arg(long, requires = "list")]
    pub(crate) all: bool,
    /// Transport of the calls: ours, ours with native calls, or tonic's own TCP as a control
    #[arg(long, default_value = "rdma")]
    pub(crate) transport: Transport,
    /// Fail unless the connection uses this transport
    #[arg(long)]
    pub(crate) require: Option<Transport>,
    /// Fail unless the connection uses this RDMA device, such as rxe0
    #[arg(long, value_name = "NAME")]
    pub(crate) require_device: Option<String>,
    #[command(flatten)]
    pub(crate) tls: ClientTlsOptions,
    #[command(flatten)]
    pub(crate) soak: SoakOptions,
}

/// Options of the cases `rpc_soak` and `channel_soak`.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct SoakOptions {
    /// Number of calls of each thread
    #[arg(long = "soak_iterations", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    pub(crate) iterations: u32,
    /// Number of threads (here: tasks) that call at a time
    #[arg(long = "soak_num_threads", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) threads: u32,
    /// Number of calls that may fail
    #[arg(long = "soak_max_failures", default_value_t = 0)]
    pub(crate) max_failures: u32,
    /// Time after which a call counts as failed, in milliseconds
    #[arg(long = "soak_per_iteration_max_acceptable_latency_ms", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_latency_ms: u32,
    /// Time limit of the whole case, in seconds [default: iterations times the latency]
    #[arg(long = "soak_overall_timeout_seconds", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) overall_timeout_seconds: Option<u32>,
    /// Bytes of each request's payload
    #[arg(long = "soak_request_size", default_value_t = 271_828, value_parser = payload())]
    pub(crate) request_size: u32,
    /// Bytes of each response's payload
    #[arg(long = "soak_response_size", default_value_t = 314_159, value_parser = payload())]
    pub(crate) response_size: u32,
}

/// Returns the parser of payload sizes. The server takes requests of up to 16 MiB.
fn payload() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(0..=16_000_000)
}
