//! The byte stream of a connection, over RDMA or over TCP.

use std::io::{self, IoSlice};
use std::os::fd::AsFd as _;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes};
use hyper_util::rt::TokioIo;
use rustix::net::sockopt;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::coop::poll_proceed;
use tokio::time::timeout;

use super::connection::{ByteStream, Connection};
use super::error::ConnectionFault;
use super::info::RdmaConnectInfo;
use super::meters::{OpenConnection, OpenHandle};
use super::polling::{OwnQueue, Wait};
use crate::protocol::AbortCode;

/// A connection after its negotiation: RDMA, or TCP as the fallback. Bytes arrive as they were written, in
/// order. Each direction closes independently, as with TCP. Implements tokio's and hyper's IO traits.
///
/// ```
/// use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
/// use tonic_rdma::EndpointStream;
///
/// async fn echo(mut stream: EndpointStream) -> std::io::Result<()> {
///     let mut bytes = [0; 4096];
///     loop {
///         match stream.read(&mut bytes).await? {
///             0 => return stream.shutdown().await,
///             count => stream.write_all(&bytes[..count]).await?,
///         }
///     }
/// }
/// ```
#[derive(Debug)]
pub struct EndpointStream {
    inner: Inner,
    info: RdmaConnectInfo,
    /// The first byte has been read.
    has_read: bool,
}

#[derive(Debug)]
enum Inner {
    Rdma(RdmaIo),
    Tcp(TcpIo),
}

impl EndpointStream {
    pub(super) fn rdma(
        connection: Arc<Connection<ByteStream>>,
        own: Option<Arc<OwnQueue>>,
        info: RdmaConnectInfo,
        opened: OpenHandle,
    ) -> Self {
        let rdma = RdmaIo { connection, own, opened };
        Self { inner: Inner::Rdma(rdma), info, has_read: false }
    }

    pub(super) fn tcp(
        stream: TcpStream,
        received: Bytes,
        info: RdmaConnectInfo,
        opened: Arc<OpenConnection>,
        linger: Duration,
    ) -> Self {
        let runtime = Handle::current();
        let tcp = TcpIo { received, stream, linger, is_shut_down: false, runtime, opened };
        Self { inner: Inner::Tcp(tcp), info, has_read: false }
    }

    /// Returns the result of the negotiation, and its reason.
    pub fn info(&self) -> &RdmaConnectInfo {
        &self.info
    }

    /// Returns the result of the negotiation, to add to its reason.
    pub(crate) fn info_mut(&mut self) -> &mut RdmaConnectInfo {
        &mut self.info
    }

    /// Returns the TCP connection that carries the stream, for its socket options. `None` over RDMA.
    pub fn as_tcp(&self) -> Option<&TcpStream> {
        match &self.inner {
            Inner::Rdma(_) => None,
            Inner::Tcp(tcp) => Some(&tcp.stream),
        }
    }

    /// Returns the queue that the connection has for itself.
    #[cfg(test)]
    pub(crate) fn own_queue(&self) -> Option<&Arc<OwnQueue>> {
        match &self.inner {
            Inner::Rdma(rdma) => rdma.own.as_ref(),
            Inner::Tcp(_) => None,
        }
    }

    /// Lets reads take all bytes that have arrived. Use this for a reader that only passes bytes on. By
    /// default, a task that reads small messages lets other tasks run after every few hundred bytes, which
    /// suits HTTP/2 best.
    pub fn read_greedily(&mut self) {
        if let Inner::Rdma(rdma) = &self.inner {
            rdma.connection.read_greedily();
        }
    }

    /// Waits until both directions are closed and the peer has received all written bytes. On TCP this is
    /// ready at once: a stream that was shut down and then dropped delivers its bytes while its runtime runs.
    /// A process that ends sooner first reads the peer's end of the stream.
    ///
    /// # Errors
    /// The connection failed before.
    pub fn poll_delivered(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &self.inner {
            Inner::Rdma(rdma) => {
                rdma.until(Wait::Delivery, context, |connection| connection.poll_delivered(context))
            }
            Inner::Tcp(_) => Poll::Ready(Ok(())),
        }
    }

    /// Ends the connection so that the peer sees an error instead of the end of the stream. For the peer of a
    /// stream that is only dropped, the stream ends in good order.
    pub fn abort(self) {
        match &self.inner {
            Inner::Rdma(rdma) => rdma.connection.abort(AbortCode::RESET, ConnectionFault::Closed),
            // With this option, dropping the socket sends a reset. The call fails only on a socket without a
            // peer.
            Inner::Tcp(tcp) => drop(tcp.stream.set_zero_linger()),
        }
    }

    /// Keeps `held` until the connection has ended, which is after the end of this stream while bytes are on
    /// their way.
    pub(crate) fn hold(&self, held: watch::Receiver<()>) {
        match &self.inner {
            Inner::Rdma(rdma) => rdma.opened.hold(held),
            Inner::Tcp(tcp) => tcp.opened.hold(held),
        }
    }
}

impl Drop for EndpointStream {
    /// Closes both directions.
    fn drop(&mut self) {
        if let Inner::Rdma(rdma) = &self.inner {
            if let Some(own) = &rdma.own {
                own.leave_to_supervisor();
            }
            rdma.connection.detach();
        }
    }
}

/// A connection over RDMA.
#[derive(Debug)]
struct RdmaIo {
    connection: Arc<Connection<ByteStream>>,
    /// The queue, if the connection has one for itself. The tasks that wait for the connection poll it.
    own: Option<Arc<OwnQueue>>,
    opened: OpenHandle,
}

impl RdmaIo {
    fn poll_flush(&self, context: &Context<'_>) -> Poll<io::Result<()>> {
        let waits = ready!(self.until(Wait::Write, context, |connection| connection.poll_flush(context)))?;
        if waits && let Some(own) = &self.own {
            own.expect();
        }
        Poll::Ready(Ok(()))
    }

    /// Calls `check` until it returns a value or nothing more has arrived.
    fn until<T>(
        &self,
        wait: Wait,
        context: &Context<'_>,
        mut check: impl FnMut(&Connection<ByteStream>) -> Poll<T>,
    ) -> Poll<T> {
        match &self.own {
            Some(own) => own.poll_until(wait, context.waker(), || check(&self.connection)),
            None => check(&self.connection),
        }
    }
}

/// A TCP connection whose first bytes were already received.
#[derive(Debug)]
struct TcpIo {
    received: Bytes,
    stream: TcpStream,
    /// Longest time that the connection goes on after a shutdown and a drop.
    linger: Duration,
    is_shut_down: bool,
    /// The runtime that made the connection. The stream may be dropped outside of it.
    runtime: Handle,
    opened: Arc<OpenConnection>,
}

/// The system resets a closed socket to which the peer still writes, and drops what it has not sent. HTTP/2 ends
/// with such writes: the receiver of a long response makes room for more. So a task takes them until the peer
/// has closed, too.
impl Drop for TcpIo {
    fn drop(&mut self) {
        let resets = || matches!(sockopt::socket_linger(&self.stream), Ok(Some(Duration::ZERO)));
        if !self.is_shut_down || resets() {
            return;
        }
        // Without a descriptor, the socket closes as the system closes it.
        let Ok(socket) = self.stream.as_fd().try_clone_to_owned() else { return };
        let (linger, opened) = (self.linger, Arc::clone(&self.opened));
        self.runtime.spawn(async move {
            let Ok(mut stream) = TcpStream::from_std(socket.into()) else { return };
            let _ = timeout(linger, tokio::io::copy(&mut stream, &mut tokio::io::sink())).await;
            drop(opened);
        });
    }
}

impl AsyncRead for EndpointStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let polled = self.inner.poll_read(context, buffer);
        if !self.has_read
            && let Some(first) = buffer.filled().get(before)
        {
            self.has_read = true;
            self.info.first_byte().set(*first);
        }
        polled
    }
}

impl Inner {
    fn poll_read(&mut self, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self {
            Self::Rdma(rdma) => in_turn(context, |context| {
                let mut read = |connection: &Connection<ByteStream>| connection.poll_read(context, buffer);
                match rdma.until(Wait::Read, context, &mut read) {
                    Poll::Ready(read) => read,
                    Poll::Pending => Poll::Pending,
                }
            }),
            Self::Tcp(tcp) if !tcp.received.is_empty() => {
                let count = tcp.received.len().min(buffer.remaining());
                buffer.put_slice(&tcp.received[..count]);
                tcp.received.advance(count);
                Poll::Ready(Ok(()))
            }
            Self::Tcp(tcp) => Pin::new(&mut tcp.stream).poll_read(context, buffer),
        }
    }
}

/// Does one step of a task, unless the task has used up its turn: then other tasks of the thread run first,
/// as with tokio's own streams. A step that has to wait takes nothing of the turn.
fn in_turn<T>(context: &mut Context<'_>, step: impl FnOnce(&Context<'_>) -> Poll<T>) -> Poll<T> {
    let turn = ready!(poll_proceed(context));
    let done = step(context);
    if done.is_ready() {
        turn.made_progress();
    }
    done
}

impl AsyncWrite for EndpointStream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        AsyncWrite::poll_write_vectored(self, context, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match &mut self.inner {
            Inner::Rdma(rdma) => in_turn(context, |context| {
                rdma.until(Wait::Write, context, |connection| connection.poll_write(context, slices))
            }),
            Inner::Tcp(tcp) => Pin::new(&mut tcp.stream).poll_write_vectored(context, slices),
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.inner {
            Inner::Rdma(rdma) => rdma.poll_flush(context),
            Inner::Tcp(tcp) => Pin::new(&mut tcp.stream).poll_flush(context),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.inner {
            Inner::Rdma(rdma) => {
                rdma.until(Wait::Write, context, |connection| connection.poll_shutdown(context))
            }
            Inner::Tcp(tcp) => {
                ready!(Pin::new(&mut tcp.stream).poll_shutdown(context))?;
                tcp.is_shut_down = true;
                Poll::Ready(Ok(()))
            }
        }
    }
}

impl hyper::rt::Read for EndpointStream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: hyper::rt::ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        hyper::rt::Read::poll_read(Pin::new(&mut TokioIo::new(self.get_mut())), context, buffer)
    }
}

impl hyper::rt::Write for EndpointStream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        AsyncWrite::poll_write(self, context, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        AsyncWrite::poll_write_vectored(self, context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        AsyncWrite::poll_flush(self, context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        AsyncWrite::poll_shutdown(self, context)
    }
}
