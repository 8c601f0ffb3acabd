//! Errors of connecting a channel.

use std::error::Error;
use std::sync::Arc;

use http::Uri;
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

/// The reason why an endpoint has no connection.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    #[error("the channel has a setting that can't be used")]
    Config(#[from] ConfigError),
    #[error("the endpoint can't be connected to")]
    Connect(#[from] ConnectError),
    #[error("the endpoint was connected to, and HTTP/2 failed")]
    Http2(#[from] DialError),
    #[error("the channel's runtime ended while it connected")]
    Interrupted,
}

impl Failure {
    /// Returns the message of the error within.
    pub(super) fn reason(&self) -> String {
        self.source().map_or_else(|| self.to_string(), ToString::to_string)
    }
}

/// Returns the message of the last source, because tonic's errors around it are general.
fn innermost(error: &(dyn Error + 'static)) -> String {
    error.source().map_or_else(|| error.to_string(), innermost)
}

impl From<Failure> for ChannelError {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Config(error) => Self::Config(error),
            Failure::Connect(error) => Self::Connect(error),
            Failure::Http2(error) => Self::Http2(error.into()),
            Failure::Interrupted => Self::Http2(failure.into()),
        }
    }
}

/// Returns the status of a call that found no endpoint up: UNAVAILABLE, with the last failure, of `count` endpoints.
pub(super) fn unavailable(count: usize, last: Option<(Uri, Arc<Failure>)>) -> Status {
    let Some((uri, failure)) = last else {
        return Status::unavailable("there is no endpoint to call");
    };
    let reason = failure.reason();
    let message = match count {
        1 => format!("{uri}: {reason}"),
        _ => format!("all {count} endpoints are down, the last one to fail was {uri}: {reason}"),
    };
    let mut status = Status::unavailable(message);
    status.set_source(failure);
    status
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
