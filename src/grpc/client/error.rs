//! Errors of connecting a channel.

use std::error::Error;
use std::sync::Arc;

use tonic::Status;

use crate::endpoint::{ConfigError, ConnectError};
use crate::grpc::session::OpenError;
use crate::transport::balance::error::DialError;

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
    #[error("not an endpoint: {}", innermost(.0.as_ref()))]
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
    #[error("{}", innermost(.0.as_ref()))]
    Http2(#[source] Box<dyn Error + Send + Sync>),
    /// None of several endpoints could be connected. The message and the source are those of the last failure.
    #[error("{}", .0.message())]
    Unavailable(#[source] Status),
}

/// Returns the message of the last source, because tonic's errors around it are general.
fn innermost(error: &(dyn Error + 'static)) -> String {
    error.source().map_or_else(|| error.to_string(), innermost)
}

impl From<DialError> for ChannelError {
    fn from(error: DialError) -> Self {
        match error {
            DialError::Config(error) => Self::Config(error),
            DialError::Connect(error) => Self::Connect(error),
            error => Self::Http2(error.into()),
        }
    }
}

/// Returns the status of a call whose connection took no call.
pub(super) fn not_opened(error: OpenError) -> Status {
    match error {
        OpenError::Ended(fault) => fault.into(),
        error @ OpenError::GoingAway(_) => {
            let mut status = Status::unavailable(error.to_string());
            status.set_source(Arc::new(error));
            status
        }
    }
}
