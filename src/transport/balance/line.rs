//! A connection's life as the balancer has to know it: when the server was first heard of, and when it ended.

use std::error::Error;
use std::future::Future;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use http::Uri;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::Notify;
use tower_service::Service;

use crate::endpoint::EndpointStream;
use crate::endpoint::RdmaConnectInfo;
use crate::transport::RdmaConnector;

type BoxError = Box<dyn Error + Send + Sync>;

/// What happened to a connection so far.
#[derive(Debug, Default)]
pub(super) struct Line {
    info: Mutex<Option<RdmaConnectInfo>>,
    heard: Notify,
    over: AtomicBool,
    ended: Notify,
}

impl Line {
    /// Waits until the server's first bytes came, or the connection ended.
    pub(super) async fn heard(&self) {
        self.heard.notified().await;
    }

    /// Whether it ended, or is not to be used for further calls.
    pub(super) fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    /// Waits until it is over.
    pub(super) async fn ended(&self) {
        self.ended.notified().await;
    }

    /// What was negotiated, once it was connected.
    pub(super) fn info(&self) -> Option<RdmaConnectInfo> {
        self.info.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Ends it.
    pub(super) fn end(&self) {
        self.over.store(true, Ordering::Release);
        self.ended.notify_one();
        self.heard.notify_one();
    }
}

/// Makes the connection of one channel of tonic's, and tells its line.
///
/// tonic's channel dials anew for calls that reached it when its connection was no longer to be used. It may do so once,
/// for the calls that were under way to it when the server said GOAWAY; further attempts would not be held back by
/// anything, so they are refused. New calls don't come here any more: the first such attempt ends the line.
#[derive(Debug)]
pub(super) struct LineConnector {
    connector: RdmaConnector,
    line: Arc<Line>,
    dials: u32,
}

impl LineConnector {
    pub(super) fn new(connector: RdmaConnector, line: Arc<Line>) -> Self {
        Self { connector, line, dials: 0 }
    }
}

impl Service<Uri> for LineConnector {
    type Response = TokioIo<LineStream>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, BoxError>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.connector.poll_ready(context).map_err(Into::into)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        self.dials += 1;
        if self.dials > 1 {
            self.line.end();
        }
        if self.dials > 2 {
            return Box::pin(async { Err("the connection ended".into()) });
        }
        let (dial, line) = (self.connector.call(uri), Arc::clone(&self.line));
        Box::pin(async move {
            let stream = dial.await?;
            line.info
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .get_or_insert_with(|| stream.info().clone());
            Ok(TokioIo::new(LineStream { stream, line, heard: false }))
        })
    }
}

/// The byte stream of a line. hyper drops it when it has no further use for it.
#[derive(Debug)]
pub(super) struct LineStream {
    stream: EndpointStream,
    line: Arc<Line>,
    heard: bool,
}

impl Drop for LineStream {
    fn drop(&mut self) {
        self.line.end();
    }
}

impl AsyncRead for LineStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let polled = AsyncRead::poll_read(Pin::new(&mut self.stream), context, buffer);
        if !self.heard && buffer.filled().len() > before {
            self.heard = true;
            self.line.heard.notify_one();
        }
        polled
    }
}

impl AsyncWrite for LineStream {
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
