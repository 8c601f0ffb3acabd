//! The server: native calls, HTTP/2 over RDMA and stock TCP clients on one port.
//!
//! It splits what the listener accepts: HTTP/2 peers go to tonic's server, native ones are served here, by the same service.
//!
//! ```text
//!  serve ── stream ────▶ tonic's Server ──▶ the layers and routes
//!    └───── messages ──▶ connection ──▶ call, polled in place ── waits ──▶ call as a task       ──▶ the same layers and routes
//! ```

mod call;
mod in_place;
mod routes;
mod serve;

use std::convert::Infallible;
use std::fmt;
use std::future::{Future, Pending};

use tokio::net::ToSocketAddrs;
use tonic::server::NamedService;
use tonic::service::Routes;
use tonic::transport::Server;
use tower::ServiceBuilder;
use tower::layer::Layer;
use tower::layer::util::{Identity, Stack};

use self::routes::Named;
use super::calls::CallConfig;
use crate::endpoint::Config;
use crate::transport::RdmaIncoming;

pub use routes::{GrpcService, RdmaRoutes};
pub use serve::ServeError;

/// A gRPC server for all clients on one port: peers that know native calls, peers that send HTTP/2 over RDMA, and stock clients over TCP.
///
/// All of them reach the same services, through the same layers. The negotiation of each connection decides; the server's services find
/// the result in each request ([`RdmaRequestExt::connection`](crate::RdmaRequestExt::connection)). `remote_addr` and `local_addr` of a
/// [`tonic::Request`] return the addresses of the connection's TCP part.
///
/// ```
/// # use tonic::{Request, Response, Status, Streaming};
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
/// #     type ChatStream = tokio_stream::Empty<Result<HelloReply, Status>>;
/// #     async fn chat(&self, _: Request<Streaming<HelloRequest>>) -> Result<Response<Self::ChatStream>, Status> {
/// #         Err(Status::unimplemented("not here"))
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
/// A native call is polled first by the thread that finds it, within the runtime that [`serve`](Self::serve) runs in. A handler that does
/// not wait is done then, and its reply is sent, without a task of its own. A handler that waits goes on as a task. Calls of methods that
/// compute for more than about 50 µs go to tasks at once. A handler that blocks its thread delays other calls, as it does in a task; for
/// such work there is `tokio::task::spawn_blocking`.
///
/// A handler that panics ends its own call with UNKNOWN. A call that the client cancels, and one whose deadline passes, drops its handler.
#[derive(Clone)]
#[must_use]
pub struct RdmaServer<L = Identity> {
    /// The environment decides if there is none.
    config: Option<Config>,
    calls: CallConfig,
    http2: Server,
    layers: ServiceBuilder<L>,
    routes: Routes,
    /// The services that native calls find without these routes; `None` if the user has routes, which may take other paths.
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
    /// Sets the connection's settings for [`serve`](Self::serve) and [`serve_with_shutdown`](Self::serve_with_shutdown). Default:
    /// [`Config::from_env`], which is read when the server begins to listen. An [`RdmaIncoming`] that is handed over has settings of its own.
    pub fn config(mut self, config: Config) -> Self {
        self.config = Some(config);
        self
    }

    /// Sets the limits of native calls.
    pub fn calls(mut self, calls: CallConfig) -> Self {
        self.calls = calls;
        self
    }

    /// Sets the server for HTTP/2 peers, for its settings: windows, keepalive, limits, TLS. Its timeouts, its limits and its `trace_fn`
    /// hold for HTTP/2 peers alone; native calls have those of [`calls`](Self::calls).
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

    /// Puts a tower layer around all services, for all peers. The layer that is added first is the outermost, as with tonic.
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

    /// Adds routes. Paths that they don't have go to the services added before. The fallback of these routes does not count. Native calls of
    /// a server without added routes are quicker.
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

    /// Listens on `address`, and serves until the runtime ends.
    ///
    /// ```no_run
    /// # async fn example() -> Result<(), tonic_rdma::ServeError> {
    /// use tonic_rdma::RdmaServer;
    ///
    /// let (_reporter, health) = tonic_health::server::health_reporter();
    /// RdmaServer::new().add_service(health).serve("0.0.0.0:50051").await
    /// # }
    /// ```
    ///
    /// # Errors
    /// A setting or a variable has a value that can't be used, the address can't be listened on, or tonic's server failed.
    pub async fn serve(self, address: impl ToSocketAddrs) -> Result<(), ServeError>
    where
        L: Layer<RdmaRoutes, Service: GrpcService>,
    {
        let incoming = self.listen(address).await?;
        self.serve_all(incoming, None::<Pending<()>>).await
    }

    /// Listens on `address`, and serves until `signal` is ready. Then it closes the port, lets the calls in flight finish, and returns
    /// when all connections have ended, or after [`CallConfig::shutdown_grace`].
    ///
    /// # Errors
    /// As [`serve`](Self::serve).
    pub async fn serve_with_shutdown(
        self,
        address: impl ToSocketAddrs,
        signal: impl Future<Output = ()>,
    ) -> Result<(), ServeError>
    where
        L: Layer<RdmaRoutes, Service: GrpcService>,
    {
        let incoming = self.listen(address).await?;
        self.serve_with_incoming_shutdown(incoming, signal).await
    }

    /// Serves the connections of `incoming` until the runtime ends.
    ///
    /// # Errors
    /// A limit of the calls has a value that can't be used, or tonic's server failed.
    pub async fn serve_with_incoming(self, incoming: RdmaIncoming) -> Result<(), ServeError>
    where
        L: Layer<RdmaRoutes, Service: GrpcService>,
    {
        self.serve_all(incoming, None::<Pending<()>>).await
    }

    /// Serves the connections of `incoming` until `signal` is ready, and ends as [`serve_with_shutdown`](Self::serve_with_shutdown).
    ///
    /// # Errors
    /// As [`serve_with_incoming`](Self::serve_with_incoming).
    pub async fn serve_with_incoming_shutdown(
        self,
        incoming: RdmaIncoming,
        signal: impl Future<Output = ()>,
    ) -> Result<(), ServeError>
    where
        L: Layer<RdmaRoutes, Service: GrpcService>,
    {
        self.serve_all(incoming, Some(signal)).await
    }

    async fn listen(&self, address: impl ToSocketAddrs) -> Result<RdmaIncoming, ServeError> {
        let config = self.config.clone().map_or_else(Config::from_env, Ok)?;
        config.validate()?;
        self.calls.validate()?;
        Ok(RdmaIncoming::bind_with(address, config).await?)
    }

    async fn serve_all(
        self,
        incoming: RdmaIncoming,
        signal: Option<impl Future<Output = ()>>,
    ) -> Result<(), ServeError>
    where
        L: Layer<RdmaRoutes, Service: GrpcService>,
    {
        self.calls.validate()?;
        let service = self.layers.service(RdmaRoutes::new(self.routes, self.named.unwrap_or_default()));
        serve::serve(incoming, self.http2, service, self.calls, signal).await
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
