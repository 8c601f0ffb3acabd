//! The four columns: how each serves and how each connects.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use support::Port;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tonic::body::Body;
use tonic::service::Routes;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Endpoint, Server};
use tonic_rdma::{CallConfig, Config, RdmaChannel, RdmaConnector, RdmaIncoming, RdmaServer, Verdict};
use tower::layer::layer_fn;
use tower::layer::util::Identity;
use tower::util::BoxCloneSyncService;
use tower::{Layer, Service};

use crate::caller::Caller;
use crate::channel::{AnyChannel, BoxError};
use crate::probe::Probe;

/// One way to carry gRPC calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Column {
    /// tonic's own channel and server, over TCP.
    Tcp,
    /// tonic's channel and server over our streams: HTTP/2 over RDMA.
    DropIn,
    /// Our channel and server: no HTTP/2.
    Native,
    /// The same, where calls stay in the process.
    InProcess,
}

impl Column {
    /// All columns, in the order of the table.
    pub(crate) const ALL: [Self; 4] = [Self::Tcp, Self::DropIn, Self::Native, Self::InProcess];

    /// Returns the heading of the column.
    pub(crate) fn heading(self) -> &'static str {
        match self {
            Self::Tcp => "stock TCP",
            Self::DropIn => "drop-in",
            Self::Native => "native",
            Self::InProcess => "in process",
        }
    }

    /// Finds a column by the name that `Debug` prints.
    pub(crate) fn named(name: &str) -> Self {
        Self::ALL.into_iter().find(|column| format!("{column:?}") == name).expect("the name of a column")
    }
}

/// Settings of a server, in the terms that all columns share. The default leaves everything as the libraries
/// have it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ServerSettings {
    /// Longest time that a call may take.
    pub(crate) timeout: Option<Duration>,
    /// Number of calls that a connection may have open.
    pub(crate) streams: Option<u32>,
    /// Age at which a connection is asked to end, and the time that its calls get after that, if they get no
    /// more.
    pub(crate) age: Option<(Duration, Option<Duration>)>,
    /// Time without calls after which a connection is asked to end.
    pub(crate) idle: Option<Duration>,
    /// Time of silence before a ping, and time to answer it.
    pub(crate) keepalive: Option<(Duration, Duration)>,
    /// Longest head of a request, in bytes.
    pub(crate) head: Option<u32>,
}

/// A running server. It runs until its runtime ends.
pub(crate) struct Running {
    pub(crate) address: SocketAddr,
    stop: oneshot::Sender<()>,
    server: JoinHandle<Result<(), BoxError>>,
}

impl Running {
    /// Begins a graceful shutdown. The server has ended when the returned task has.
    pub(crate) fn shut_down(self) -> JoinHandle<Result<(), BoxError>> {
        self.stop.send(()).unwrap();
        self.server
    }

    /// Shuts down gracefully, and waits for the end.
    pub(crate) async fn end(self) {
        self.shut_down().await.unwrap().unwrap();
    }

    /// Returns the endpoint by which clients reach the server.
    pub(crate) fn endpoint(&self) -> Endpoint {
        Endpoint::from_shared(format!("http://{}", self.address)).unwrap()
    }
}

const ANY_PORT: &str = "127.0.0.1:0";

/// What layers wrap: the routes of tonic's server, or the services of ours.
pub(crate) type Inner = BoxCloneSyncService<http::Request<Body>, http::Response<Body>, Infallible>;

/// What a server serves.
enum Served {
    /// One service, which our server finds by its name.
    Service(Probe),
    /// Routes, which our server has from tonic.
    Routes(Routes),
}

impl Column {
    /// Serves `probe` with default settings on a free port.
    pub(crate) async fn serve(self, probe: Probe) -> Running {
        self.serve_with(ServerSettings::default(), probe).await
    }

    /// Serves `probe` on a free port.
    pub(crate) async fn serve_with(self, settings: ServerSettings, probe: Probe) -> Running {
        self.serve_routes(ANY_PORT, settings, Identity::new(), Served::Service(probe)).await
    }

    /// Serves `probe` on a reserved port.
    pub(crate) async fn serve_on(self, port: &Port, probe: Probe) -> Running {
        let address = port.address.to_string();
        self.serve_routes(&address, ServerSettings::default(), Identity::new(), Served::Service(probe)).await
    }

    /// Serves `routes` inside of `layer` on a free port.
    pub(crate) async fn serve_layered<L, B>(self, layer: L, routes: Routes) -> Running
    where
        L: Layer<Inner> + Clone + Send + Sync + 'static,
        L::Service:
            Service<http::Request<Body>, Response = http::Response<B>> + Clone + Send + Sync + 'static,
        <L::Service as Service<http::Request<Body>>>::Future: Send,
        <L::Service as Service<http::Request<Body>>>::Error: Into<BoxError> + Send,
        B: http_body::Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        self.serve_routes(ANY_PORT, ServerSettings::default(), layer, Served::Routes(routes)).await
    }

    /// Serves `served` inside of `layer` on `address`.
    async fn serve_routes<L, B>(
        self,
        address: &str,
        settings: ServerSettings,
        layer: L,
        served: Served,
    ) -> Running
    where
        L: Layer<Inner> + Clone + Send + Sync + 'static,
        L::Service:
            Service<http::Request<Body>, Response = http::Response<B>> + Clone + Send + Sync + 'static,
        <L::Service as Service<http::Request<Body>>>::Future: Send,
        <L::Service as Service<http::Request<Body>>>::Error: Into<BoxError> + Send,
        B: http_body::Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        let (stop, stopped) = oneshot::channel::<()>();
        let signal = async {
            // If the handle was dropped, the server runs on.
            if stopped.await.is_err() {
                std::future::pending::<()>().await;
            }
        };
        let routes = match &served {
            Served::Service(probe) => Routes::new(probe.clone()),
            Served::Routes(routes) => routes.clone(),
        };
        let stock = stock_server(settings).layer(layer.clone());
        let router = stock.layer(layer_fn(BoxCloneSyncService::new)).add_routes(routes);
        match self {
            Self::Tcp => {
                let incoming = TcpIncoming::bind(address.parse().unwrap()).unwrap().with_nodelay(Some(true));
                let address = incoming.local_addr().unwrap();
                let serving = router.serve_with_incoming_shutdown(incoming, signal);
                let server = tokio::spawn(async move { serving.await.map_err(Into::into) });
                Running { address, stop, server }
            }
            Self::DropIn => {
                let incoming = RdmaIncoming::builder().config(self.config(None)).bind(address).await.unwrap();
                let address = incoming.local_addr();
                let serving = router.serve_with_incoming_shutdown(incoming, signal);
                let server = tokio::spawn(async move { serving.await.map_err(Into::into) });
                Running { address, stop, server }
            }
            Self::Native | Self::InProcess => {
                let config = self.config(settings.keepalive);
                let incoming = RdmaIncoming::builder().config(config).bind(address).await.unwrap();
                let address = incoming.local_addr();
                let server = RdmaServer::new().calls(call_config(settings)).layer(layer);
                let server = server.layer(layer_fn(BoxCloneSyncService::new));
                let server = match served {
                    Served::Service(probe) => server.add_service(probe),
                    Served::Routes(routes) => server.add_routes(routes),
                };
                let serving = server.serve_with_incoming_shutdown(incoming, signal);
                let server = tokio::spawn(async move { serving.await.map_err(Into::into) });
                Running { address, stop, server }
            }
        }
    }

    /// Connects to a running server, and checks that the connection is of this column.
    pub(crate) async fn client(self, running: &Running) -> Caller {
        Caller::new(self.connect(running.endpoint()).await.unwrap())
    }

    /// Connects, and checks that the connection is of this column.
    pub(crate) async fn connect(self, endpoint: Endpoint) -> Result<AnyChannel, BoxError> {
        match self {
            Self::Tcp => Ok(AnyChannel::Tonic(endpoint.connect().await?)),
            Self::DropIn => {
                let connector = RdmaConnector::new().config(self.config(None));
                let channel = endpoint.connect_with_connector(connector.clone()).await?;
                let info = connector.last_connection().unwrap();
                assert_eq!(info.verdict(), Verdict::Rdma, "{}", info.reason());
                Ok(AnyChannel::Tonic(channel))
            }
            Self::Native | Self::InProcess => self.connect_native(endpoint, None).await,
        }
    }

    /// Connects with pings of our own: after `interval` of silence, to be answered within `timeout`. HTTP/2's
    /// are the endpoint's.
    pub(crate) async fn connect_watched(
        self,
        endpoint: Endpoint,
        interval: Duration,
        timeout: Duration,
    ) -> Result<AnyChannel, BoxError> {
        match self {
            Self::Tcp | Self::DropIn => self.connect(endpoint).await,
            Self::Native | Self::InProcess => self.connect_native(endpoint, Some((interval, timeout))).await,
        }
    }

    /// Connects a client that takes heads of responses of up to `bytes` bytes.
    pub(crate) async fn connect_with_head(self, endpoint: Endpoint, bytes: u32) -> AnyChannel {
        match self {
            Self::Tcp | Self::DropIn => {
                self.connect(endpoint.http2_max_header_list_size(bytes)).await.unwrap()
            }
            Self::Native | Self::InProcess => {
                let limits = CallConfig::default().max_header_list_size(bytes as usize);
                let builder = RdmaChannel::builder(endpoint).config(self.config(None)).calls(limits);
                AnyChannel::Native(builder.connect().await.unwrap())
            }
        }
    }

    /// Returns a channel that connects with its first call.
    pub(crate) fn connect_lazily(self, endpoint: &Endpoint) -> AnyChannel {
        match self {
            Self::Tcp => AnyChannel::Tonic(endpoint.connect_lazy()),
            Self::DropIn => {
                let connector = RdmaConnector::new().config(self.config(None));
                AnyChannel::Tonic(endpoint.connect_with_connector_lazy(connector))
            }
            Self::Native | Self::InProcess => {
                let builder = RdmaChannel::builder(endpoint.clone()).config(self.config(None));
                AnyChannel::Native(builder.connect_lazy())
            }
        }
    }

    /// Connects a native channel, and checks that its connection carries native calls, in this process or out of
    /// it. `keepalive` sets our own pings.
    async fn connect_native(
        self,
        endpoint: Endpoint,
        keepalive: Option<(Duration, Duration)>,
    ) -> Result<AnyChannel, BoxError> {
        let channel = RdmaChannel::builder(endpoint).config(self.config(keepalive)).connect().await?;
        let info = channel.last_connection().unwrap();
        assert!(info.is_native(), "{}: {}", info.verdict(), info.reason());
        assert_eq!(info.is_in_process(), self == Self::InProcess, "{}", info.reason());
        Ok(AnyChannel::Native(channel))
    }

    /// Returns settings of our transport. Our own pings are never sent unless `keepalive` asks for them, so that
    /// only HTTP/2's can find a peer that hangs.
    fn config(self, keepalive: Option<(Duration, Duration)>) -> Config {
        const NEVER: Duration = Duration::from_secs(3600);
        let (interval, timeout) = keepalive.unwrap_or((NEVER, NEVER));
        support::config().ping_interval(interval).ping_timeout(timeout).in_process(self == Self::InProcess)
    }
}

/// Returns tonic's server with `settings`.
fn stock_server(settings: ServerSettings) -> Server {
    let mut server = Server::builder().max_concurrent_streams(settings.streams);
    if let Some(timeout) = settings.timeout {
        server = server.timeout(timeout);
    }
    if let Some((age, grace)) = settings.age {
        server = server.max_connection_age(age);
        if let Some(grace) = grace {
            server = server.max_connection_age_grace(grace);
        }
    }
    if let Some((interval, timeout)) = settings.keepalive {
        server = server.http2_keepalive_interval(Some(interval)).http2_keepalive_timeout(Some(timeout));
    }
    server.http2_max_header_list_size(settings.head)
}

/// Returns limits of native calls with `settings`.
fn call_config(settings: ServerSettings) -> CallConfig {
    let mut config = CallConfig::default();
    if let Some(timeout) = settings.timeout {
        config = config.timeout(timeout);
    }
    if let Some(streams) = settings.streams {
        config = config.max_concurrent_streams(streams);
    }
    if let Some((age, grace)) = settings.age {
        config = config.max_connection_age(age);
        if let Some(grace) = grace {
            config = config.max_connection_age_grace(grace);
        }
    }
    if let Some(idle) = settings.idle {
        config = config.max_connection_idle(idle);
    }
    if let Some(head) = settings.head {
        config = config.max_header_list_size(head as usize);
    }
    config
}
