//! One connection, from the client's arrival to the end of both directions.

use std::cell::RefCell;
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use metrics::Counter;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tonic_rdma::{RdmaError, RdmaErrorKind};

use super::meters::{Meters, ResetReason};
use super::stream::Stream;

/// The error that ended a connection early.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RelayError {
    /// The direction from the client to the target.
    #[error("from client to target, {0}")]
    Up(PumpError),
    /// The direction from the target to the client.
    #[error("from target to client, {0}")]
    Down(PumpError),
    /// The client's stream, while both directions were idle.
    #[error("the client's end failed: {0}")]
    Client(io::Error),
    /// The target's stream, while both directions were idle.
    #[error("the target's end failed: {0}")]
    Target(io::Error),
}

/// The end of a connection whose two streams were reset.
#[derive(Debug)]
pub(crate) struct ResetConnection {
    /// The reason under which the connection is counted.
    pub(crate) reason: ResetReason,
    pub(crate) error: RelayError,
}

impl RelayError {
    /// Returns [`ResetReason::Reset`] for a client that left, and [`ResetReason::Broken`] for a failure.
    /// `client_ended` says that the client had sent its end of data before.
    fn reason(&self, client_ended: bool) -> ResetReason {
        let (error, ordinary) = match self {
            Self::Up(PumpError::Reading(error))
            | Self::Down(PumpError::Writing(error))
            | Self::Client(error) => (error, true),
            Self::Up(PumpError::Writing(error))
            | Self::Down(PumpError::Reading(error))
            | Self::Target(error) => (error, client_ended),
        };
        if ordinary && is_reset(error) { ResetReason::Reset } else { ResetReason::Broken }
    }
}

/// Returns whether the other end reset the connection, according to the system or the device.
fn is_reset(error: &io::Error) -> bool {
    match error.get_ref().and_then(|source| source.downcast_ref()).map(RdmaError::kind) {
        // The peer's process ended, or the device failed. The kind of the `io::Error` does not show this
        // difference.
        Some(kind) => kind == RdmaErrorKind::Reset,
        None => matches!(
            error.kind(),
            io::ErrorKind::ConnectionReset | io::ErrorKind::ConnectionAborted | io::ErrorKind::BrokenPipe
        ),
    }
}

/// Carries bytes both ways until both directions have ended. Resets both streams after an error and when
/// dropped.
pub(crate) async fn relay(
    mut client: Stream,
    mut target: Stream,
    meters: &Meters,
) -> Result<(), ResetConnection> {
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
            Err(ResetConnection { reason, error })
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

/// Bytes of a buffer: the most that one read takes.
const LENGTH: usize = 256 * 1024;

/// The number of free buffers that a thread keeps.
const KEPT: usize = 64;

thread_local! {
    /// Buffers without a connection. A connection has a buffer for each direction only while bytes are in it.
    /// So idle connections cost no memory, and busy ones reuse buffers that are still in the processor's
    /// cache.
    static FREE: RefCell<Vec<Box<[u8]>>> = const { RefCell::new(Vec::new()) };
}

/// One direction: reads from one stream, writes to the other, and passes the end on. The direction holds a
/// buffer only while bytes are in it. While the writer takes nothing, the pump reads nothing, so that the
/// sender is blocked too.
#[derive(Debug)]
pub(crate) struct Pump {
    buffer: Option<Box<[u8]>>,
    /// The range of the buffer that is still to be written.
    start: usize,
    end: usize,
    stage: Stage,
    /// Whether bytes were written since the last flush.
    unflushed: bool,
    carried: Counter,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Carrying,
    /// The reader has ended, and the pump shuts the writer down.
    Ending,
    Ended,
}

/// The half of a pump that failed, and the error.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PumpError {
    /// Reading from one stream.
    #[error("reading: {0}")]
    Reading(io::Error),
    /// Writing to the other stream.
    #[error("writing: {0}")]
    Writing(io::Error),
}

impl Pump {
    /// Buffers to move in one poll, so that other tasks can run.
    const BUFFERS_PER_POLL: usize = 16;

    /// Creates a direction that counts its bytes in `carried`.
    pub(crate) fn new(carried: Counter) -> Self {
        Self { buffer: None, start: 0, end: 0, stage: Stage::Carrying, unflushed: false, carried }
    }

    /// Returns whether the reader has reached its end.
    pub(crate) fn has_read_all(&self) -> bool {
        self.stage != Stage::Carrying
    }

    /// Carries bytes until the reader has ended and the writer is shut down.
    pub(crate) fn poll(
        &mut self,
        context: &mut Context<'_>,
        from: &mut Stream,
        to: &mut Stream,
    ) -> Poll<Result<(), PumpError>> {
        for _ in 0..Self::BUFFERS_PER_POLL {
            if self.stage == Stage::Carrying {
                ready!(self.poll_write(context, to)).map_err(PumpError::Writing)?;
                match self.poll_read(context, from).map_err(PumpError::Reading)? {
                    Poll::Ready(()) => continue,
                    Poll::Pending => {
                        ready!(self.poll_flush(context, to)).map_err(PumpError::Writing)?;
                        return Poll::Pending;
                    }
                }
            }
            if self.stage == Stage::Ending {
                ready!(Pin::new(&mut *to).poll_shutdown(context)).map_err(PumpError::Writing)?;
                self.stage = Stage::Ended;
            }
            return Poll::Ready(Ok(()));
        }
        context.waker().wake_by_ref();
        Poll::Pending
    }

    /// Fills the empty buffer, or notes the end of the reader.
    fn poll_read(&mut self, context: &mut Context<'_>, from: &mut Stream) -> Poll<io::Result<()>> {
        let mut buffer = self.buffer.take().unwrap_or_else(take_buffer);
        let mut space = ReadBuf::new(&mut buffer);
        let read = Pin::new(from).poll_read(context, &mut space);
        let count = space.filled().len();
        if !matches!(read, Poll::Ready(Ok(()))) || count == 0 {
            give_buffer(buffer);
            ready!(read)?;
            self.stage = Stage::Ending;
            return Poll::Ready(Ok(()));
        }
        (self.buffer, self.start, self.end) = (Some(buffer), 0, count);
        Poll::Ready(Ok(()))
    }

    /// Writes the whole buffer and gives it back.
    fn poll_write(&mut self, context: &mut Context<'_>, to: &mut Stream) -> Poll<io::Result<()>> {
        let Some(buffer) = &self.buffer else { return Poll::Ready(Ok(())) };
        while self.start < self.end {
            let count = ready!(Pin::new(&mut *to).poll_write(context, &buffer[self.start..self.end]))?;
            if count == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.start += count;
            self.carried.increment(count as u64);
            self.unflushed = true;
        }
        self.buffer.take().into_iter().for_each(give_buffer);
        Poll::Ready(Ok(()))
    }

    fn poll_flush(&mut self, context: &mut Context<'_>, to: &mut Stream) -> Poll<io::Result<()>> {
        if self.unflushed {
            ready!(Pin::new(to).poll_flush(context))?;
            self.unflushed = false;
        }
        Poll::Ready(Ok(()))
    }
}

impl Drop for Pump {
    fn drop(&mut self) {
        self.buffer.take().into_iter().for_each(give_buffer);
    }
}

/// Takes the buffer that this thread used last, or makes a new one.
fn take_buffer() -> Box<[u8]> {
    let free = FREE.with_borrow_mut(Vec::pop);
    free.unwrap_or_else(|| vec![0; LENGTH].into_boxed_slice())
}

/// Gives a buffer back.
fn give_buffer(buffer: Box<[u8]>) {
    FREE.with_borrow_mut(|free| {
        if free.len() < KEPT {
            free.push(buffer);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use io::ErrorKind::{BrokenPipe, ConnectionReset, TimedOut};

    #[test]
    fn a_client_that_leaves_is_distinguished_from_a_failure() {
        let fault = |kind, of| io::Error::new(kind, RdmaError::new(of, "killed"));
        let lost = || fault(ConnectionReset, RdmaErrorKind::PeerLost);
        let reset = || fault(io::ErrorKind::ConnectionAborted, RdmaErrorKind::Reset);
        let violation = fault(io::ErrorKind::ConnectionAborted, RdmaErrorKind::Protocol);
        for (error, reason, after_the_client) in [
            (
                RelayError::Up(PumpError::Reading(ConnectionReset.into())),
                ResetReason::Reset,
                ResetReason::Reset,
            ),
            (RelayError::Down(PumpError::Writing(BrokenPipe.into())), ResetReason::Reset, ResetReason::Reset),
            (RelayError::Client(reset()), ResetReason::Reset, ResetReason::Reset),
            (RelayError::Up(PumpError::Reading(TimedOut.into())), ResetReason::Broken, ResetReason::Broken),
            (RelayError::Up(PumpError::Reading(lost())), ResetReason::Broken, ResetReason::Broken),
            (RelayError::Client(violation), ResetReason::Broken, ResetReason::Broken),
            (
                RelayError::Down(PumpError::Reading(ConnectionReset.into())),
                ResetReason::Broken,
                ResetReason::Reset,
            ),
            (RelayError::Up(PumpError::Writing(BrokenPipe.into())), ResetReason::Broken, ResetReason::Reset),
            (RelayError::Target(reset()), ResetReason::Broken, ResetReason::Reset),
            (RelayError::Target(lost()), ResetReason::Broken, ResetReason::Broken),
        ] {
            assert_eq!((error.reason(false), error.reason(true)), (reason, after_the_client), "{error}");
        }
    }
}
