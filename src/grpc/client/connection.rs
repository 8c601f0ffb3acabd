//! A connection to one endpoint: native calls, or HTTP/2.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use http::Uri;
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio::time::timeout;
use tonic::transport::Endpoint;
use tower_service::Service;

use super::error::Failure;
use super::probe::{self, EndpointTimeout, Origin};
use crate::endpoint::{ConnectError, Dialer, EndpointStream, Negotiated, RdmaConnectInfo};
use crate::grpc::calls::CallConfig;
use crate::grpc::session::Session;
use crate::transport::balance::connection::EndpointConnection;
use tonic_rdma_verbs::internal::lock;

/// What the connections of a channel have in common.
#[derive(Debug)]
pub(super) struct Dialling {
    pub(super) dialer: Dialer,
    pub(super) calls: CallConfig,
    /// The connection that was made last.
    pub(super) last: Mutex<Option<RdmaConnectInfo>>,
}

/// A connection to one endpoint.
#[derive(Debug)]
pub(super) enum Connection {
    Native(NativeConnection),
    Http2(Arc<EndpointConnection>),
}

/// A connection whose calls use no HTTP/2.
#[derive(Debug)]
pub(super) struct NativeConnection {
    pub(super) session: Arc<Session>,
    pub(super) terms: Arc<Terms>,
    _wakes: Wakes,
}

/// The task that wakes calls when their time-out becomes known. Dropping this ends the task.
#[derive(Debug)]
struct Wakes(AbortHandle);

impl Drop for Wakes {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// What each native call to an endpoint gets.
#[derive(Debug)]
pub(super) struct Terms {
    pub(super) origin: Origin,
    pub(super) timeout: Arc<EndpointTimeout>,
}

impl Connection {
    /// Connects to `endpoint`. `terms` are those of an earlier connection to the endpoint, if there was one.
    pub(super) async fn connect(
        endpoint: &Endpoint,
        dialling: &Arc<Dialling>,
        terms: Option<Arc<Terms>>,
    ) -> Result<Self, Failure> {
        dialling.calls.validate()?;
        let uri = endpoint.uri();
        let without = probe::is_tls(uri).then_some("TLS connections keep HTTP/2");
        let dial = dial(uri, dialling, without);
        let negotiated = match endpoint.get_connect_timeout() {
            None => dial.await?,
            Some(limit) => timeout(limit, dial).await.unwrap_or_else(|_| {
                Err(ConnectError::Timeout { authority: authority(uri), timeout: limit, failed: Vec::new() })
            })?,
        };
        match negotiated {
            Negotiated::Messages(endpoint_of_messages) => {
                let terms = match terms {
                    Some(terms) => terms,
                    None => Arc::new(Terms::of(endpoint).await),
                };
                *lock(&dialling.last) = Some(endpoint_of_messages.info().clone());
                let session = Session::client(endpoint_of_messages, &dialling.calls);
                let wakes = wake_calls(Arc::downgrade(&session), terms.timeout.changes());
                let wakes = Wakes(tokio::spawn(wakes).abort_handle());
                Ok(Self::Native(NativeConnection { session, terms, _wakes: wakes }))
            }
            Negotiated::Stream(stream) => {
                *lock(&dialling.last) = Some(stream.info().clone());
                let first = FirstStream { first: Some(stream), dialling: Arc::clone(dialling) };
                Ok(Self::Http2(Arc::new(EndpointConnection::connect(endpoint, first).await?)))
            }
        }
    }

    /// Returns what was negotiated.
    pub(super) fn info(&self) -> &RdmaConnectInfo {
        match self {
            Self::Native(native) => native.session.info(),
            Self::Http2(connection) => connection.info(),
        }
    }

    /// Returns the terms of native calls, if this connection has such calls.
    pub(super) fn terms(&self) -> Option<&Arc<Terms>> {
        match self {
            Self::Native(native) => Some(&native.terms),
            Self::Http2(_) => None,
        }
    }

    /// Returns whether calls on this connection use no HTTP/2.
    pub(super) fn is_native(&self) -> bool {
        matches!(self, Self::Native(_))
    }

    /// Returns whether the connection takes calls.
    pub(super) fn is_usable(&self) -> bool {
        match self {
            Self::Native(native) => native.session.is_usable(),
            Self::Http2(connection) => !connection.is_ended(),
        }
    }

    /// Returns the number of calls in flight.
    pub(super) fn load(&self) -> usize {
        match self {
            Self::Native(native) => native.session.active_streams(),
            Self::Http2(connection) => connection.load(),
        }
    }

    /// Waits until the connection has ended.
    pub(super) async fn ended(&self) {
        match self {
            // The calls that it ended have the reason.
            Self::Native(native) => drop(native.session.closed().await),
            Self::Http2(connection) => connection.ended().await,
        }
    }
}

impl Terms {
    async fn of(endpoint: &Endpoint) -> Self {
        let (origin, timeout) = probe::learn(endpoint).await;
        Self { origin, timeout: Arc::new(timeout) }
    }
}

/// Wakes the calls of a session when the time-out of their endpoint becomes known, so that they make their timers.
async fn wake_calls(session: Weak<Session>, mut timeout: watch::Receiver<Option<Duration>>) {
    while timeout.changed().await.is_ok() {
        match session.upgrade() {
            Some(session) => session.wake_readers(),
            None => return,
        }
    }
}

async fn dial(uri: &Uri, dialling: &Dialling, without: Option<&str>) -> Result<Negotiated, ConnectError> {
    let (host, port) = place(uri)?;
    dialling.dialer.dial_for_calls(host, port, without).await
}

/// Returns the host and the port of a URI.
fn place(uri: &Uri) -> Result<(&str, u16), ConnectError> {
    let host = uri.host().ok_or_else(|| ConnectError::NoHost(uri.to_string()))?;
    // An IPv6 address stands in brackets in a URI, and without them everywhere else.
    let host = host.trim_start_matches('[').trim_end_matches(']');
    Ok((host, uri.port_u16().unwrap_or(if probe::is_tls(uri) { 443 } else { 80 })))
}

fn authority(uri: &Uri) -> String {
    place(uri).map_or_else(|_| uri.to_string(), |(host, port)| format!("{host}:{port}"))
}

/// The connector of a connection with HTTP/2: its first stream is the one that was negotiated for native calls. tonic dials again
/// for calls that were on their way when the server sent GOAWAY; these stay with HTTP/2.
#[derive(Debug)]
struct FirstStream {
    first: Option<EndpointStream>,
    dialling: Arc<Dialling>,
}

type Dial = Pin<Box<dyn Future<Output = Result<EndpointStream, ConnectError>> + Send>>;

impl Service<Uri> for FirstStream {
    type Response = EndpointStream;
    type Error = ConnectError;
    type Future = Dial;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), ConnectError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Dial {
        let (first, dialling) = (self.first.take(), Arc::clone(&self.dialling));
        Box::pin(async move {
            if let Some(stream) = first {
                return Ok(stream);
            }
            let (host, port) = place(&uri)?;
            dialling.dialer.dial(host, port).await
        })
    }
}

/// The longest time that a call waits for the back-off of an endpoint.
pub(super) const SHORT_WAIT: Duration = Duration::from_millis(100);
