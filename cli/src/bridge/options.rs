//! What `bridge` is told on the command line.

use std::time::Duration;

use clap::{Args, ValueEnum};

use super::address::Address;
use crate::units::parse_seconds;

pub(crate) const HELP: &str = "\
ADDR is tcp://HOST:PORT, unix:PATH, unix:@NAME (abstract) or rdma://HOST:PORT; IPv6 goes in brackets, port 0 picks a free port. \
--listen and --connect come in pairs, one for each route. Once a route listens, stdout has a line for it: \
`listening on tcp://127.0.0.1:41234, connecting to rdma://ps0:50051`.

rdma:// is negotiated on that TCP port, and set up by RDMA_POLICY and the other RDMA_* variables. Where RDMA can't be had the \
same bytes go over TCP, and stderr says why; with --policy require they don't go at all. An rdma:// listener also serves \
clients without RDMA on the same port, whatever they speak (one that waits for the server to speak first is taken for \
such after 3 s).

Bytes pass unchanged. An end (half-close) is passed on as an end, a failure as a reset: a stream that was cut short never \
looks complete. The target is connected to when a client comes, again and again with growing pauses until \
--connect-timeout; the client's bytes wait meanwhile. SIGTERM or SIGINT closes the listeners and waits for the connections, \
--drain-timeout at most; a second one ends them at once. Exit status: 0 if all connections ended by themselves, 1 if some were \
cut off, 2 for bad input.

Examples, a client and a server that know nothing of RDMA, each with a bridge at its side:
  client's host:  tonic-rdma bridge --listen tcp://127.0.0.1:50051 --connect rdma://ps0:50052
  server's host:  tonic-rdma bridge --listen rdma://0.0.0.0:50052 --connect unix:/run/server.sock";

/// Options of `bridge`.
#[derive(Debug, Args)]
pub(crate) struct BridgeOptions {
    /// Where to accept connections; may be repeated, with a --connect for each
    #[arg(long, value_name = "ADDR", required = true)]
    pub(crate) listen: Vec<Address>,
    /// Where each of them goes
    #[arg(long, value_name = "ADDR", required = true)]
    pub(crate) connect: Vec<Address>,
    /// Whether rdma:// addresses have to be RDMA, or may be TCP [default: RDMA_POLICY, or else prefer]
    #[arg(long, value_name = "require|prefer|tcp-only", hide_possible_values = true)]
    pub(crate) policy: Option<PolicyName>,
    /// Connections at once, over all routes; more clients wait to be accepted
    #[arg(long, value_name = "NUMBER", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) max_connections: u32,
    /// How long to try to connect to the target, in seconds, before the client is reset
    #[arg(long, value_name = "SECS", default_value = "10", value_parser = parse_seconds)]
    pub(crate) connect_timeout: Duration,
    /// How long connections may take to end after a signal, in seconds
    #[arg(long, value_name = "SECS", default_value = "30", value_parser = parse_seconds)]
    pub(crate) drain_timeout: Duration,
    /// Don't start unless every target can be connected to
    #[arg(long)]
    pub(crate) require_target: bool,
    /// Threads that carry bytes, over which connections are spread; each may keep a core busy
    #[arg(long, value_name = "NUMBER", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(crate) threads: u16,
    /// Serve /metrics (Prometheus), /healthz and /ready over HTTP here, such as 127.0.0.1:9464
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) metrics: Option<String>,
    /// What to log on stderr: error, warn, info, debug, trace, or a filter as RUST_LOG takes [default: RUST_LOG, or else
    /// warnings and what connections go over]
    #[arg(long, value_name = "LEVEL")]
    pub(crate) log: Option<String>,
}

/// The library's policies, as the variable has them.
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
