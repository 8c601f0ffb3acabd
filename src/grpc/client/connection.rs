//! A connection to one endpoint (native calls, or HTTP/2), and what the clones of a channel share: the endpoints, and the choice among them.

use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use http::Uri;
use tokio::runtime::Handle;
use tokio::sync::{OnceCell, watch};
use tokio::task::AbortHandle;
use tokio::time::timeout;
use tonic::transport::Endpoint;

use super::ChannelError;
use super::deadline::{self, EndpointTimeout, Origin};
use crate::endpoint::{ConnectError, Dialer, Negotiated, RdmaConnectInfo};
use crate::grpc::calls::CallConfig;
use crate::grpc::session::Session;
use crate::transport::balance::connection::DialError;
use crate::transport::balance::connection::EndpointConnection;
use crate::transport::balance::keep::Kept;
use crate::transport::balance::table::{self, Table};
use crate::transport::{host_and_port, is_tls};
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

/// An endpoint that a channel connects to.
#[derive(Debug)]
pub(super) struct Target {
    pub(super) endpoint: Endpoint,
    dialling: Arc<Dialling>,
    /// The terms of native calls, once a connection has had some.
    terms: OnceCell<Arc<Terms>>,
}

impl Target {
    pub(super) fn new(endpoint: Endpoint, dialling: &Arc<Dialling>) -> Arc<Self> {
        Arc::new(Self { endpoint, dialling: Arc::clone(dialling), terms: OnceCell::new() })
    }

    /// Connects to the endpoint.
    pub(super) async fn connect(&self) -> Result<Connection, DialError> {
        let Self { endpoint, dialling, terms } = self;
        dialling.calls.validate()?;
        let uri = endpoint.uri();
        let without = is_tls(uri).then_some("TLS connections keep HTTP/2");
        let (host, port) = host_and_port(uri)?;
        let dial = dialling.dialer.dial_for_calls(host, port, without);
        let negotiated = match endpoint.get_connect_timeout() {
            None => dial.await?,
            Some(limit) => timeout(limit, dial).await.unwrap_or_else(|_| {
                let authority = format!("{host}:{port}");
                Err(ConnectError::Timeout { authority, timeout: limit, failed: Vec::new() })
            })?,
        };
        match negotiated {
            Negotiated::Messages(messages) => {
                let terms = Arc::clone(terms.get_or_init(|| Terms::of(endpoint)).await);
                *lock(&dialling.last) = Some(messages.info().clone());
                let session = Session::client(messages, &dialling.calls);
                let wakes = wake_calls(Arc::downgrade(&session), terms.timeout.changes());
                let wakes = Wakes(tokio::spawn(wakes).abort_handle());
                Ok(Connection::Native(NativeConnection { session, terms, _wakes: wakes }))
            }
            Negotiated::Stream(stream) => {
                *lock(&dialling.last) = Some(stream.info().clone());
                // The first stream is the one that was negotiated for native calls. tonic dials again for calls that were on their way when
                // the server sent GOAWAY; these stay with HTTP/2.
                let (mut first, dialling) = (Some(stream), Arc::clone(dialling));
                let dial = move |uri: Uri| {
                    let (first, dialling) = (first.take(), Arc::clone(&dialling));
                    async move {
                        let (host, port) = host_and_port(&uri)?;
                        match first {
                            Some(stream) => Ok(stream),
                            None => dialling.dialer.dial(host, port).await,
                        }
                    }
                };
                Ok(Connection::Http2(Arc::new(EndpointConnection::connect(endpoint, dial).await?)))
            }
        }
    }
}

impl Connection {
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
}

impl table::Connection for Connection {
    fn info(&self) -> &RdmaConnectInfo {
        match self {
            Self::Native(native) => native.session.info(),
            Self::Http2(connection) => connection.info(),
        }
    }

    fn is_usable(&self) -> bool {
        match self {
            Self::Native(native) => native.session.is_usable(),
            Self::Http2(connection) => connection.is_usable(),
        }
    }

    fn load(&self) -> usize {
        match self {
            Self::Native(native) => native.session.active_streams(),
            Self::Http2(connection) => connection.load(),
        }
    }

    async fn ended(&self) {
        match self {
            // The calls that it ended have the reason.
            Self::Native(native) => drop(native.session.closed().await),
            Self::Http2(connection) => connection.ended().await,
        }
    }
}

impl Terms {
    async fn of(endpoint: &Endpoint) -> Arc<Self> {
        let (origin, timeout) = deadline::learn(endpoint).await;
        Arc::new(Self { origin, timeout: Arc::new(timeout) })
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

/// The endpoints of a channel.
#[derive(Debug)]
pub(super) struct Endpoints {
    pub(super) table: Arc<Table<Connection>>,
    pub(super) dialling: Arc<Dialling>,
    /// The runtime of the channel.
    pub(super) runtime: Handle,
    /// Dropping these ends the tasks of the endpoints.
    _kept: Vec<Kept<Connection>>,
}

impl Endpoints {
    /// Makes the endpoints of a channel. If the channel `balances` its calls, its endpoints stay connected without calls.
    pub(super) fn new(endpoints: Vec<Endpoint>, balances: bool, dialer: Dialer, calls: CallConfig) -> Self {
        let dialling = Arc::new(Dialling { dialer, calls, last: Mutex::default() });
        let targets = endpoints.into_iter().map(|endpoint| (Target::new(endpoint, &dialling), None));
        Self::keep(targets.collect(), balances, &dialling)
    }

    /// Makes the endpoints of a channel, and connects to the endpoint, or to at least one of several.
    ///
    /// # Errors
    /// There is no endpoint, or none can be connected to.
    pub(super) async fn connected(
        endpoints: Vec<Endpoint>,
        balances: bool,
        dialer: Dialer,
        calls: CallConfig,
    ) -> Result<Self, ChannelError> {
        match &endpoints[..] {
            [] => Err(ChannelError::NoEndpoint),
            [one] if !balances => {
                let dialling = Arc::new(Dialling { dialer, calls, last: Mutex::default() });
                let target = Target::new(one.clone(), &dialling);
                let first = Arc::new(target.connect().await?);
                Ok(Self::keep(vec![(target, Some(first))], balances, &dialling))
            }
            _ => {
                let connecting = Self::new(endpoints, balances, dialer, calls);
                connecting
                    .table
                    .connection(Instant::now(), || {})
                    .await
                    .map_err(ChannelError::Unavailable)?;
                Ok(connecting)
            }
        }
    }

    fn keep(
        targets: Vec<(Arc<Target>, Option<Arc<Connection>>)>,
        balances: bool,
        dialling: &Arc<Dialling>,
    ) -> Self {
        let (table, runtime) = (Table::new(!balances), Handle::current());
        let kept = targets.into_iter().map(|(target, first)| {
            Kept::new(&table, &runtime, target.endpoint.uri().clone(), first, move || {
                let target = Arc::clone(&target);
                async move { target.connect().await }
            })
        });
        let kept = kept.collect();
        Self { table, dialling: Arc::clone(dialling), runtime, _kept: kept }
    }

    /// Returns the native connection of the only endpoint, if there is one. It may refuse the call, which can be sent again then.
    pub(super) fn only_native(&self) -> Option<Arc<Connection>> {
        self.table.only().filter(|connection| connection.is_native())
    }
}
