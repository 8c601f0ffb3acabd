//! One direction of a connection: reads from one stream, writes to the other, and passes the end on.

use std::cell::RefCell;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use metrics::Counter;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::stream::Stream;

/// Bytes of a buffer: the most that one read takes.
const LENGTH: usize = 256 * 1024;

/// The number of free buffers that a thread keeps.
const KEPT: usize = 64;

thread_local! {
    /// Buffers without a connection. A connection has a buffer for each direction only while bytes are in it. So idle connections cost no
    /// memory, and busy ones reuse buffers that are still in the processor's cache.
    static FREE: RefCell<Vec<Box<[u8]>>> = const { RefCell::new(Vec::new()) };
}

/// The state of one direction. The direction holds a buffer only while bytes are in it. While the writer takes nothing, the pump
/// reads nothing, so that the sender is blocked too.
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
pub(crate) enum Broken {
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
    ) -> Poll<Result<(), Broken>> {
        for _ in 0..Self::BUFFERS_PER_POLL {
            if self.stage == Stage::Carrying {
                ready!(self.poll_write(context, to)).map_err(Broken::Writing)?;
                match self.poll_read(context, from).map_err(Broken::Reading)? {
                    Poll::Ready(()) => continue,
                    Poll::Pending => {
                        ready!(self.poll_flush(context, to)).map_err(Broken::Writing)?;
                        return Poll::Pending;
                    }
                }
            }
            if self.stage == Stage::Ending {
                ready!(Pin::new(&mut *to).poll_shutdown(context)).map_err(Broken::Writing)?;
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
