//! One of the two streams of a bridged connection, over TCP, a Unix socket or RDMA.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tonic_rdma::{EndpointStream, RdmaConnectInfo};

/// A stream that ends in order only by [`close`](Self::close). A drop ends the stream with a reset, because a
/// stream that was cut short must never look complete. On TCP a kill of the process also ends the stream with
/// a reset. (A Unix socket has no reset: the peer sees the end, or an error if it had written bytes that were
/// not read.)
#[derive(Debug)]
pub(crate) struct Stream {
    /// `None` only during a drop or a close.
    carrier: Option<Carrier>,
}

#[derive(Debug)]
enum Carrier {
    Tcp(TcpStream),
    Unix(UnixStream),
    Endpoint(Box<EndpointStream>),
}

impl Stream {
    /// Takes a TCP connection.
    ///
    /// # Errors
    /// The connection has ended already.
    pub(crate) fn tcp(stream: TcpStream) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        prepare(&stream)?;
        Ok(Self { carrier: Some(Carrier::Tcp(stream)) })
    }

    /// Takes a connection over a Unix socket.
    pub(crate) fn unix(stream: UnixStream) -> Self {
        Self { carrier: Some(Carrier::Unix(stream)) }
    }

    /// Takes a negotiated connection.
    ///
    /// # Errors
    /// The connection goes over TCP and has ended already.
    pub(crate) fn endpoint(mut stream: EndpointStream) -> io::Result<Self> {
        stream.read_greedily();
        stream.as_tcp().map_or(Ok(()), prepare)?;
        Ok(Self { carrier: Some(Carrier::Endpoint(Box::new(stream))) })
    }

    /// Returns the outcome of the negotiation, if there was one.
    pub(crate) fn negotiated(&self) -> Option<&RdmaConnectInfo> {
        match &self.carrier {
            Some(Carrier::Endpoint(stream)) => Some(stream.info()),
            _ => None,
        }
    }

    /// Returns the transport: `tcp`, `unix` or `rdma`.
    pub(crate) fn carried_by(&self) -> &'static str {
        match &self.carrier {
            Some(Carrier::Unix(_)) => "unix",
            Some(Carrier::Endpoint(stream)) if stream.as_tcp().is_none() => "rdma",
            _ => "tcp",
        }
    }

    /// Waits until the peer has received everything, after both directions were shut down. Before the
    /// shutdown, this function only reports failures.
    pub(crate) fn poll_delivered(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.carrier {
            Some(Carrier::Endpoint(stream)) => stream.poll_delivered(context),
            _ => Poll::Ready(Ok(())),
        }
    }

    /// Ends the stream in order.
    pub(crate) fn close(mut self) {
        let carrier = self.carrier.take();
        let tcp = match &carrier {
            Some(Carrier::Tcp(stream)) => Some(stream),
            Some(Carrier::Endpoint(stream)) => stream.as_tcp(),
            _ => None,
        };
        // The system sends the remaining data. The call fails only if the peer has reset the connection.
        tcp.map(|tcp| SockRef::from(tcp).set_linger(None)).transpose().ok();
    }

    fn io(&mut self) -> io::Result<Pin<&mut dyn Io>> {
        match &mut self.carrier {
            Some(Carrier::Tcp(stream)) => Ok(Pin::new(stream)),
            Some(Carrier::Unix(stream)) => Ok(Pin::new(stream)),
            Some(Carrier::Endpoint(stream)) => Ok(Pin::new(stream.as_mut())),
            None => Err(io::ErrorKind::NotConnected.into()),
        }
    }
}

/// What reads and writes bytes.
trait Io: AsyncRead + AsyncWrite + Unpin {}

impl<T: AsyncRead + AsyncWrite + Unpin> Io for T {}

/// Sets up a TCP connection: a reset at a drop, and keepalive probes that find a dead host.
fn prepare(stream: &TcpStream) -> io::Result<()> {
    const IDLE: Duration = Duration::from_secs(60);
    const INTERVAL: Duration = Duration::from_secs(10);
    const PROBES: u32 = 3;
    let socket = SockRef::from(stream);
    socket.set_linger(Some(Duration::ZERO))?;
    let keepalive = TcpKeepalive::new().with_time(IDLE).with_interval(INTERVAL).with_retries(PROBES);
    socket.set_tcp_keepalive(&keepalive)
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let Some(Carrier::Endpoint(stream)) = self.carrier.take() {
            stream.abort();
        }
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.io()?.poll_read(context, buffer)
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.io()?.poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.io()?.poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.io()?.poll_shutdown(context)
    }
}
