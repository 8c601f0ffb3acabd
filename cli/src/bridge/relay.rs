//! One connection, from the client's arrival to the end of both directions.

use std::future::poll_fn;
use std::io;
use std::task::{Context, Poll};

use tonic_rdma::ConnectionFault;

use super::meters::{Failed, Meters};
use super::pump::{Broken, Pump};
use super::stream::Stream;

/// Why a connection ended before its time.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Ended {
    #[error("from client to target, {0}")]
    Up(Broken),
    #[error("from target to client, {0}")]
    Down(Broken),
    #[error("the client's end failed: {0}")]
    Client(io::Error),
    #[error("the target's end failed: {0}")]
    Target(io::Error),
}

/// A connection that ended with a reset of both ends.
#[derive(Debug)]
pub(crate) struct Cut {
    /// What it counts as.
    pub(crate) reason: Failed,
    pub(crate) error: Ended,
}

impl Ended {
    /// Tells what a client does that leaves from what fails; `client_ended` where the client had said all before.
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

/// Returns whether the other end reset the connection, as far as its system or device says so.
fn is_reset(error: &io::Error) -> bool {
    match error.get_ref().and_then(|source| source.downcast_ref()) {
        Some(ConnectionFault::Aborted(code)) => code.is_reset(),
        // Its process ended, the device failed: kinds of error tell less than this.
        Some(_) => false,
        None => matches!(
            error.kind(),
            io::ErrorKind::ConnectionReset | io::ErrorKind::ConnectionAborted | io::ErrorKind::BrokenPipe
        ),
    }
}

/// Carries bytes both ways until both directions have ended. After an error, and when dropped, both ends are reset.
pub(crate) async fn relay(mut client: Stream, mut target: Stream, meters: &Meters) -> Result<(), Cut> {
    let open = meters.opened(client.carried_by(), target.carried_by());
    let mut up = Pump::new(meters.up.clone());
    let mut down = Pump::new(meters.down.clone());
    let carried = poll_fn(|context| {
        let up = up.poll(context, &mut client, &mut target).map_err(Ended::Up)?;
        let down = down.poll(context, &mut target, &mut client).map_err(Ended::Down)?;
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
        Err(ended) => Err(ended),
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

/// Hears of an end that failed while neither of its directions had anything to do.
fn watch(context: &mut Context<'_>, client: &mut Stream, target: &mut Stream) -> Result<(), Ended> {
    let _: Poll<()> = client.poll_delivered(context).map_err(Ended::Client)?;
    let _: Poll<()> = target.poll_delivered(context).map_err(Ended::Target)?;
    Ok(())
}

/// Both directions have ended; what was written may still be on its way.
fn delivered(context: &mut Context<'_>, client: &mut Stream, target: &mut Stream) -> Poll<Result<(), Ended>> {
    let client = client.poll_delivered(context).map_err(Ended::Client)?;
    let target = target.poll_delivered(context).map_err(Ended::Target)?;
    if client.is_ready() && target.is_ready() { Poll::Ready(Ok(())) } else { Poll::Pending }
}

#[cfg(test)]
mod tests {
    use super::*;
    use io::ErrorKind::{BrokenPipe, ConnectionReset, TimedOut};
    use tonic_rdma::internal::protocol::AbortCode;

    #[test]
    fn what_a_client_does_is_told_from_what_fails() {
        let fault = |fault: ConnectionFault| io::Error::from(fault);
        let lost = || fault(ConnectionFault::PeerLost("killed".into()));
        let reset = || fault(ConnectionFault::Aborted(AbortCode::RESET));
        let violation = fault(ConnectionFault::Aborted(AbortCode::VIOLATION));
        assert_eq!(lost().kind(), ConnectionReset);
        for (ended, reason, after_the_client) in [
            (Ended::Up(Broken::Reading(ConnectionReset.into())), Failed::Reset, Failed::Reset),
            (Ended::Down(Broken::Writing(BrokenPipe.into())), Failed::Reset, Failed::Reset),
            (Ended::Client(reset()), Failed::Reset, Failed::Reset),
            (Ended::Up(Broken::Reading(TimedOut.into())), Failed::Broken, Failed::Broken),
            (Ended::Up(Broken::Reading(lost())), Failed::Broken, Failed::Broken),
            (Ended::Client(violation), Failed::Broken, Failed::Broken),
            (Ended::Down(Broken::Reading(ConnectionReset.into())), Failed::Broken, Failed::Reset),
            (Ended::Up(Broken::Writing(BrokenPipe.into())), Failed::Broken, Failed::Reset),
            (Ended::Target(reset()), Failed::Broken, Failed::Reset),
            (Ended::Target(lost()), Failed::Broken, Failed::Broken),
        ] {
            assert_eq!((ended.reason(false), ended.reason(true)), (reason, after_the_client), "{ended}");
        }
    }
}
