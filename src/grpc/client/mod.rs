//! The channel of clients.
//!
//! ```text
//!  RdmaChannel::call ─▶ endpoints: choice of a connection, which is dialled when it is needed
//!        │                                                   │
//!        │                       native: Session ◀───────────┴──────────▶ HTTP/2: a channel of tonic's over the same stream
//!        ▼                              ▼
//!  call: request, headers ── response: body, trailers
//! ```
//!
//! Each endpoint has one connection at a time, native or of tonic's channel, which the table of the balancer
//! keeps.
//!
//! A native call needs no task and no timer of its own, as long as its request is there at once and its
//! response comes soon.

mod call;
mod deadline;
mod request;

use std::error::Error;
use std::fmt;
use std::future::Future;
use std::hash::Hash;
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use http::{Request, Response, Uri};
use tokio::runtime::Handle;
use tokio::sync::{OnceCell, mpsc, watch};
use tokio::time::timeout;
use tonic::Status;
use tonic::body::Body;
use tonic::transport::Endpoint;
use tonic::transport::channel::Change;
use tower_service::Service;

use self::call::{CallEnd, NativeCall, polled_again};
use self::deadline::{Deadline, EndpointTimeout, Origin};
use self::request::PendingRequest;
use crate::endpoint::{Config, Dialer, Negotiated, OwnedTask, RdmaConnectInfo, not_in_time};
use crate::error::{RdmaError, RdmaErrorKind};
use crate::grpc::calls::CallConfig;
use crate::grpc::session::{OpenError, Session};
use crate::transport::balance::EndpointStatus;
use crate::transport::balance::connection::{DialError, EndpointConnection, no_endpoint_up};
use crate::transport::balance::members::Members;
use crate::transport::balance::table::{self, KeptEndpoint, Table};
use crate::transport::{host_and_port, is_tls};

/// A channel for generated clients. Its calls go over RDMA without HTTP/2 if the server is an
/// [`RdmaServer`](crate::RdmaServer) that is within reach of an RDMA device, and over HTTP/2 elsewhere: over
/// RDMA to other servers of this crate, and over TCP to stock servers.
///
/// ```
/// # use tonic::transport::Server;
/// # use tonic_rdma::RdmaIncoming;
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let incoming = RdmaIncoming::bind("127.0.0.1:0").await?;
/// # let uri = format!("http://{}", incoming.local_addr());
/// # let (_reporter, service) = tonic_health::server::health_reporter();
/// # tokio::spawn(Server::builder().add_service(service).serve_with_incoming(incoming));
/// use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient}; // generated code, as it is
/// use tonic_rdma::RdmaChannel;
///
/// let channel = RdmaChannel::connect(uri).await?; // such as "http://ps0:50051"
/// let mut client = HealthClient::new(channel.clone());
/// let reply = client.check(HealthCheckRequest::default()).await?;
/// # drop(reply);
///
/// let info = channel.last_connection().expect("a connection was made");
/// println!("{} because {}", info.verdict(), info.reason());
/// # Ok(())
/// # }
/// ```
///
/// Clones are cheap and share the connections. A clone may have many calls in flight. Interceptors and tower
/// layers take the channel as they take tonic's `Channel`. Connections end when the last clone is dropped and
/// the calls in flight are over.
///
/// # When a connection ends
///
/// A channel connects again when the next call needs a connection. Calls wait for a dial that is under way;
/// the wait is a part of their deadline. If the dial fails, they fail with UNAVAILABLE and its reason. An
/// endpoint that failed is dialled at most each 100 ms. A channel over [several endpoints](Self::balance) has
/// a longer back-off, which no call waits for: while all of its endpoints are down, calls fail at once, with
/// the reason of the last failure.
///
/// A call that was in flight when its connection ended fails with UNAVAILABLE, unless the server said that it
/// has not begun the call (GOAWAY): such a call is sent once more, on a new connection.
///
/// # Settings
///
/// Those of tonic's [`Endpoint`] hold over each path: its time-outs, origin and user agent, and over HTTP/2
/// also those of HTTP/2 and of TLS. Two do not hold for native calls, because an `Endpoint` does not tell
/// them: `concurrency_limit` and `rate_limit`. Layers of tower, which have the same names, limit the calls of a
/// channel over each path. Options of the socket, such as `tcp_keepalive`, have no effect: connections have
/// TCP_NODELAY, and pings of their own ([`Config::ping_interval`]).
///
/// A call that is late ends with DEADLINE_EXCEEDED, over each path, and at the server as well. The time of
/// [`Request::set_timeout`](tonic::Request::set_timeout) holds until the end of the response, that of
/// [`Endpoint::timeout`] until its headers, as on tonic's channel. The shorter one counts.
#[derive(Clone)]
pub struct RdmaChannel {
    endpoints: Arc<Endpoints>,
}

impl RdmaChannel {
    /// Connects to one endpoint: a URI, or an [`Endpoint`] with settings.
    ///
    /// ```no_run
    /// # async fn example() -> Result<(), tonic_rdma::RdmaError> {
    /// use tonic_rdma::RdmaChannel;
    ///
    /// let channel = RdmaChannel::connect("http://ps0:50051").await?;
    /// # drop(channel);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The argument is no endpoint, or the endpoint can't be connected to.
    pub async fn connect<E>(endpoint: E) -> Result<Self, RdmaError>
    where
        E: TryInto<Endpoint>,
        E::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        Self::builder(to_endpoint(endpoint)?).connect().await
    }

    /// Makes a channel to one endpoint. The first call connects.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tonic_rdma::RdmaError> {
    /// use tonic_rdma::RdmaChannel;
    ///
    /// let channel = RdmaChannel::connect_lazy("http://ps0:50051")?;
    /// assert!(channel.last_connection().is_none());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The argument is no endpoint.
    ///
    /// # Panics
    /// Outside a tokio runtime, as tonic's method does.
    pub fn connect_lazy<E>(endpoint: E) -> Result<Self, RdmaError>
    where
        E: TryInto<Endpoint>,
        E::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        Ok(Self::builder(to_endpoint(endpoint)?).connect_lazy())
    }

    /// Returns a builder of a channel to one endpoint.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// use tonic::transport::Endpoint;
    /// use tonic_rdma::{Config, Policy, RdmaChannel};
    ///
    /// let endpoint = Endpoint::from_static("http://ps0:50051");
    /// let channel = RdmaChannel::builder(endpoint).config(Config::default().policy(Policy::Require)).connect_lazy();
    /// # drop(channel);
    /// # }
    /// ```
    pub fn builder(endpoint: Endpoint) -> RdmaChannelBuilder {
        RdmaChannelBuilder::new(vec![endpoint], false)
    }

    /// Returns a builder of a channel that spreads its calls over several endpoints. An endpoint that is down
    /// gets no calls, and is dialled again by back-off, at first after 100 ms, at last every 10 s.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// use tonic::transport::Endpoint;
    /// use tonic_rdma::RdmaChannel;
    ///
    /// let endpoints = ["http://ps0:50051", "http://ps1:50051"].map(Endpoint::from_static);
    /// let channel = RdmaChannel::balance(endpoints).connect_lazy();
    /// assert_eq!(channel.endpoints().len(), 2);
    /// # }
    /// ```
    pub fn balance(endpoints: impl IntoIterator<Item = Endpoint>) -> RdmaChannelBuilder {
        RdmaChannelBuilder::new(endpoints.into_iter().collect(), true)
    }

    /// Makes a channel that spreads its calls over several endpoints, as tonic's `Channel::balance_list` does:
    /// [`balance`](Self::balance) with all settings as they are by default.
    ///
    /// ```no_run
    /// # async fn example() {
    /// use tonic::transport::Endpoint;
    /// use tonic_rdma::RdmaChannel;
    /// use tonic_rdma_proto::greeter::greeter_client::GreeterClient;
    ///
    /// let endpoints = ["http://ps0:50051", "http://ps1:50051"].map(Endpoint::from_static);
    /// let client = GreeterClient::new(RdmaChannel::balance_list(endpoints));
    /// # drop(client);
    /// # }
    /// ```
    ///
    /// # Panics
    /// Outside a tokio runtime, as tonic's method does.
    pub fn balance_list(endpoints: impl IntoIterator<Item = Endpoint>) -> Self {
        Self::balance(endpoints).connect_lazy()
    }

    /// Makes a channel whose endpoints come and go, as tonic's `Channel::balance_channel` does. A discovery of
    /// your own sends the changes. See [`RdmaChannelBuilder::balance_channel`].
    ///
    /// ```no_run
    /// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
    /// use tonic::transport::Endpoint;
    /// use tonic::transport::channel::Change;
    /// use tonic_rdma::RdmaChannel;
    /// use tonic_rdma_proto::greeter::greeter_client::GreeterClient;
    ///
    /// let (channel, changes) = RdmaChannel::balance_channel(16);
    /// let client = GreeterClient::new(channel);
    /// changes.send(Change::Insert("ps0", Endpoint::from_static("http://ps0:50051"))).await?;
    /// changes.send(Change::Remove("ps0")).await?;
    /// # drop(client);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Panics
    /// Outside a tokio runtime, and with a `capacity` of 0, as tonic's method does.
    pub fn balance_channel<K>(capacity: usize) -> (Self, mpsc::Sender<Change<K, Endpoint>>)
    where
        K: Hash + Eq + Send + 'static,
    {
        Self::balance([]).balance_channel(capacity)
    }

    /// Returns what was negotiated for the last connection; `None` before the first one. The counters in it
    /// are live.
    pub fn last_connection(&self) -> Option<RdmaConnectInfo> {
        self.endpoints.dialling.last.borrow().clone()
    }

    /// Returns a receiver that is told of each new connection of this channel and its clones, for a program
    /// that acts on a change of the transport. Its value is that of [`last_connection`](Self::last_connection).
    /// It ends with the last clone of the channel. Don't hold a borrowed value across an `await`
    /// ([why](crate::RdmaConnector::watch_connection)).
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tonic_rdma::RdmaError> {
    /// use tonic_rdma::{RdmaChannel, Verdict};
    ///
    /// let channel = RdmaChannel::connect_lazy("http://ps0:50051")?;
    /// let mut connections = channel.watch_connection();
    /// # let watching =
    /// tokio::spawn(async move {
    ///     while connections.changed().await.is_ok() {
    ///         let fell = connections.borrow_and_update().as_ref().is_some_and(|info| info.verdict() == Verdict::Tcp);
    ///         println!("{}", if fell { "calls go over TCP" } else { "calls go over RDMA" });
    ///     }
    /// });
    /// # drop(channel);
    /// # watching.await.expect("the receiver ends with the channel");
    /// # Ok(())
    /// # }
    /// ```
    pub fn watch_connection(&self) -> watch::Receiver<Option<RdmaConnectInfo>> {
        self.endpoints.dialling.last.subscribe()
    }

    /// Returns the state of each endpoint, in the order in which they were given. An endpoint that has not
    /// been needed yet counts as [`EndpointState::Connecting`](crate::EndpointState::Connecting).
    pub fn endpoints(&self) -> Vec<EndpointStatus> {
        self.endpoints.members.table().status()
    }
}

impl fmt::Debug for RdmaChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RdmaChannel").field("endpoints", &self.endpoints()).finish()
    }
}

/// The response of a call on an [`RdmaChannel`]. Dropping it cancels the call, also at the server.
///
/// Generated clients await this future. A layer of tower can name it:
///
/// ```
/// use std::task::{Context, Poll};
/// use tonic_rdma::{RdmaChannel, RdmaResponseFuture};
/// use tower_service::Service;
///
/// #[derive(Clone)]
/// struct Logged(RdmaChannel);
///
/// impl Service<http::Request<tonic::body::Body>> for Logged {
///     type Response = http::Response<tonic::body::Body>;
///     type Error = tonic::Status;
///     type Future = RdmaResponseFuture;
///
///     fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), tonic::Status>> {
///         self.0.poll_ready(context)
///     }
///
///     fn call(&mut self, request: http::Request<tonic::body::Body>) -> RdmaResponseFuture {
///         println!("{}", request.uri().path());
///         self.0.call(request)
///     }
/// }
/// ```
#[must_use = "a call is not sent unless its future is polled"]
pub struct RdmaResponseFuture {
    inner: ResponseState,
}

// A native call is kept in place: a box for each call costs more than moving it.
#[allow(clippy::large_enum_variant, reason = "most calls are native")]
enum ResponseState {
    Native(NativeCall),
    /// The call waits for a connection, or uses HTTP/2, or is sent again.
    Boxed(call::Boxed),
    Failed(Option<Status>),
}

impl fmt::Debug for RdmaResponseFuture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RdmaResponseFuture").finish_non_exhaustive()
    }
}

impl Future for RdmaResponseFuture {
    type Output = Result<Response<Body>, Status>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let again = match &mut self.inner {
            ResponseState::Native(call) => match ready!(call.poll(context)) {
                Ok(response) => return Poll::Ready(Ok(response)),
                Err(CallEnd::Failed(status)) => return Poll::Ready(Err(status)),
                Err(CallEnd::Retry(again)) => again,
            },
            ResponseState::Boxed(call) => return call.as_mut().poll(context),
            ResponseState::Failed(status) => {
                return Poll::Ready(Err(status.take().unwrap_or_else(polled_again)));
            }
        };
        let mut boxed: call::Boxed = Box::pin(again.send());
        let polled = boxed.as_mut().poll(context);
        self.inner = ResponseState::Boxed(boxed);
        polled
    }
}

impl Service<Request<Body>> for RdmaChannel {
    type Response = Response<Body>;
    type Error = Status;
    type Future = RdmaResponseFuture;

    /// Returns ready at once. A call waits itself for what it needs, within its deadline.
    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Status>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> RdmaResponseFuture {
        let request = PendingRequest::new(request);
        let mut deadline = Deadline::of(&request.head.headers);
        let endpoints = Arc::clone(&self.endpoints);
        let native = endpoints.only_native();
        let found = native
            .map_or_else(|| endpoints.members.table().pick(deadline.begun()), |native| Ok(Some(native)));
        let inner = match found {
            Err(status) => ResponseState::Failed(Some(status)),
            Ok(Some(connection)) if connection.is_native() => {
                ResponseState::Native(NativeCall::new(endpoints, connection, deadline, request))
            }
            Ok(_) => ResponseState::Boxed(Box::pin(call::wait_and_call(endpoints, request, deadline, 0))),
        };
        RdmaResponseFuture { inner }
    }
}

/// The settings of an [`RdmaChannel`], from [`RdmaChannel::builder`] or [`RdmaChannel::balance`].
///
/// ```no_run
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use tonic::transport::Endpoint;
/// use tonic_rdma::{Config, Policy, RdmaChannel, RdmaChannelBuilder};
///
/// let endpoint = Endpoint::from_static("http://ps0:50051").timeout(Duration::from_secs(5));
/// let config = Config::default().policy(Policy::Require);
/// let builder: RdmaChannelBuilder = RdmaChannel::builder(endpoint).config(config);
/// let channel = builder.connect().await?;
/// # drop(channel);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use = "a builder does nothing until it connects"]
pub struct RdmaChannelBuilder {
    endpoints: Vec<Endpoint>,
    /// The channel spreads its calls, and stays connected to all of its endpoints.
    balances: bool,
    /// The environment decides if there is none.
    config: Option<Config>,
    calls: CallConfig,
}

impl RdmaChannelBuilder {
    fn new(endpoints: Vec<Endpoint>, balances: bool) -> Self {
        Self { endpoints, balances, config: None, calls: CallConfig::default() }
    }

    /// Sets the configuration of the connections. Default: [`Config::from_env`], which is read when the
    /// channel is made.
    pub fn config(mut self, config: Config) -> Self {
        self.config = Some(config);
        self
    }

    /// Sets the limits of calls without HTTP/2. Default: [`CallConfig::default`]. The times in it are limits
    /// of servers, and have no effect here.
    pub fn calls(mut self, calls: CallConfig) -> Self {
        self.calls = calls;
        self
    }

    /// Connects to the endpoint, or to at least one of several.
    ///
    /// # Errors
    /// A setting or a variable has a value that can't be used, there is no endpoint, or no endpoint can be
    /// connected to.
    pub async fn connect(self) -> Result<RdmaChannel, RdmaError> {
        let config = self.config.clone().map_or_else(Config::from_env, Ok)?;
        config.validate()?;
        self.calls.validate()?;
        let dialer = Dialer::configured(Some(config));
        let endpoints = Endpoints::connected(self.endpoints, self.balances, dialer, self.calls).await?;
        Ok(RdmaChannel { endpoints: Arc::new(endpoints) })
    }

    /// Makes a channel to one endpoint that connects at the first call, or a channel to several endpoints
    /// that connects to all of them in the background. If the channel has no endpoint, or a setting or a
    /// variable has a value that can't be used, calls fail, with the reason.
    ///
    /// # Panics
    /// Outside a tokio runtime, as tonic's method does.
    pub fn connect_lazy(self) -> RdmaChannel {
        let dialer = Dialer::configured(self.config);
        let endpoints = Endpoints::new(self.endpoints, self.balances, dialer, self.calls);
        RdmaChannel { endpoints: Arc::new(endpoints) }
    }

    /// Makes a channel that spreads its calls over endpoints that come and go. It connects to each endpoint in
    /// the background. A change that was sent to the `Sender` holds for all later calls. While there is no
    /// endpoint, calls fail with UNAVAILABLE.
    ///
    /// An endpoint inserted under a key that is taken replaces the endpoint of that key. A removed endpoint
    /// gets no further calls; its calls in flight go on. The endpoints that the builder has stay. `capacity`
    /// is the number of changes that may wait in the `Sender`. Dropping the `Sender` changes nothing.
    ///
    /// ```no_run
    /// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
    /// use tonic::transport::Endpoint;
    /// use tonic::transport::channel::Change;
    /// use tonic_rdma::{Config, Policy, RdmaChannel};
    ///
    /// let builder = RdmaChannel::balance([]).config(Config::default().policy(Policy::Require));
    /// let (channel, changes) = builder.balance_channel(16);
    /// changes.send(Change::Insert("ps0", Endpoint::from_static("http://ps0:50051"))).await?;
    /// # drop(channel);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Panics
    /// Outside a tokio runtime, and with a `capacity` of 0, as tonic's method does.
    pub fn balance_channel<K>(self, capacity: usize) -> (RdmaChannel, mpsc::Sender<Change<K, Endpoint>>)
    where
        K: Hash + Eq + Send + 'static,
    {
        let (sender, changes) = mpsc::channel(capacity);
        let dialer = Dialer::configured(self.config);
        let endpoints = Endpoints::new(self.endpoints, true, dialer, self.calls).changing(changes);
        (RdmaChannel { endpoints: Arc::new(endpoints) }, sender)
    }
}

/// Converts the argument of `connect`.
fn to_endpoint<E>(endpoint: E) -> Result<Endpoint, RdmaError>
where
    E: TryInto<Endpoint>,
    E::Error: Into<Box<dyn Error + Send + Sync>>,
{
    Endpoint::new(endpoint).map_err(|error| {
        let reason = format!("not an endpoint: {}", innermost(&error));
        RdmaError::because(RdmaErrorKind::InvalidEndpoint, reason, error)
    })
}

/// Returns the message of the last source, because tonic's errors around it are general.
fn innermost(error: &(dyn Error + 'static)) -> String {
    error.source().map_or_else(|| error.to_string(), innermost)
}

/// Returns the error of a channel that could not connect to its only endpoint.
fn not_connected(status: Status) -> RdmaError {
    let error = status.source().and_then(|error| error.downcast_ref()).cloned();
    error.unwrap_or_else(|| no_endpoint_up(status))
}

/// Returns the status of a call whose connection took no call.
fn not_opened(error: OpenError) -> Status {
    match error {
        OpenError::Ended(fault) => fault.into(),
        error @ OpenError::GoingAway(_) => {
            let mut status = Status::unavailable(error.to_string());
            status.set_source(Arc::new(RdmaError::of(RdmaErrorKind::NotProcessed, error)));
            status
        }
    }
}

/// What the connections of a channel have in common.
#[derive(Debug)]
struct Dialling {
    dialer: Dialer,
    calls: CallConfig,
    /// The connection that was made last.
    last: watch::Sender<Option<RdmaConnectInfo>>,
}

impl Dialling {
    fn connected(&self, info: &RdmaConnectInfo) {
        self.last.send_replace(Some(info.clone()));
    }
}

/// A connection to one endpoint.
#[derive(Debug)]
enum Connection {
    Native(NativeConnection),
    Http2(Arc<EndpointConnection>),
}

/// A connection whose calls use no HTTP/2.
#[derive(Debug)]
struct NativeConnection {
    session: Arc<Session>,
    defaults: Arc<CallDefaults>,
    info: RdmaConnectInfo,
    /// It wakes calls when their time-out becomes known.
    _wakes: OwnedTask,
}

/// What the settings of an endpoint give to each native call: its origin, user agent and time-out.
#[derive(Debug)]
struct CallDefaults {
    origin: Origin,
    timeout: Arc<EndpointTimeout>,
}

/// An endpoint that a channel connects to.
#[derive(Debug)]
struct Target {
    endpoint: Endpoint,
    dialling: Arc<Dialling>,
    /// The defaults of native calls, once a native connection was made.
    defaults: OnceCell<Arc<CallDefaults>>,
}

impl Target {
    fn new(endpoint: Endpoint, dialling: &Arc<Dialling>) -> Arc<Self> {
        Arc::new(Self { endpoint, dialling: Arc::clone(dialling), defaults: OnceCell::new() })
    }

    /// Adds the endpoint to `table`.
    fn keep(self: Arc<Self>, table: &Arc<Table<Connection>>, runtime: &Handle) -> KeptEndpoint<Connection> {
        KeptEndpoint::new(table, runtime, self.endpoint.uri().clone(), move || {
            let target = Arc::clone(&self);
            async move { target.connect().await }
        })
    }

    /// Connects to the endpoint.
    async fn connect(&self) -> Result<Connection, DialError> {
        let Self { endpoint, dialling, defaults } = self;
        dialling.calls.validate()?;
        let uri = endpoint.uri();
        let without = is_tls(uri).then_some("TLS connections keep HTTP/2");
        let (host, port) = host_and_port(uri)?;
        let dial = async {
            let negotiated = dialling.dialer.dial_for_calls(host, port, without).await?;
            let server = match &negotiated {
                Negotiated::Messages(messages) => Session::in_process(messages).await,
                Negotiated::Stream(_) => None,
            };
            Ok((negotiated, server))
        };
        let (negotiated, server) = match endpoint.get_connect_timeout() {
            None => dial.await?,
            Some(limit) => timeout(limit, dial)
                .await
                .unwrap_or_else(|_| Err(not_in_time(&format!("{host}:{port}"), limit, &[])))?,
        };
        match negotiated {
            Negotiated::Messages(messages) => {
                let defaults = Arc::clone(
                    defaults
                        .get_or_init(|| async {
                            let (origin, timeout) = deadline::learn(endpoint).await;
                            Arc::new(CallDefaults { origin, timeout: Arc::new(timeout) })
                        })
                        .await,
                );
                let info = messages.info();
                let info = if server.is_some() { info.in_process() } else { info.clone() };
                let session = Session::client(messages, &dialling.calls, server);
                dialling.connected(&info);
                let wakes = wake_calls(Arc::downgrade(&session), defaults.timeout.known.clone());
                let wakes = OwnedTask(tokio::spawn(wakes).abort_handle());
                Ok(Connection::Native(NativeConnection { session, defaults, info, _wakes: wakes }))
            }
            Negotiated::Stream(stream) => {
                dialling.connected(stream.info());
                // The first stream is the one that was negotiated for native calls. tonic dials again for
                // calls that were on their way when the server sent GOAWAY; these stay with HTTP/2.
                let (mut first, dialling) = (Some(stream), Arc::clone(dialling));
                let dial = tower::service_fn(move |uri: Uri| {
                    let (first, dialling) = (first.take(), Arc::clone(&dialling));
                    async move {
                        let (host, port) = host_and_port(&uri)?;
                        match first {
                            Some(stream) => Ok(stream),
                            None => {
                                let stream = dialling.dialer.dial(host, port).await?;
                                dialling.connected(stream.info());
                                Ok(stream)
                            }
                        }
                    }
                });
                Ok(Connection::Http2(Arc::new(EndpointConnection::connect(endpoint, dial).await?)))
            }
        }
    }
}

impl Connection {
    /// Returns the defaults of native calls, if this connection has such calls.
    fn defaults(&self) -> Option<&Arc<CallDefaults>> {
        match self {
            Self::Native(native) => Some(&native.defaults),
            Self::Http2(_) => None,
        }
    }

    /// Returns whether calls on this connection use no HTTP/2.
    fn is_native(&self) -> bool {
        matches!(self, Self::Native(_))
    }
}

impl table::Connection for Connection {
    fn info(&self) -> &RdmaConnectInfo {
        match self {
            Self::Native(native) => &native.info,
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

/// Wakes the calls of a session when the time-out of their endpoint becomes known, so that they make their
/// timers.
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
struct Endpoints {
    members: Members<Connection>,
    dialling: Arc<Dialling>,
    /// The runtime of the channel.
    runtime: Handle,
}

impl Endpoints {
    /// Makes the endpoints of a channel. If the channel `balances` its calls, its endpoints stay connected
    /// without calls.
    fn new(endpoints: Vec<Endpoint>, balances: bool, dialer: Dialer, calls: CallConfig) -> Self {
        let dialling = Arc::new(Dialling { dialer, calls, last: watch::Sender::default() });
        let (table, runtime) = (Table::new(!balances), Handle::current());
        let keep = |endpoint| Target::new(endpoint, &dialling).keep(&table, &runtime);
        let kept = endpoints.into_iter().map(keep).collect();
        Self { members: Members::new(table, kept), dialling, runtime }
    }

    /// Adds and removes endpoints by `changes`.
    fn changing<K>(self, changes: mpsc::Receiver<Change<K, Endpoint>>) -> Self
    where
        K: Hash + Eq + Send + 'static,
    {
        let (dialling, runtime) = (Arc::clone(&self.dialling), self.runtime.clone());
        let keep = move |table: &_, endpoint| Target::new(endpoint, &dialling).keep(table, &runtime);
        Self { members: self.members.changing(changes, keep), ..self }
    }

    /// Makes the endpoints of a channel, and connects to the endpoint, or to at least one of several.
    ///
    /// # Errors
    /// There is no endpoint, or none can be connected to.
    async fn connected(
        endpoints: Vec<Endpoint>,
        balances: bool,
        dialer: Dialer,
        calls: CallConfig,
    ) -> Result<Self, RdmaError> {
        if endpoints.is_empty() {
            let reason = "the channel has no endpoint to connect to";
            return Err(RdmaError::new(RdmaErrorKind::InvalidEndpoint, reason));
        }
        let connecting = Self::new(endpoints, balances, dialer, calls);
        let is_connecting = &connecting.members.table().is_connecting;
        is_connecting.store(!balances, Ordering::Relaxed);
        let connected = connecting.members.connection(Instant::now()).await;
        connected.map_err(if balances { no_endpoint_up } else { not_connected })?;
        is_connecting.store(false, Ordering::Relaxed);
        Ok(connecting)
    }

    /// Returns the native connection of the only endpoint, if there is one. It may refuse the call, which can
    /// be sent again then.
    fn only_native(&self) -> Option<Arc<Connection>> {
        self.members.table().only().filter(|connection| connection.is_native())
    }
}
