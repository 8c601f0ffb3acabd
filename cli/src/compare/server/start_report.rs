//! The line that the server process writes when it starts.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

/// The one line that the serving process writes to stdout.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum StartReport {
    /// It serves.
    Ready(Addresses),
    /// It can't serve, and why; whether the request was to blame.
    Failed { reason: String, usage: bool },
}

/// Where the service is to be found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Addresses {
    pub(crate) tcp: SocketAddr,
    /// The same with tuned windows and frames.
    pub(crate) tcp_tuned: SocketAddr,
    /// Name in the abstract namespace, which leaves no file behind.
    pub(crate) uds: String,
    pub(crate) rdma: Option<SocketAddr>,
    /// Where large answers go by reference, which they do for `grpc-rdma-gather`.
    pub(crate) rdma_gather: Option<SocketAddr>,
    /// Where its device for tensors listens, as `host:port`.
    pub(crate) tensors: Option<String>,
    /// Whether the process sits on the core that it was given.
    pub(crate) pinned: bool,
}
