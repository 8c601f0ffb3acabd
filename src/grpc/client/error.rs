//! Errors of connecting a channel.

use std::error::Error;

use crate::endpoint::{ConfigError, ConnectError};

/// The reason why an [`RdmaChannel`](super::RdmaChannel) could not be made. Calls on a channel end with a [`tonic::Status`] instead.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// use tonic_rdma::{ChannelError, RdmaChannel};
///
/// let error = RdmaChannel::connect("http://127.0.0.1:1").await.unwrap_err(); // nothing listens there
/// assert!(matches!(error, ChannelError::Connect(_)), "{error}");
/// let error = RdmaChannel::connect("not a URI").await.unwrap_err();
/// assert!(matches!(error, ChannelError::Endpoint(_)), "{error}");
/// # }
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChannelError {
    /// The argument does not name an endpoint, as its source says.
    #[error("not an endpoint: {0}")]
    Endpoint(#[source] Box<dyn Error + Send + Sync>),
    /// The channel has no endpoint.
    #[error("the channel has no endpoint to connect to")]
    NoEndpoint,
    /// A setting has a value that can't be used.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The connection could not be made.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The connection was made, and HTTP/2 or TLS on it failed.
    #[error("{}", innermost(.0))]
    Http2(#[source] tonic::transport::Error),
    /// None of several endpoints could be connected; the status has the reason of the last one.
    #[error("{}", .0.message())]
    Unavailable(#[source] tonic::Status),
}

/// Returns the message of the last source, because tonic's errors around it are general.
fn innermost(error: &(dyn Error + 'static)) -> String {
    error.source().map_or_else(|| error.to_string(), innermost)
}
