//! Why there is no connection.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use super::config::ConfigError;
use crate::wire::hello::HelloError;

/// Why a peer could not be connected to. It is a source of the `tonic::transport::Error` that a client gets:
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// use std::error::Error;
/// use tonic::transport::Endpoint;
/// use tonic_rdma::{ConnectError, RdmaConnector};
///
/// fn connect_error<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a ConnectError> {
///     error.downcast_ref().or_else(|| connect_error(error.source()?))
/// }
///
/// let endpoint = Endpoint::from_static("http://127.0.0.1:1"); // nothing listens there
/// let error = endpoint.connect_with_connector(RdmaConnector::new()).await.unwrap_err();
/// assert!(matches!(connect_error(&error), Some(ConnectError::Tcp { .. })), "{error:?}");
/// # }
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The configuration has a setting with a value that can't be used.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The name does not resolve.
    #[error("{authority}: {source}")]
    Resolve {
        /// Host and port.
        authority: String,
        /// What the resolver said.
        source: io::Error,
    },
    /// The URI has no host to connect to.
    #[error("{0}: no host to connect to")]
    NoHost(String),
    /// TCP could not connect.
    #[error("connecting to {peer}: {source}")]
    Tcp {
        /// Address tried last.
        peer: SocketAddr,
        /// What the system said.
        source: io::Error,
    },
    /// TCP did not connect in time.
    #[error("connecting to {authority}: no answer within {timeout:?}")]
    Timeout {
        /// Host and port.
        authority: String,
        /// How long was waited.
        timeout: Duration,
    },
    /// The policy requires RDMA, and there is none.
    #[error("{authority}: RDMA is required (RDMA_POLICY=require), but {reason}")]
    RdmaRequired {
        /// Host and port.
        authority: String,
        /// Why there is no RDMA.
        reason: String,
    },
}

/// What went wrong in a negotiation.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NegotiationError {
    /// The peer's first bytes are neither ours nor a gRPC client's.
    #[error("not a gRPC client, nor one of ours: first bytes {0:02x?}")]
    Garbage(Vec<u8>),
    /// The peer connected, and then said nothing, or not enough.
    #[error("no complete message of the negotiation within {0:?}")]
    Silent(Duration),
    /// The peer connected and left without a byte, as health probes do.
    #[error("the peer closed the connection without having said anything")]
    Nothing,
    /// The peer closed the connection in the middle of the negotiation.
    #[error("the peer closed the connection before the negotiation was over")]
    Closed,
    /// The connection failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// What the peer sent is not a message of the negotiation.
    #[error(transparent)]
    Hello(#[from] HelloError),
    /// A message that does not belong here.
    #[error("the peer sent {0} out of turn")]
    OutOfTurn(&'static str),
    /// The policy requires RDMA, and the client has none.
    #[error("RDMA is required (RDMA_POLICY=require), but {0}")]
    RdmaRequired(String),
}
