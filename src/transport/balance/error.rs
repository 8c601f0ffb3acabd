//! Errors of calls on a balanced channel, and of dials to its endpoints.

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use http::Uri;
use tonic::Status;

use crate::endpoint::{ConfigError, ConnectError};

/// The reason why a call on a [`BalancedChannel`](super::BalancedChannel) got no response. Generated clients turn it into a [`Status`].
///
/// ```
/// use tonic_rdma::BalanceError;
///
/// fn describe(error: &BalanceError) -> String {
///     match error {
///         BalanceError::Unavailable(status) => format!("no endpoint is up: {}", status.message()),
///         other => format!("the call failed: {other}"),
///     }
/// }
/// # assert_eq!(describe(&BalanceError::Unavailable(tonic::Status::unavailable("x"))), "no endpoint is up: x");
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BalanceError {
    /// No endpoint is up. The status is UNAVAILABLE; its message has the reason of the last failure, and its source is that failure.
    #[error("{}", .0.message())]
    Unavailable(#[source] Status),
    /// The call was given to an endpoint, and its connection failed.
    #[error(transparent)]
    Transport(#[from] tonic::transport::Error),
}

/// The reason why an endpoint is down.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DialError {
    #[error("{0}")]
    Config(#[from] ConfigError),
    #[error("{0}")]
    Connect(#[from] ConnectError),
    /// tonic's channel could not connect.
    #[error("{}", cause(.0))]
    Channel(#[from] tonic::transport::Error),
    #[error("the server took the connection, and no HTTP/2 came within {0:?}")]
    Silent(Duration),
    #[error("the server took the connection and closed it")]
    Closed,
    #[error("the connection ended as soon as it was made")]
    EndedAtOnce,
    #[error("the channel's runtime ended while it connected")]
    Interrupted,
}

/// Returns the status of a call that found no endpoint up: UNAVAILABLE, with the last failure, of `count` endpoints.
pub(super) fn unavailable(count: usize, last: Option<(&Uri, &Arc<DialError>)>) -> Status {
    let Some((uri, error)) = last else {
        return Status::unavailable("there is no endpoint to call");
    };
    let message = match count {
        1 => format!("{uri}: {error}"),
        _ => format!("all {count} endpoints are down, the last one to fail was {uri}: {error}"),
    };
    let mut status = Status::unavailable(message);
    status.set_source(Arc::clone(error) as Arc<dyn Error + Send + Sync>);
    status
}

/// The connection of a channel ended, and the channel must not dial it again.
#[derive(Debug, thiserror::Error)]
#[error("the connection ended")]
pub(super) struct Ended;

/// Returns the most specific message of an error and its sources: the message of our connector's error, or else of the last source.
/// tonic's errors around it are general.
fn cause(error: &(dyn Error + 'static)) -> String {
    if let Some(error) = error.downcast_ref::<ConnectError>() {
        return error.to_string();
    }
    error.source().map_or_else(|| error.to_string(), cause)
}
