//! The options of `bridge`, and its help text.

use std::time::Duration;

use clap::{Args, ValueEnum};
use tonic_rdma_commands::units::parse_time;

use super::address::Address;

pub(crate) const HELP: &str = "\
ADDR is tcp://HOST:PORT, unix:PATH, unix:@NAME (abstract) or rdma://HOST:PORT; IPv6 goes in brackets, port 0 picks a free port. \
--listen and --connect come in pairs, one for each route. Once a route listens, stdout has a line for it: \
`listening on tcp://127.0.0.1:41234, connecting to rdma://ps0:50051`.

rdma:// is negotiated on that TCP port. RDMA_POLICY and the other RDMA_* variables configure it. Without RDMA the same bytes \
go over TCP, and stderr gives the reason; with --policy require the connection fails. An rdma:// listener also serves clients \
without RDMA on the same port, with any protocol (a client that sends nothing counts as one without RDMA after 3 s).

Bytes pass unchanged. The bridge passes an end (half-close) on as an end and a failure as a reset, so a stream that was cut \
short never looks complete. When a client connects, the bridge connects to the target, and tries again with growing pauses until \
--connect-timeout; the client's bytes wait meanwhile. SIGTERM or SIGINT closes the listeners and waits for the connections, \
at most for --drain-timeout; a second signal ends them at once. Exit status: 0 if all connections ended by themselves, 1 if some \
were cut off or the bridge could not start, 2 for bad input.

Example: a client and a server without RDMA, each with a bridge on its host:
  client's host:  tonic-rdma bridge --listen tcp://127.0.0.1:50051 --connect rdma://ps0:50052
  server's host:  tonic-rdma bridge --listen rdma://0.0.0.0:50052 --connect unix:/run/server.sock";

/// Options of `bridge`.
#[derive(Debug, Args)]
pub(crate) struct BridgeOptions {
    /// Where to accept connections; may be repeated, with a --connect for each
    #[arg(long, value_name = "ADDR", required = true)]
    pub(crate) listen: Vec<Address>,
    /// The target of its connections
    #[arg(long, value_name = "ADDR", required = true)]
    pub(crate) connect: Vec<Address>,
    /// Whether rdma:// addresses must use RDMA, or may use TCP [default: RDMA_POLICY, or else prefer]
    #[arg(long, value_name = "require|prefer|tcp-only", hide_possible_values = true)]
    pub(crate) policy: Option<PolicyName>,
    /// Connections at one time, over all routes; further clients wait for the accept
    #[arg(long, value_name = "NUMBER", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) max_connections: u32,
    /// Time to connect to the target, in seconds or with a unit (300ms, 2m), without the client's wait while the target answers others;
    /// then the client is reset
    #[arg(long, value_name = "TIME", allow_negative_numbers = true, default_value = "10", value_parser = parse_time)]
    pub(crate) connect_timeout: Duration,
    /// Time for connections to end after a signal, in seconds or with a unit
    #[arg(long, value_name = "TIME", allow_negative_numbers = true, default_value = "30", value_parser = parse_time)]
    pub(crate) drain_timeout: Duration,
    /// Start only if every target accepts a connection
    #[arg(long)]
    pub(crate) require_target: bool,
    /// Threads that carry the connections; each may keep a core busy
    #[arg(long, value_name = "NUMBER", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(crate) threads: u16,
    /// Serve /metrics (Prometheus), /healthz and /ready over HTTP here, such as 127.0.0.1:9464
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) metrics: Option<String>,
    /// Log level for stderr: error, warn, info, debug, trace, or a filter in the form of RUST_LOG [default: RUST_LOG, or else
    /// warnings and the transport of connections]
    #[arg(long, value_name = "LEVEL")]
    pub(crate) log: Option<String>,
}

/// The library's policies, under the names that the variable accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum PolicyName {
    Require,
    Prefer,
    TcpOnly,
}

impl From<PolicyName> for tonic_rdma::Policy {
    fn from(name: PolicyName) -> Self {
        match name {
            PolicyName::Require => Self::Require,
            PolicyName::Prefer => Self::Prefer,
            PolicyName::TcpOnly => Self::TcpOnly,
        }
    }
}
