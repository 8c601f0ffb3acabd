//! The server process: its start by the client, and its services.

pub(crate) mod serve;

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

/// The addresses of the server process, which it reports when it has started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Addresses {
    pub(crate) tcp: SocketAddr,
    /// TCP with tuned windows and frames.
    pub(crate) tcp_tuned: SocketAddr,
    /// Name in the abstract namespace, which leaves no file behind.
    pub(crate) uds: String,
    pub(crate) rdma: Option<SocketAddr>,
    /// The listener that sends large answers by reference, for `grpc-rdma-gather`.
    pub(crate) rdma_gather: Option<SocketAddr>,
    /// The listener for native calls, and the one that also sends and lands payloads by reference.
    pub(crate) native: Option<SocketAddr>,
    pub(crate) native_gather: Option<SocketAddr>,
    /// Address of the tensor device, as `host:port`.
    pub(crate) tensors: Option<String>,
    /// Whether the process is pinned to the core that it was given.
    pub(crate) pinned: bool,
}
