//! Byte streams: over RDMA, over TCP, and the one type that is either.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::{Buf, Bytes};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use super::connection::Connection;
use super::fault::ConnectionFault;
use super::info::RdmaConnectInfo;
use crate::protocol::AbortCode;

/// A connection that negotiation led to: RDMA, or the TCP connection that it fell back to. Bytes arrive as they were
/// written, in order; each direction closes by itself, as TCP's do. Implements tokio's and hyper's IO traits.
#[derive(Debug)]
pub struct EndpointStream {
    inner: Inner,
    info: RdmaConnectInfo,
    /// Whether something has been read.
    has_begun: bool,
}

#[derive(Debug)]
enum Inner {
    Rdma(RdmaHalf),
    Tcp(TcpIo),
}

impl EndpointStream {
    pub(crate) fn rdma(connection: Arc<Connection>, info: RdmaConnectInfo) -> Self {
        Self { inner: Inner::Rdma(RdmaHalf { connection }), info, has_begun: false }
    }

    pub(crate) fn tcp(stream: TcpStream, received: Bytes, info: RdmaConnectInfo) -> Self {
        Self { inner: Inner::Tcp(TcpIo { received, stream }), info, has_begun: false }
    }

    /// Returns what was negotiated, and why.
    pub fn info(&self) -> &RdmaConnectInfo {
        &self.info
    }

    /// Returns the TCP connection that carries the stream, for its socket options. `None` over RDMA.
    pub fn as_tcp(&self) -> Option<&TcpStream> {
        match &self.inner {
            Inner::Rdma(_) => None,
            Inner::Tcp(tcp) => Some(&tcp.stream),
        }
    }

    /// Lets reads take as much as there is, for a reader that only passes bytes on. Without this a task that reads small
    /// messages lets others run every few hundred bytes, which suits HTTP/2 best.
    pub fn read_greedily(&mut self) {
        if let Inner::Rdma(half) = &self.inner {
            half.connection.read_greedily();
        }
    }

    /// Waits until both directions were shut down and the peer has taken all that was written; a stream dropped then
    /// leaves nothing undone. On TCP it is ready at once, as the system takes care of that.
    ///
    /// # Errors
    /// The connection failed before.
    pub fn poll_delivered(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &self.inner {
            Inner::Rdma(half) => half.connection.poll_delivered(context),
            Inner::Tcp(_) => Poll::Ready(Ok(())),
        }
    }

    /// Ends the connection so that the peer sees an error and not the end of the stream, whatever was written before. A stream
    /// that is merely dropped ends as if all had been written.
    pub fn abort(self) {
        match &self.inner {
            Inner::Rdma(half) => half.connection.abort(AbortCode::RESET, ConnectionFault::Closed),
            // Closing sends a reset then. On a socket that is not connected any more there is nobody to tell.
            Inner::Tcp(tcp) => drop(tcp.stream.set_zero_linger()),
        }
    }
}

/// Holds the connection in use; dropping it closes both directions.
#[derive(Debug)]
struct RdmaHalf {
    connection: Arc<Connection>,
}

impl Drop for RdmaHalf {
    fn drop(&mut self) {
        self.connection.detach();
    }
}

/// A TCP connection of which the first bytes were already received.
#[derive(Debug)]
struct TcpIo {
    received: Bytes,
    stream: TcpStream,
}

impl AsyncRead for EndpointStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let polled = self.inner.poll_read(context, buffer);
        if !self.has_begun
            && let Some(first) = buffer.filled().get(before)
        {
            self.has_begun = true;
            self.info.first_byte.set(*first);
        }
        polled
    }
}

impl Inner {
    fn poll_read(&mut self, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self {
            Self::Rdma(half) => half.connection.poll_read(context, buffer),
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
            Inner::Rdma(half) => half.connection.poll_write(context, slices),
            Inner::Tcp(tcp) => Pin::new(&mut tcp.stream).poll_write_vectored(context, slices),
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.inner {
            Inner::Rdma(half) => half.connection.poll_flush(context),
            Inner::Tcp(tcp) => Pin::new(&mut tcp.stream).poll_flush(context),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.inner {
            Inner::Rdma(half) => half.connection.poll_shutdown(context),
            Inner::Tcp(tcp) => Pin::new(&mut tcp.stream).poll_shutdown(context),
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
