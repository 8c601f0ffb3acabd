//! One connection, from the client's arrival to the end of both directions.

use std::future::poll_fn;
use std::io;
use std::task::{Context, Poll};

use tonic_rdma::ConnectionFault;

use super::meters::{Failed, Meters};
use super::pump::{Broken, Pump};
use super::stream::Stream;

/// The error that ended a connection early.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RelayError {
    /// The direction from the client to the target.
    #[error("from client to target, {0}")]
    Up(Broken),
    /// The direction from the target to the client.
    #[error("from target to client, {0}")]
    Down(Broken),
    /// The client's stream, while both directions were idle.
    #[error("the client's end failed: {0}")]
    Client(io::Error),
    /// The target's stream, while both directions were idle.
    #[error("the target's end failed: {0}")]
    Target(io::Error),
}

/// The end of a connection whose two streams were reset.
#[derive(Debug)]
pub(crate) struct Cut {
    /// The reason under which the connection is counted.
    pub(crate) reason: Failed,
    pub(crate) error: RelayError,
}

impl RelayError {
    /// Returns [`Failed::Reset`] for a client that left, and [`Failed::Broken`] for a failure. `client_ended` says that
    /// the client had sent its end of data before.
    fn reason(&self, client_ended: bool) -> Failed {
        let (error, ordinary) = match self {
            Self::Up(Broken::Reading(error)) | Self::Down(Broken::Writing(error)) | Self::Client(error) => {
                (error, true)
            }
            Self::Up(Broken::Writing(error)) | Self::Down(Broken::Reading(error)) | Self::Target(error) => {
                (error, client_ended)
            }
        };
        if ordinary && is_reset(error) { Failed::Reset } else { Failed::Broken }
    }
}

/// Returns whether the other end reset the connection, according to the system or the device.
fn is_reset(error: &io::Error) -> bool {
    match error.get_ref().and_then(|source| source.downcast_ref()) {
        Some(ConnectionFault::Aborted(code)) => code.is_reset(),
        // The peer's process ended, or the device failed. The kind of the error does not show this difference.
        Some(_) => false,
        None => matches!(
            error.kind(),
            io::ErrorKind::ConnectionReset | io::ErrorKind::ConnectionAborted | io::ErrorKind::BrokenPipe
        ),
    }
}

/// Carries bytes both ways until both directions have ended. Resets both streams after an error and when dropped.
pub(crate) async fn relay(mut client: Stream, mut target: Stream, meters: &Meters) -> Result<(), Cut> {
    let open = meters.opened(client.carried_by(), target.carried_by());
    let mut up = Pump::new(meters.up.clone());
    let mut down = Pump::new(meters.down.clone());
    let carried = poll_fn(|context| {
        let up = up.poll(context, &mut client, &mut target).map_err(RelayError::Up)?;
        let down = down.poll(context, &mut target, &mut client).map_err(RelayError::Down)?;
        if up.is_ready() && down.is_ready() {
            return Poll::Ready(Ok(()));
        }
        watch(context, &mut client, &mut target)?;
        Poll::Pending
    });
    let carried = carried.await;
    let client_ended = up.has_read_all();
    let carried = match carried {
        Ok(()) => poll_fn(|context| delivered(context, &mut client, &mut target)).await,
        Err(error) => Err(error),
    };
    match carried {
        Ok(()) => {
            drop(open);
            client.close();
            target.close();
            Ok(())
        }
        Err(error) => {
            let reason = error.reason(client_ended);
            meters.failed(reason);
            Err(Cut { reason, error })
        }
    }
}

/// Finds a stream that failed while both of its directions were idle.
fn watch(context: &mut Context<'_>, client: &mut Stream, target: &mut Stream) -> Result<(), RelayError> {
    let _: Poll<()> = client.poll_delivered(context).map_err(RelayError::Client)?;
    let _: Poll<()> = target.poll_delivered(context).map_err(RelayError::Target)?;
    Ok(())
}

/// Waits, after the end of both directions, until both peers have received everything.
fn delivered(
    context: &mut Context<'_>,
    client: &mut Stream,
    target: &mut Stream,
) -> Poll<Result<(), RelayError>> {
    let client = client.poll_delivered(context).map_err(RelayError::Client)?;
    let target = target.poll_delivered(context).map_err(RelayError::Target)?;
    if client.is_ready() && target.is_ready() { Poll::Ready(Ok(())) } else { Poll::Pending }
}

#[cfg(test)]
mod tests {
    use super::*;
    use io::ErrorKind::{BrokenPipe, ConnectionReset, TimedOut};
    use tonic_rdma::internal::protocol::AbortCode;

    #[test]
    fn a_client_that_leaves_is_distinguished_from_a_failure() {
        let fault = |fault: ConnectionFault| io::Error::from(fault);
        let lost = || fault(ConnectionFault::PeerLost("killed".into()));
        let reset = || fault(ConnectionFault::Aborted(AbortCode::RESET));
        let violation = fault(ConnectionFault::Aborted(AbortCode::VIOLATION));
        assert_eq!(lost().kind(), ConnectionReset);
        for (error, reason, after_the_client) in [
            (RelayError::Up(Broken::Reading(ConnectionReset.into())), Failed::Reset, Failed::Reset),
            (RelayError::Down(Broken::Writing(BrokenPipe.into())), Failed::Reset, Failed::Reset),
            (RelayError::Client(reset()), Failed::Reset, Failed::Reset),
            (RelayError::Up(Broken::Reading(TimedOut.into())), Failed::Broken, Failed::Broken),
            (RelayError::Up(Broken::Reading(lost())), Failed::Broken, Failed::Broken),
            (RelayError::Client(violation), Failed::Broken, Failed::Broken),
            (RelayError::Down(Broken::Reading(ConnectionReset.into())), Failed::Broken, Failed::Reset),
            (RelayError::Up(Broken::Writing(BrokenPipe.into())), Failed::Broken, Failed::Reset),
            (RelayError::Target(reset()), Failed::Broken, Failed::Reset),
            (RelayError::Target(lost()), Failed::Broken, Failed::Broken),
        ] {
            assert_eq!((error.reason(false), error.reason(true)), (reason, after_the_client), "{error}");
        }
    }
}
