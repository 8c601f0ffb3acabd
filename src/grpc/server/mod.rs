//! The server: native calls, HTTP/2 over RDMA and stock TCP clients on one port.
//!
//! It splits what the listener accepts: HTTP/2 peers go to tonic's server, native ones are served here, by
//! the same service. A native connection takes calls until it is too old, has had no call for too long, or
//! the server shuts down.
//!
//! ```text
//!  serve ── stream ────▶ tonic's Server ──▶ the layers and routes
//!    └───── messages ──▶ connection ──▶ call, polled in place ── waits ──▶ call as a task       ──▶ the same layers and routes
//! ```

mod call;
#[cfg(test)]
mod hostile_tests;
mod in_place;
mod routes;

use std::convert::Infallible;
use std::future::{Future, Pending, pending};
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;
use std::{fmt, io};

use http::uri::Scheme;
use http::{Extensions, Method, Request, Uri, Version};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::ToSocketAddrs;
use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::{mpsc, watch};
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;
use tonic::body::Body;
use tonic::server::NamedService;
use tonic::service::Routes;
use tonic::transport::Server;
use tonic::transport::server::TcpConnectInfo;
use tower::ServiceBuilder;
use tower::layer::Layer;
use tower::layer::util::{Identity, Stack};

use self::call::{Call, RequestBody};
use self::in_place::{InPlace, Paths};
use self::routes::Named;
use super::calls::CallConfig;
use super::landed::{LandingSwitch, LandingTarget};
use super::session::{Accept, LocalCall, RequestHeaders, Session, Stream};
use crate::endpoint::{
    Config, EndpointStream, Listener, MessageEndpoint, Negotiated, RdmaConnectInfo, task_is_ready,
};
use crate::error::RdmaError;
use crate::transport::balance::http2_failed;
use crate::transport::request::grpc_timeout;
use crate::transport::{RdmaIncoming, RemoteAddresses};
use tonic_rdma_verbs::unstable::{lock, run_foreign};

pub use self::call::status_of_http;
pub use self::routes::{GrpcService, RdmaRoutes};

/// A gRPC server for all clients on one port: peers that know native calls, peers that send HTTP/2 over RDMA,
/// and stock clients over TCP.
///
/// All of them reach the same services, through the same layers. The negotiation of each connection decides;
/// the server's services find the result in each request
/// ([`RdmaRequestExt::connection`](crate::RdmaRequestExt::connection)). `remote_addr` and `local_addr` of a
/// [`tonic::Request`] return the addresses of the connection's TCP part.
///
/// ```
/// # use tonic::{Request, Response, Status};
/// # use tonic_rdma_proto::greeter::greeter_client::GreeterClient;
/// # use tonic_rdma_proto::greeter::greeter_server::{Greeter, GreeterServer};
/// # use tonic_rdma_proto::greeter::{HelloReply, HelloRequest};
/// # #[derive(Debug)]
/// # struct Greets;
/// # #[tonic::async_trait]
/// # impl Greeter for Greets {
/// #     async fn say_hello(&self, request: Request<HelloRequest>) -> Result<Response<HelloReply>, Status> {
/// #         Ok(Response::new(HelloReply { message: format!("Hello {}!", request.get_ref().name) }))
/// #     }
/// # }
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use tonic_rdma::{RdmaChannel, RdmaIncoming, RdmaServer};
///
/// let incoming = RdmaIncoming::bind("127.0.0.1:0").await?;
/// let uri = format!("http://{}", incoming.local_addr());
/// let server = RdmaServer::new().add_service(GreeterServer::new(Greets));
/// tokio::spawn(server.serve_with_incoming(incoming)); // or .serve("0.0.0.0:50051")
///
/// let channel = RdmaChannel::connect(uri.clone()).await?;
/// assert!(channel.last_connection().is_some_and(|info| info.is_native()));
/// let reply = GreeterClient::new(channel).say_hello(HelloRequest { name: "Ada".into() }).await?;
/// assert_eq!(reply.into_inner().message, "Hello Ada!");
///
/// let mut stock = GreeterClient::connect(uri).await?;
/// let reply = stock.say_hello(HelloRequest { name: "Grace".into() }).await?;
/// assert_eq!(reply.into_inner().message, "Hello Grace!");
/// # Ok(())
/// # }
/// ```
///
/// # Where handlers of native calls run
///
/// A native call is polled first by the thread that finds it, within the runtime that [`serve`](Self::serve)
/// runs in. A handler that does not wait is done then, and its reply is sent, without a task of its own. A
/// handler that waits goes on as a task. Calls of methods that compute for more than about 50 µs go to tasks
/// at once. A handler that blocks its thread delays other calls, as it does in a task; for such work there is
/// `tokio::task::spawn_blocking`. A call of a client in the same process is a task from the start, because the
/// thread is the client's.
///
/// A handler that panics ends its own call with UNKNOWN. A call that the client cancels, and one whose
/// deadline passes, drops its handler.
#[derive(Clone)]
#[must_use]
pub struct RdmaServer<L = Identity> {
    /// The environment decides if there is none.
    config: Option<Config>,
    calls: CallConfig,
    http2: Server,
    layers: ServiceBuilder<L>,
    routes: Routes,
    /// The services that native calls find without these routes; `None` if the user has routes, which may
    /// take other paths.
    named: Option<Named>,
}

impl RdmaServer {
    /// Makes a server without services, with the default settings. A call to it ends with UNIMPLEMENTED.
    ///
    /// ```
    /// use tonic_rdma::RdmaServer;
    ///
    /// let (_reporter, health) = tonic_health::server::health_reporter();
    /// let server = RdmaServer::new().add_service(health);
    /// # drop(server);
    /// ```
    pub fn new() -> Self {
        Self {
            config: None,
            calls: CallConfig::default(),
            http2: Server::builder(),
            layers: ServiceBuilder::new(),
            routes: Routes::default(),
            named: Some(Named::default()),
        }
    }
}

impl Default for RdmaServer {
    fn default() -> Self {
        Self::new()
    }
}

impl<L> RdmaServer<L> {
    /// Sets the connection's settings for [`serve`](Self::serve) and
    /// [`serve_with_shutdown`](Self::serve_with_shutdown). Default: [`Config::from_env`], which is read when
    /// the server begins to listen. An [`RdmaIncoming`] that is handed over has settings of its own.
    pub fn config(mut self, config: Config) -> Self {
        self.config = Some(config);
        self
    }

    /// Sets the limits of native calls.
    pub fn calls(mut self, calls: CallConfig) -> Self {
        self.calls = calls;
        self
    }

    /// Sets the server for HTTP/2 peers, for its settings: windows, keepalive, limits, TLS. Its timeouts, its
    /// limits and its `trace_fn` hold for HTTP/2 peers alone; native calls have those of
    /// [`calls`](Self::calls).
    ///
    /// A server with TLS offers no native calls, because they would go around TLS: all its peers use HTTP/2.
    ///
    /// ```
    /// use tonic::transport::Server;
    /// use tonic_rdma::RdmaServer;
    ///
    /// let http2 = Server::builder().initial_stream_window_size(4 << 20);
    /// let server = RdmaServer::new().http2(http2);
    /// # drop(server);
    /// ```
    pub fn http2(mut self, server: Server) -> Self {
        self.http2 = server;
        self
    }

    /// Puts a tower layer around all services, for all peers. The layer that is added first is the outermost,
    /// as with tonic.
    ///
    /// ```
    /// use tonic::service::InterceptorLayer;
    /// use tonic::{Request, Status};
    /// use tonic_rdma::RdmaServer;
    ///
    /// fn with_a_token(request: Request<()>) -> Result<Request<()>, Status> {
    ///     match request.metadata().get("authorization") {
    ///         Some(_) => Ok(request),
    ///         None => Err(Status::unauthenticated("no token")),
    ///     }
    /// }
    ///
    /// let server = RdmaServer::new().layer(InterceptorLayer::new(with_a_token));
    /// # drop(server);
    /// ```
    pub fn layer<N>(self, layer: N) -> RdmaServer<Stack<N, L>> {
        let Self { config, calls, http2, layers, routes, named } = self;
        RdmaServer { config, calls, http2, layers: layers.layer(layer), routes, named }
    }

    /// Adds a service, such as a generated one.
    ///
    /// # Panics
    /// A service of this name is there already.
    pub fn add_service<S>(mut self, service: S) -> Self
    where
        S: GrpcService<Error = Infallible> + NamedService + Sync,
    {
        self.named = self.named.and_then(|named| named.with(service.clone()));
        self.routes = self.routes.add_service(service);
        self
    }

    /// Adds a service if there is one.
    ///
    /// # Panics
    /// A service of this name is there already.
    pub fn add_optional_service<S>(self, service: Option<S>) -> Self
    where
        S: GrpcService<Error = Infallible> + NamedService + Sync,
    {
        match service {
            Some(service) => self.add_service(service),
            None => self,
        }
    }

    /// Adds routes. Paths that they don't have go to the services added before. The fallback of these routes
    /// does not count. Native calls of a server without added routes are quicker.
    ///
    /// ```
    /// use tonic::service::Routes;
    /// use tonic_rdma::RdmaServer;
    ///
    /// let (_reporter, health) = tonic_health::server::health_reporter();
    /// let server = RdmaServer::new().add_routes(Routes::new(health));
    /// # drop(server);
    /// ```
    ///
    /// # Panics
    /// A path of them is there already.
    pub fn add_routes(mut self, routes: Routes) -> Self {
        let added = routes.into_axum_router().reset_fallback();
        self.routes = self.routes.into_axum_router().merge(added).into();
        self.named = None;
        self
    }
}

impl<L: Layer<RdmaRoutes, Service: GrpcService>> RdmaServer<L> {
    /// Listens on `address`, and serves until the runtime ends.
    ///
    /// ```no_run
    /// # async fn example() -> Result<(), tonic_rdma::RdmaError> {
    /// use tonic_rdma::RdmaServer;
    ///
    /// let (_reporter, health) = tonic_health::server::health_reporter();
    /// RdmaServer::new().add_service(health).serve("0.0.0.0:50051").await
    /// # }
    /// ```
    ///
    /// # Errors
    /// A setting or a variable has a value that can't be used, the address can't be listened on, or tonic's
    /// server failed.
    pub async fn serve(self, address: impl ToSocketAddrs) -> Result<(), RdmaError> {
        let incoming = self.listen(address).await?;
        self.serve_all(incoming, None::<Pending<()>>).await
    }

    /// Listens on `address`, and serves until `signal` is ready. Then it closes the port, lets the calls in
    /// flight finish, and returns when all clients have what was written to them and have closed, or after
    /// [`CallConfig::shutdown_grace`]. A client that does not close is given up after [`Config::linger`].
    ///
    /// # Errors
    /// As [`serve`](Self::serve).
    pub async fn serve_with_shutdown(
        self,
        address: impl ToSocketAddrs,
        signal: impl Future<Output = ()>,
    ) -> Result<(), RdmaError> {
        let incoming = self.listen(address).await?;
        self.serve_with_incoming_shutdown(incoming, signal).await
    }

    /// Serves the connections of `incoming` until the runtime ends.
    ///
    /// # Errors
    /// A limit of the calls has a value that can't be used, or tonic's server failed.
    pub async fn serve_with_incoming(self, incoming: RdmaIncoming) -> Result<(), RdmaError> {
        self.serve_all(incoming, None::<Pending<()>>).await
    }

    /// Serves the connections of `incoming` until `signal` is ready, and ends as
    /// [`serve_with_shutdown`](Self::serve_with_shutdown).
    ///
    /// # Errors
    /// As [`serve_with_incoming`](Self::serve_with_incoming).
    pub async fn serve_with_incoming_shutdown(
        self,
        incoming: RdmaIncoming,
        signal: impl Future<Output = ()>,
    ) -> Result<(), RdmaError> {
        self.serve_all(incoming, Some(signal)).await
    }

    async fn listen(&self, address: impl ToSocketAddrs) -> Result<RdmaIncoming, RdmaError> {
        let config = self.config.clone().map_or_else(Config::from_env, Ok)?;
        config.validate()?;
        self.calls.validate()?;
        Ok(RdmaIncoming::builder().config(config).bind(address).await?)
    }

    async fn serve_all(
        self,
        incoming: RdmaIncoming,
        signal: Option<impl Future<Output = ()>>,
    ) -> Result<(), RdmaError> {
        self.calls.validate()?;
        let service = self.layers.service(RdmaRoutes::new(self.routes, self.named.unwrap_or_default()));
        serve(incoming, self.http2, service, self.calls, signal).await
    }
}

impl<L> fmt::Debug for RdmaServer<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { config, calls, http2, layers: _, routes, named: _ } = self;
        f.debug_struct("RdmaServer")
            .field("config", config)
            .field("calls", calls)
            .field("http2", http2)
            .field("routes", routes)
            .finish_non_exhaustive()
    }
}

/// Most connections that wait for tonic's server.
const WAITING: usize = 64;

/// Serves the connections of `incoming` with `service` until `signal` is ready. Without a signal, connections
/// outlive this future, as with tonic.
async fn serve(
    incoming: RdmaIncoming,
    http2: Server,
    service: impl GrpcService,
    limits: CallConfig,
    signal: Option<impl Future<Output = ()>>,
) -> Result<(), RdmaError> {
    let grace = limits.shutdown_grace;
    let shared = Arc::new(ServerShared::new(limits));
    let plaintext = is_plaintext(http2.clone()).await;
    let (streams, received) = mpsc::channel(WAITING);
    let received = ReceiverStream::new(received).map(Ok::<EndpointStream, io::Error>);
    let (server, service_of_http2) = (http2.layer(RemoteAddresses::new()), service.clone());
    let (graceful, (stopping, stop)) = (signal.is_some(), watch::channel(()));
    let mut tonic = pin!(async {
        let ended = if graceful {
            // The end of the stream begins the shutdown.
            server.serve_with_incoming_shutdown(service_of_http2, received, pending()).await
        } else {
            server.serve_with_incoming(service_of_http2, received).await
        };
        ended.map_err(http2_failed)
    });
    let take = move |negotiated| match negotiated {
        Negotiated::Stream(stream) => {
            if graceful {
                stream.hold(stop.clone());
            }
            Some(stream)
        }
        Negotiated::Messages(endpoint) => {
            serve_native(endpoint, service.clone(), &shared, graceful.then(|| stop.clone()));
            None
        }
    };
    let listener = incoming.into_listener();
    listener.take_native_calls(plaintext);
    tokio::select! {
        ended = &mut tonic => return ended,
        () = accept(listener, take, streams, signal) => {}
    }
    if !graceful {
        return tonic.await;
    }
    // Connections have the receivers, and drop them when they have ended.
    let _ = stopping.send(());
    let drained = async { tokio::join!(tonic, stopping.closed()).0 };
    tokio::time::timeout(grace, drained).await.unwrap_or_else(|_| {
        tracing::debug!(?grace, "the server ends although connections are left");
        Ok(())
    })
}

/// Gives connections to `take` until `signal` is ready, and what it returns to `streams`. Then the port is
/// closed.
async fn accept(
    mut listener: Listener,
    take: impl Fn(Negotiated) -> Option<EndpointStream>,
    streams: mpsc::Sender<EndpointStream>,
    signal: Option<impl Future<Output = ()>>,
) {
    let mut signal = pin!(or_pending(signal));
    loop {
        let next = tokio::select! {
            () = &mut signal => return,
            next = listener.next_negotiated() => next,
        };
        let Some(negotiated) = next else { return };
        if let Some(stream) = take(negotiated)
            && streams.send(stream).await.is_err()
        {
            return;
        }
    }
}

/// What a client sends first: the preface, and SETTINGS without a value (RFC 9113, 3.4).
const HELLO: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
/// Length of a frame's header.
const HEADER: usize = 9;
/// Type of the frame SETTINGS, which a server sends first.
const SETTINGS: u8 = 4;
/// Longest wait for the answer, which comes from this process.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Bytes that the answer may have until it is read.
const BUFFER: usize = 4096;

/// Returns whether `server` answers HTTP/2 without TLS. tonic does not tell, so this function says hello to a
/// copy of the server, in memory. Each answer but that of plain HTTP/2 counts as TLS.
async fn is_plaintext(server: Server) -> bool {
    let (mut client, connection) = tokio::io::duplex(BUFFER);
    let mut server = server;
    let serve = server.add_routes(Routes::default());
    let asked = async {
        serve.serve_with_incoming(tokio_stream::once(Ok::<_, std::io::Error>(connection))).await.ok()?;
        client.write_all(HELLO).await.ok()?;
        let mut header = [0; HEADER];
        client.read_exact(&mut header).await.ok()?;
        Some(header[3] == SETTINGS && header[4..] == [0; 5])
    };
    tokio::time::timeout(TIMEOUT, asked).await.ok().flatten().unwrap_or(false)
}

/// The replies of calls that took longer than this do not wait for those of other calls, to share a message
/// with them.
const SHARED: Duration = Duration::from_micros(2);

/// What all native connections of a server share.
#[derive(Debug)]
struct ServerShared {
    limits: CallConfig,
    runtime: Handle,
    /// The runtime has one thread.
    alone: bool,
    paths: Paths,
}

impl ServerShared {
    /// Makes it for the runtime of the current thread.
    fn new(limits: CallConfig) -> Self {
        let runtime = Handle::current();
        let alone =
            runtime.runtime_flavor() == RuntimeFlavor::CurrentThread || runtime.metrics().num_workers() == 1;
        Self { limits, runtime, alone, paths: Paths::default() }
    }
}

/// Serves a native connection in tasks of its own. `stop` changes when the server shuts down. A server
/// without graceful shutdown has no `stop`.
fn serve_native(
    endpoint: MessageEndpoint,
    service: impl GrpcService,
    shared: &Arc<ServerShared>,
    stop: Option<watch::Receiver<()>>,
) {
    let info = endpoint.info().clone();
    let addresses =
        TcpConnectInfo { local_addr: Some(info.local_addr()), remote_addr: Some(info.peer_addr()) };
    let acceptor = Arc::new(Acceptor {
        shared: Arc::clone(shared),
        prepared: Mutex::new(PreparedService { service, next: None }),
        info,
        local_info: OnceLock::new(),
        addresses,
        accepted: AtomicU64::new(0),
    });
    let session = Session::server(endpoint, &shared.limits, Arc::clone(&acceptor) as Arc<dyn Accept>);
    shared.runtime.spawn(watch_over(session, acceptor, stop));
}

/// Takes the calls of one connection.
struct Acceptor<S> {
    shared: Arc<ServerShared>,
    prepared: Mutex<PreparedService<S>>,
    info: RdmaConnectInfo,
    /// The same for calls of this process.
    local_info: OnceLock<RdmaConnectInfo>,
    addresses: TcpConnectInfo,
    /// The number of calls so far.
    accepted: AtomicU64,
}

/// The service, and what the next call gets.
struct PreparedService<S> {
    service: S,
    /// A clone of the service, and what services see of the connection. It is made when a reply was sent, so
    /// that no client waits for it.
    next: Option<(S, Extensions)>,
}

impl<S> fmt::Debug for Acceptor<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Acceptor").field("info", &self.info).finish_non_exhaustive()
    }
}

impl<S: GrpcService> Accept for Acceptor<S> {
    fn accept(&self, stream: Stream, head: RequestHeaders, is_last: bool) {
        self.accepted.fetch_add(1, Ordering::Relaxed);
        let _context = self.shared.runtime.enter();
        let mut drives = is_last.then(|| Arc::clone(&stream.session));
        // Calls catch the panics of handlers themselves. This is for a service that panics when it is cloned
        // or dropped: the stream is dropped then, which resets the call, and the thread that polls for others
        // goes on.
        run_foreign("a service that begins or ends a call", || self.begin(stream, head, &mut drives));
        if let Some(session) = drives {
            session.drive();
        }
    }

    fn accept_local(self: Arc<Self>, stream: Stream, head: Arc<RequestHeaders>, mut call: LocalCall) {
        self.accepted.fetch_add(1, Ordering::Relaxed);
        let runtime = self.shared.runtime.clone();
        runtime.spawn(async move {
            if call.begin(&stream).await {
                let info = self.local_info.get_or_init(|| self.info.in_process());
                let (service, extensions) = self.next(&lock(&self.prepared).service, info);
                // In a box, because a future that is spawned is moved several times.
                Box::pin(self.call(stream, Arc::unwrap_or_clone(head), service, extensions)).await;
            }
        });
    }
}

impl<S: GrpcService> Acceptor<S> {
    /// Begins a call. Drives the session that is in `drives`, and takes it out, if the call was polled here.
    fn begin(&self, stream: Stream, head: RequestHeaders, drives: &mut Option<Arc<Session>>) {
        let ServerShared { limits, runtime, alone, paths } = &*self.shared;
        let path = head.path.clone();
        // The last call drives anyway.
        let session = drives.is_none().then(|| Arc::clone(&stream.session));
        let (service, extensions) = self.prepared();
        let mut call = self.call(stream, head, service, extensions);
        let may_run = limits.poll_in_place && paths.is_quick(path.path());
        let right = if may_run { InPlace::begin(paths.have_slow(), *alone) } else { None };
        let Some(right) = right else {
            runtime.spawn(call);
            task_is_ready();
            return;
        };
        let is_last = drives.is_some();
        call.drives = is_last;
        let (waits, poll_time) = call.poll_in_place(right.started());
        let drives = drives.take().filter(|_| std::mem::take(&mut call.drives));
        let took = right.end().map(|took| took.saturating_sub(poll_time));
        let timer = if waits { None } else { call.timer.take() };
        if waits {
            if let Some(timer) = &call.timer {
                timer.leaves_this_thread();
            }
            // Before the session drives, because that may take other calls, and this one has to be polled
            // when it can go on.
            runtime.spawn(call);
            task_is_ready();
        }
        // The client waits for the reply, and for nothing of what follows.
        if let Some(session) = drives {
            session.drive();
        }
        drop(timer);
        if let Some(session) = session
            && took.is_some_and(|took| took > SHARED)
        {
            session.drive();
        }
        if let Some(took) = took {
            paths.took(path.path(), took);
        }
        if is_last {
            self.prepare();
        }
    }

    fn call(&self, stream: Stream, head: RequestHeaders, service: S, extensions: Extensions) -> Call<S> {
        let timeout = match (grpc_timeout(&head.headers), self.shared.limits.timeout) {
            (Some(client), Some(server)) => Some(client.min(server)),
            (client, server) => client.or(server),
        };
        let stream = Arc::new(stream);
        let request = request(Arc::clone(&stream), head, extensions);
        Call::new(stream, service, request, timeout)
    }

    /// Returns a clone of the service, and what services see of the connection.
    fn prepared(&self) -> (S, Extensions) {
        let mut prepared = lock(&self.prepared);
        prepared.next.take().unwrap_or_else(|| self.next(&prepared.service, &self.info))
    }

    /// Makes what the next call gets, unless it is there.
    fn prepare(&self) {
        let mut prepared = lock(&self.prepared);
        if prepared.next.is_none() {
            prepared.next = Some(self.next(&prepared.service, &self.info));
        }
    }

    fn next(&self, service: &S, info: &RdmaConnectInfo) -> (S, Extensions) {
        let mut extensions = Extensions::new();
        extensions.insert(info.clone());
        extensions.insert(self.addresses.clone());
        (service.clone(), extensions)
    }
}

/// Makes the request that services see, equal to the one that tonic makes of the same call over HTTP/2.
fn request(stream: Arc<Stream>, head: RequestHeaders, mut extensions: Extensions) -> Request<Body> {
    let RequestHeaders { path, authority, headers } = head;
    let mut uri = http::uri::Parts::default();
    uri.path_and_query = Some(path);
    if authority.is_some() {
        uri.scheme = Some(Scheme::HTTP);
        uri.authority = authority;
    }
    extensions.insert(LandingSwitch(Arc::downgrade(&stream) as Weak<dyn LandingTarget>));
    let mut request = Request::new(Body::new(RequestBody::new(stream)));
    *request.method_mut() = Method::POST;
    // A path alone, and a path with scheme and authority, are URIs.
    *request.uri_mut() = Uri::from_parts(uri).unwrap_or_default();
    *request.version_mut() = Version::HTTP_2;
    *request.headers_mut() = headers;
    *request.extensions_mut() = extensions;
    request
}

/// Lets a connection end: because of its age, because it is idle, or because the server shuts down.
async fn watch_over<S>(
    session: Arc<Session>,
    acceptor: Arc<Acceptor<S>>,
    mut stop: Option<watch::Receiver<()>>,
) {
    let limits = &acceptor.shared.limits;
    let old = limits.max_connection_age.map(jittered);
    let (reason, grace) = tokio::select! {
        _ = session.closed() => return,
        () = stopped(stop.as_mut()) => ("the server shuts down", Some(limits.shutdown_grace)),
        () = after(old) => ("the connection has reached its age", limits.max_connection_age_grace),
        () = idle(&session, &acceptor.accepted, limits.max_connection_idle) => {
            ("the connection was idle", Some(limits.shutdown_grace))
        }
    };
    session.go_away(reason);
    let ended = tokio::select! {
        _ = session.closed() => true,
        () = after(grace) => false,
        () = async {
            stopped(stop.as_mut()).await;
            after(Some(limits.shutdown_grace)).await;
        } => false,
    };
    if !ended {
        tracing::debug!(peer = %acceptor.info.peer_addr(), reason, "calls were in flight longer than their grace");
        session.abort();
    }
}

/// Waits for the server's shutdown. Stays pending without graceful shutdown.
async fn stopped(stop: Option<&mut watch::Receiver<()>>) {
    // An error means that the server's future was dropped, which is a shutdown, too.
    drop(or_pending(stop.map(|stop| stop.changed())).await);
}

async fn after(time: Option<Duration>) {
    or_pending(time.map(tokio::time::sleep)).await;
}

/// Waits for the end of `future`. Stays pending without one.
async fn or_pending<F: Future>(future: Option<F>) -> F::Output {
    match future {
        Some(future) => future.await,
        None => pending().await,
    }
}

/// Waits until there was no call for `limit`.
async fn idle(session: &Session, accepted: &AtomicU64, limit: Option<Duration>) {
    /// Checks in that time.
    const POLLS: u32 = 4;
    let Some(limit) = limit else { return pending().await };
    let (mut last, mut quiet) = (accepted.load(Ordering::Relaxed), 0);
    while quiet < POLLS {
        tokio::time::sleep(limit / POLLS).await;
        let now = accepted.load(Ordering::Relaxed);
        quiet = if now == last && session.active_streams() == 0 { quiet + 1 } else { 0 };
        last = now;
    }
}

/// Returns `age`, up to a tenth more or less, so that connections that were made together do not all end
/// together.
fn jittered(age: Duration) -> Duration {
    age.mul_f64(0.9 + 0.2 * fastrand::f64())
}

/// The error of a service or of a body.
type BoxError = Box<dyn std::error::Error + Send + Sync>;

#[cfg(test)]
mod plaintext_tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    #[tokio::test]
    async fn a_server_without_tls_is_found() {
        assert!(is_plaintext(Server::builder()).await);
        assert!(is_plaintext(Server::builder().accept_http1(true)).await);
    }

    #[cfg(feature = "_tls-any")]
    #[tokio::test]
    async fn a_server_with_tls_is_found() {
        use tonic::transport::ServerTlsConfig;

        let identity = support::Authority::new("test").issue("server");
        let server = Server::builder().tls_config(ServerTlsConfig::new().identity(identity)).unwrap();
        assert!(!is_plaintext(server).await);
    }
}
