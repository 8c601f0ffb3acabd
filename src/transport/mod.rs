//! tonic's transport: a connector for clients, an incoming stream for servers.
//!
//! This layer has the connector and the listener that tonic takes, a channel over several endpoints
//! ([`balance`]), and the codec that sends large fields without a copy ([`gather`]). It does not read the
//! bytes that the [`endpoint`](crate::endpoint)'s streams carry.

pub(crate) mod balance;
pub mod gather;
pub(crate) mod request;

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};

use http::Uri;
use http::uri::Scheme;
use tokio::net::{TcpListener, ToSocketAddrs};
use tokio::sync::watch;
use tokio_stream::Stream;
use tonic::transport::server::Connected;
use tower_service::Service;

use crate::endpoint::{Config, Dialer, EndpointStream, Listener, RdmaConnectInfo};
use crate::error::{RdmaError, RdmaErrorKind};

pub use self::request::{RdmaRequestExt, RemoteAddresses};

/// Connects a tonic channel: over RDMA where both sides have it, and over TCP elsewhere, if the [`Config`]'s
/// policy allows that.
///
/// ```no_run
/// # async fn example() -> Result<(), tonic::transport::Error> {
/// use tonic::transport::Endpoint;
/// use tonic_rdma::RdmaConnector;
///
/// let connector = RdmaConnector::new();
/// let channel = Endpoint::from_static("http://ps0:50051").connect_with_connector(connector.clone()).await?;
/// if let Some(info) = connector.last_connection() {
///     println!("{} because {}", info.verdict(), info.reason());
/// }
/// # drop(channel);
/// # Ok(())
/// # }
/// ```
///
/// Clones share the list of stock servers, and the last connection.
#[derive(Clone, Debug)]
pub struct RdmaConnector {
    dialer: Dialer,
    last: watch::Sender<Option<RdmaConnectInfo>>,
}

impl RdmaConnector {
    /// Makes a connector with the configuration of the environment ([`Config::from_env`]). If a variable has
    /// a value that can't be used, every connect fails with an error that names the variable.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// use tonic::transport::Endpoint;
    /// use tonic_rdma::RdmaConnector;
    ///
    /// // The first call dials.
    /// let channel = Endpoint::from_static("http://ps0:50051").connect_with_connector_lazy(RdmaConnector::new());
    /// # drop(channel);
    /// # }
    /// ```
    pub fn new() -> Self {
        Self { dialer: Dialer::configured(None), last: watch::Sender::default() }
    }

    /// Sets the configuration of the connections, in place of that of the environment. Clones that were made
    /// before keep theirs, and [`last_connection`](Self::last_connection) of each shows its own connections. So
    /// does [`watch_connection`](Self::watch_connection).
    ///
    /// ```
    /// use tonic_rdma::{Config, Policy, RdmaConnector};
    ///
    /// let connector = RdmaConnector::new().config(Config::default().policy(Policy::Require));
    /// # assert!(connector.last_connection().is_none());
    /// ```
    #[must_use]
    pub fn config(self, config: Config) -> Self {
        Self { dialer: Dialer::new(config), last: watch::Sender::default() }
    }

    /// Returns what was negotiated for the last connection of this connector and its clones; `None` before
    /// the first connection. The counters in it are live.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use tonic::transport::{Endpoint, Server};
    /// # use tonic_rdma::{RdmaConnector, RdmaIncoming};
    /// # let incoming = RdmaIncoming::bind("127.0.0.1:0").await?;
    /// # let endpoint = Endpoint::from_shared(format!("http://{}", incoming.local_addr()))?;
    /// # let (_reporter, service) = tonic_health::server::health_reporter();
    /// # tokio::spawn(Server::builder().add_service(service).serve_with_incoming(incoming));
    /// let connector = RdmaConnector::new();
    /// let channel = endpoint.connect_with_connector(connector.clone()).await?;
    /// let info = connector.last_connection().expect("a connection was made");
    /// println!("{} on {:?}, because {}", info.verdict(), info.device(), info.reason());
    /// # assert_eq!(info.device(), Some("soft0"));
    /// # drop(channel);
    /// # Ok(())
    /// # }
    /// ```
    pub fn last_connection(&self) -> Option<RdmaConnectInfo> {
        self.last.borrow().clone()
    }

    /// Returns a receiver that is told of each new connection of this connector and its clones, for a program
    /// that acts on a change of the transport. Its value is that of [`last_connection`](Self::last_connection).
    ///
    /// A connection keeps its transport for life, so the transport changes with the next connection: after the
    /// end of an RDMA connection, the channel's next one may be of TCP, and the one after that of RDMA again.
    /// The receiver gets the latest connection only, which need not be taken. But the next connection waits for a
    /// borrowed value, so don't hold one across an `await`. With a
    /// [`BalancedChannel`](crate::BalancedChannel), it is the latest connection to any of the endpoints.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use tonic::transport::{Endpoint, Server};
    /// # use tonic_rdma::{RdmaConnector, RdmaIncoming, Verdict};
    /// # let incoming = RdmaIncoming::bind("127.0.0.1:0").await?;
    /// # let endpoint = Endpoint::from_shared(format!("http://{}", incoming.local_addr()))?;
    /// # let (_reporter, service) = tonic_health::server::health_reporter();
    /// # tokio::spawn(Server::builder().add_service(service).serve_with_incoming(incoming));
    /// let connector = RdmaConnector::new();
    /// let mut connections = connector.watch_connection();
    /// let watching = tokio::spawn(async move {
    ///     while connections.changed().await.is_ok() {
    ///         if let Some(info) = &*connections.borrow_and_update() {
    ///             println!("{}: {} because {}", info.peer_addr(), info.verdict(), info.reason());
    /// #           assert_eq!(info.verdict(), Verdict::Rdma);
    /// #           return true;
    ///         }
    ///     }
    /// #   false
    /// });
    /// let channel = endpoint.connect_with_connector(connector).await?;
    /// # assert!(watching.await?);
    /// # drop(channel);
    /// # Ok(())
    /// # }
    /// ```
    pub fn watch_connection(&self) -> watch::Receiver<Option<RdmaConnectInfo>> {
        self.last.subscribe()
    }

    async fn connect(self, uri: Uri) -> Result<EndpointStream, RdmaError> {
        let (host, port) = host_and_port(&uri)?;
        let stream = self.dialer.dial(host, port).await?;
        self.last.send_replace(Some(stream.info().clone()));
        Ok(stream)
    }
}

impl Default for RdmaConnector {
    fn default() -> Self {
        Self::new()
    }
}

impl Service<Uri> for RdmaConnector {
    type Response = EndpointStream;
    type Error = RdmaError;
    type Future = Pin<Box<dyn Future<Output = Result<EndpointStream, RdmaError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), RdmaError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        Box::pin(self.clone().connect(uri))
    }
}

/// Returns the host and the port of a URI.
///
/// # Errors
/// The URI has no host, or is the one that tonic's `Endpoint` shows for a Unix socket.
pub(crate) fn host_and_port(uri: &Uri) -> Result<(&str, u16), RdmaError> {
    let invalid = |reason| RdmaError::new(RdmaErrorKind::InvalidEndpoint, format!("{uri}: {reason}"));
    let host = uri.host().ok_or_else(|| invalid("no host to connect to"))?;
    if host == "tonic" && uri.port().is_none() && !is_tls(uri) {
        return Err(invalid(
            "tonic shows a `unix:` address as this host, and only host and port can be connected to, such as \
             http://127.0.0.1:50051; for a host of this name write the port: http://tonic:80",
        ));
    }
    // An IPv6 address stands in brackets in a URI, and without them everywhere else.
    let host = host.trim_start_matches('[').trim_end_matches(']');
    Ok((host, uri.port_u16().unwrap_or(if is_tls(uri) { 443 } else { 80 })))
}

/// Returns whether calls to `uri` go over TLS, and so over HTTP/2.
pub(crate) fn is_tls(uri: &Uri) -> bool {
    uri.scheme() == Some(&Scheme::HTTPS)
}

/// Connections of RDMA peers and of stock gRPC clients, on one port.
///
/// ```no_run
/// # async fn example(service: tonic::service::Routes) -> Result<(), Box<dyn std::error::Error>> {
/// use tonic::transport::Server;
/// use tonic_rdma::RdmaIncoming;
///
/// let incoming = RdmaIncoming::bind("0.0.0.0:50051").await?;
/// Server::builder().add_routes(service).serve_with_incoming(incoming).await?;
/// # Ok(())
/// # }
/// ```
///
/// tonic's graceful shutdown works as over TCP: `serve_with_incoming_shutdown` drops this stream, which
/// closes the port, and lets the connections finish. It returns when the last response was written. A process
/// that ends at once may take a long response with it before a slow client has read it, so
/// [`RdmaServer`](crate::RdmaServer) waits for its clients.
#[derive(Debug)]
pub struct RdmaIncoming {
    listener: Listener,
}

impl RdmaIncoming {
    /// Listens on `address` with the configuration of the environment ([`Config::from_env`]).
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> std::io::Result<()> {
    /// use tonic_rdma::RdmaIncoming;
    ///
    /// let incoming = RdmaIncoming::bind("127.0.0.1:0").await?; // port 0 takes a free one
    /// println!("listening on {}", incoming.local_addr());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The address does not resolve, is in use, or needs a right that this user lacks, or a variable has a
    /// value that can't be used. The error names the cause, and says what to do.
    pub async fn bind(address: impl ToSocketAddrs) -> io::Result<Self> {
        Self::builder().bind(address).await
    }

    /// Returns a builder, for a configuration or a socket of your own.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use tonic_rdma::{Config, Policy, RdmaIncoming};
    ///
    /// let config = Config::default().policy(Policy::Require);
    /// let incoming = RdmaIncoming::builder().config(config).bind("127.0.0.1:0").await?;
    /// # drop(incoming);
    /// # Ok(())
    /// # }
    /// ```
    pub fn builder() -> RdmaIncomingBuilder {
        RdmaIncomingBuilder { config: None }
    }

    fn new(listener: TcpListener, config: Config) -> io::Result<Self> {
        Ok(Self { listener: Listener::new(listener, config)? })
    }

    /// Returns the listener, whose connections may carry native calls.
    pub(crate) fn into_listener(self) -> Listener {
        self.listener
    }

    /// Returns the address that the listener listens on.
    pub fn local_addr(&self) -> SocketAddr {
        self.listener.local_addr()
    }
}

/// The settings of an [`RdmaIncoming`], from [`RdmaIncoming::builder`].
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use tonic_rdma::{Config, Policy, RdmaIncoming, RdmaIncomingBuilder};
///
/// let builder: RdmaIncomingBuilder = RdmaIncoming::builder().config(Config::default().policy(Policy::TcpOnly));
/// let (one, other) = (builder.clone().bind("127.0.0.1:0").await?, builder.bind("127.0.0.1:0").await?);
/// # drop((one, other));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use = "a builder does nothing until it listens"]
pub struct RdmaIncomingBuilder {
    /// The environment decides if there is none.
    config: Option<Config>,
}

impl RdmaIncomingBuilder {
    /// Sets the configuration of the connections. Default: [`Config::from_env`], which is read when the
    /// listener is made.
    pub fn config(mut self, config: Config) -> Self {
        self.config = Some(config);
        self
    }

    /// Listens on `address`.
    ///
    /// # Errors
    /// The address can't be listened on, as for [`RdmaIncoming::bind`], or a setting or a variable has a
    /// value that can't be used.
    pub async fn bind(self, address: impl ToSocketAddrs) -> io::Result<RdmaIncoming> {
        let config = self.configured()?;
        RdmaIncoming::new(TcpListener::bind(address).await.map_err(explain)?, config)
    }

    /// Takes over a listening socket, such as a socket from systemd or a socket with options of your own.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> std::io::Result<()> {
    /// use tokio::net::TcpSocket;
    /// use tonic_rdma::{Config, RdmaIncoming};
    ///
    /// let socket = TcpSocket::new_v4()?;
    /// socket.set_reuseaddr(true)?;
    /// socket.bind("127.0.0.1:0".parse().expect("an address"))?;
    /// let incoming = RdmaIncoming::builder().config(Config::default()).listen(socket.listen(1024)?)?;
    /// # drop(incoming);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// A setting or a variable has a value that can't be used, or the socket has no local address.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub fn listen(self, listener: TcpListener) -> io::Result<RdmaIncoming> {
        let config = self.configured()?;
        RdmaIncoming::new(listener, config)
    }

    fn configured(self) -> io::Result<Config> {
        let config = self.config.map_or_else(Config::from_env, Ok);
        config.map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))
    }
}

impl Stream for RdmaIncoming {
    type Item = io::Result<EndpointStream>;

    fn poll_next(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<io::Result<EndpointStream>>> {
        Pin::new(&mut self.listener).poll_next(context).map(|next| next.map(Ok))
    }
}

impl Connected for EndpointStream {
    type ConnectInfo = RdmaConnectInfo;

    fn connect_info(&self) -> RdmaConnectInfo {
        self.info().clone()
    }
}

/// Adds advice to the error of a socket that could not be bound.
fn explain(error: io::Error) -> io::Error {
    let advice = match error.kind() {
        io::ErrorKind::AddrInUse => {
            "the address is in use: another process listens there; stop it or take another port (0 picks a free one)"
        }
        io::ErrorKind::PermissionDenied => {
            "permission denied: ports below 1024 need CAP_NET_BIND_SERVICE; take a higher port or grant the capability"
        }
        io::ErrorKind::AddrNotAvailable => {
            "the address is not available: no interface of this machine has that address"
        }
        _ => return error,
    };
    io::Error::new(error.kind(), RdmaError::because(RdmaErrorKind::Listen, advice, error))
}
