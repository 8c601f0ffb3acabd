//! Watches one connection for the balancer: the first bytes from the server, and the end of the connection.

use std::error::Error;
use std::future::Future;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use http::Uri;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::Notify;
use tower_service::Service;

use super::error::Ended;
use crate::endpoint::{EndpointStream, RdmaConnectInfo};
use tonic_rdma_verbs::internal::lock;

type BoxError = Box<dyn Error + Send + Sync>;

/// The state of a connection, shared by its byte stream and the balancer.
#[derive(Debug, Default)]
pub(super) struct ConnectionWatch {
    info: Mutex<Option<RdmaConnectInfo>>,
    first_bytes: Notify,
    is_ended: AtomicBool,
    ended: Notify,
}

impl ConnectionWatch {
    /// Waits until the server's first bytes arrive, or the connection ends.
    pub(super) async fn first_bytes(&self) {
        self.first_bytes.notified().await;
    }

    /// Returns true if the connection ended, or takes no further calls.
    pub(super) fn is_ended(&self) -> bool {
        self.is_ended.load(Ordering::Acquire)
    }

    /// Waits until the connection ends, or takes no further calls.
    pub(super) async fn ended(&self) {
        self.ended.notified().await;
    }

    /// Returns what was negotiated; `None` before the connection is made.
    pub(super) fn info(&self) -> Option<RdmaConnectInfo> {
        lock(&self.info).clone()
    }

    /// Marks the connection as ended.
    pub(super) fn end(&self) {
        self.is_ended.store(true, Ordering::Release);
        self.ended.notify_one();
        self.first_bytes.notify_one();
    }
}

/// Makes the connection of one channel of tonic's, and watches it.
///
/// tonic's channel dials again if it gets a call after its connection stopped taking calls. This connector allows one such dial, for the
/// calls that were on their way when the server sent GOAWAY. This second dial marks the connection as ended, so the balancer gives the
/// channel no new calls. The connector refuses all later dials, because no back-off would limit them.
#[derive(Debug)]
pub(super) struct WatchedConnector<C> {
    connector: C,
    watch: Arc<ConnectionWatch>,
    dials: u32,
}

impl<C> WatchedConnector<C> {
    pub(super) fn new(connector: C, watch: Arc<ConnectionWatch>) -> Self {
        Self { connector, watch, dials: 0 }
    }
}

impl<C> Service<Uri> for WatchedConnector<C>
where
    C: Service<Uri, Response = EndpointStream, Error: Into<BoxError>, Future: Send + 'static>,
{
    type Response = TokioIo<WatchedStream>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, BoxError>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.connector.poll_ready(context).map_err(Into::into)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        self.dials += 1;
        if self.dials > 1 {
            self.watch.end();
        }
        if self.dials > 2 {
            return Box::pin(async { Err(Ended.into()) });
        }
        let (dial, watch) = (self.connector.call(uri), Arc::clone(&self.watch));
        Box::pin(async move {
            let stream = dial.await.map_err(Into::into)?;
            lock(&watch.info).get_or_insert_with(|| stream.info().clone());
            Ok(TokioIo::new(WatchedStream { stream, watch, received: false }))
        })
    }
}

/// The byte stream of a watched connection. hyper drops it when the connection ends.
#[derive(Debug)]
pub(super) struct WatchedStream {
    stream: EndpointStream,
    watch: Arc<ConnectionWatch>,
    received: bool,
}

impl Drop for WatchedStream {
    fn drop(&mut self) {
        self.watch.end();
    }
}

impl AsyncRead for WatchedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let polled = AsyncRead::poll_read(Pin::new(&mut self.stream), context, buffer);
        if !self.received && buffer.filled().len() > before {
            self.received = true;
            self.watch.first_bytes.notify_one();
        }
        polled
    }
}

impl AsyncWrite for WatchedStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        AsyncWrite::poll_write(Pin::new(&mut self.stream), context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        AsyncWrite::poll_write_vectored(Pin::new(&mut self.stream), context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        AsyncWrite::poll_flush(Pin::new(&mut self.stream), context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        AsyncWrite::poll_shutdown(Pin::new(&mut self.stream), context)
    }
}
