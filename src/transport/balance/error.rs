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
    #[error("the channel has a setting that can't be used")]
    Config(#[from] ConfigError),
    #[error("the endpoint can't be connected to")]
    Connect(#[from] ConnectError),
    #[error("tonic's channel can't connect")]
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

impl DialError {
    /// Returns the most specific message: of an error of ours within, or else of the last source, because tonic's errors around it are
    /// general.
    pub(super) fn reason(&self) -> String {
        fn of(error: &(dyn Error + 'static)) -> String {
            match error.source() {
                Some(source) if !error.is::<ConnectError>() && !error.is::<ConfigError>() => of(source),
                _ => error.to_string(),
            }
        }
        of(self)
    }
}

/// Returns the status of a call that found no endpoint up: UNAVAILABLE, with the last failure, of `count` endpoints.
pub(super) fn unavailable(count: usize, last: Option<(&Uri, &Arc<DialError>)>) -> Status {
    let Some((uri, error)) = last else {
        return Status::unavailable("there is no endpoint to call");
    };
    let reason = error.reason();
    let message = match count {
        1 => format!("{uri}: {reason}"),
        _ => format!("all {count} endpoints are down, the last one to fail was {uri}: {reason}"),
    };
    let mut status = Status::unavailable(message);
    status.set_source(Arc::clone(error) as Arc<dyn Error + Send + Sync>);
    status
}

/// The connection of a channel ended, and the channel must not dial it again.
#[derive(Debug, thiserror::Error)]
#[error("the connection ended")]
pub(super) struct Ended;
