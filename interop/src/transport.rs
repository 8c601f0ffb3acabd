//! The transport of the calls: ours, with HTTP/2 or with native calls, or tonic's own TCP, which shows whether a failed case is a
//! fault of our transport.
//! [`Target::connect`] makes all connections of a client, and [`Listener`] all connections of a server.

use std::fmt;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};

use clap::ValueEnum;
use tokio::net::TcpListener;
use tonic::body::Body;
use tonic::codegen::StdError;
use tonic::service::Routes;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Channel, Endpoint, Server};
use tonic_rdma::{
    Config, RdmaChannel, RdmaConnectInfo, RdmaConnector, RdmaIncoming, RdmaRoutes, RdmaServer, Verdict,
};
use tower::layer::layer_fn;
use tower_service::Service;

use crate::Failure;
use crate::failure::chain;
use crate::tls::{ClientTls, ServerTls};

/// A transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Transport {
    /// Our transport: RDMA if both ends have it, and TCP otherwise.
    Rdma,
    /// Our channel and our server: native calls if both ends make them, HTTP/2 over RDMA or TCP otherwise.
    Native,
    /// tonic's own TCP.
    Tcp,
}

impl fmt::Display for Transport {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Rdma => "rdma",
            Self::Native => "native",
            Self::Tcp => "tcp",
        })
    }
}

/// A port that a server listens on.
#[derive(Debug)]
pub(crate) enum Listener {
    Rdma(RdmaIncoming),
    /// The port of our server.
    Native(RdmaIncoming),
    Tcp(TcpIncoming, SocketAddr),
}

impl Listener {
    /// Listens on `host` and `port`. Our transport takes its configuration from the environment.
    pub(crate) async fn bind(transport: Transport, host: &str, port: u16) -> Result<Self, Failure> {
        let named = |error: std::io::Error| Failure::new(format!("can't listen on {host}:{port}: {error}"));
        Ok(match transport {
            Transport::Rdma | Transport::Native => {
                let bound = RdmaIncoming::bind_with((host, port), configuration()?).await;
                let incoming = bound.map_err(named)?;
                if transport == Transport::Native { Self::Native(incoming) } else { Self::Rdma(incoming) }
            }
            Transport::Tcp => {
                let listener = TcpListener::bind((host, port)).await.map_err(named)?;
                let address = listener.local_addr().map_err(named)?;
                Self::Tcp(TcpIncoming::from(listener).with_nodelay(Some(true)), address)
            }
        })
    }

    pub(crate) fn port(&self) -> u16 {
        match self {
            Self::Rdma(incoming) | Self::Native(incoming) => incoming.local_addr().port(),
            Self::Tcp(_, address) => address.port(),
        }
    }

    /// Serves until `ended`.
    pub(crate) async fn serve(
        self,
        tls: Option<ServerTls>,
        routes: Routes,
        ended: impl Future<Output = ()>,
    ) -> Result<(), Failure> {
        let mut server = Server::builder();
        if let Some(tls) = tls {
            let protected = server.tls_config(tls.config());
            server = protected.map_err(|error| Failure::new(format!("--use_tls: {}", chain(&error))))?;
        }
        let failed = |error: &dyn std::error::Error| Failure::new(format!("can't serve: {}", chain(error)));
        match self {
            Self::Rdma(incoming) => {
                let served = server.add_routes(routes).serve_with_incoming_shutdown(incoming, ended).await;
                served.map_err(|error| failed(&error))
            }
            Self::Tcp(incoming, _) => {
                let served = server.add_routes(routes).serve_with_incoming_shutdown(incoming, ended).await;
                served.map_err(|error| failed(&error))
            }
            Self::Native(incoming) => {
                // These routes may be one service for all paths, their fallback, which `add_routes` leaves out.
                let all = layer_fn(move |_: RdmaRoutes| routes.clone());
                let server = RdmaServer::new().http2(server).layer(all);
                let served = server.serve_with_incoming_shutdown(incoming, ended).await;
                served.map_err(|error| failed(&error))
            }
        }
    }
}

/// A server to connect to, with the settings of the connection.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    pub(crate) host: String,
    pub(crate) port: u16,
    pub(crate) transport: Transport,
    /// The transport that the connection has to use.
    pub(crate) require: Option<Transport>,
    /// The RDMA device that the connection has to use.
    pub(crate) require_device: Option<String>,
    /// The host in certificates and requests, if it is not `host`.
    pub(crate) host_override: Option<String>,
    pub(crate) tls: Option<ClientTls>,
}

/// A channel of any transport. Clones share the connection.
#[derive(Clone, Debug)]
pub(crate) enum CallChannel {
    Http2(Channel),
    Native(RdmaChannel),
}

impl Service<http::Request<Body>> for CallChannel {
    type Response = http::Response<Body>;
    type Error = StdError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, StdError>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), StdError>> {
        match self {
            Self::Http2(channel) => channel.poll_ready(context).map_err(Into::into),
            Self::Native(channel) => channel.poll_ready(context).map_err(Into::into),
        }
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        match self {
            Self::Http2(channel) => {
                let response = channel.call(request);
                Box::pin(async move { Ok(response.await?) })
            }
            Self::Native(channel) => {
                let response = channel.call(request);
                Box::pin(async move { Ok(response.await?) })
            }
        }
    }
}

/// A channel, and the transport that it uses.
#[derive(Debug)]
pub(crate) struct Connected {
    pub(crate) channel: CallChannel,
    /// Transport and reason, such as `rdma: soft device`.
    pub(crate) verdict: String,
}

/// A connection before its transport and device are checked.
struct UncheckedConnection {
    channel: CallChannel,
    carrier: Transport,
    device: Option<String>,
    reason: String,
}

impl UncheckedConnection {
    fn new(channel: CallChannel, info: &RdmaConnectInfo) -> Self {
        let carrier = match info.verdict() {
            Verdict::Rdma if info.is_native() => Transport::Native,
            Verdict::Rdma => Transport::Rdma,
            Verdict::Tcp => Transport::Tcp,
        };
        let (device, reason) = (info.device().map(str::to_owned), info.reason().to_owned());
        Self { channel, carrier, device, reason }
    }
}

impl Target {
    /// Connects.
    ///
    /// # Errors
    /// The server can't be reached, or the connection does not use the required transport or device.
    pub(crate) async fn connect(&self) -> Result<Connected, Failure> {
        let endpoint = self.endpoint()?;
        let made = match self.transport {
            Transport::Rdma => self.connect_rdma(endpoint).await?,
            Transport::Native => self.connect_native(endpoint).await?,
            Transport::Tcp => {
                let channel = endpoint.connect().await.map_err(|error| self.unreachable(&error))?;
                let reason = "tonic's own transport".to_owned();
                let channel = CallChannel::Http2(channel);
                UncheckedConnection { channel, carrier: Transport::Tcp, device: None, reason }
            }
        };
        let tls = if self.tls.is_some() { ", with TLS" } else { "" };
        let verdict = format!("{}{tls}: {}", made.carrier, made.reason);
        let missing = |required: &dyn fmt::Display| {
            Err(Failure::new(format!("{required} was required, the connection came out as {verdict}")))
        };
        if let Some(required) = self.require.filter(|required| *required != made.carrier) {
            return missing(&required);
        }
        if let Some(required) =
            self.require_device.as_ref().filter(|required| made.device.as_ref() != Some(*required))
        {
            return missing(required);
        }
        Ok(Connected { channel: made.channel, verdict })
    }

    /// Makes the endpoint. It does not connect yet.
    ///
    /// # Errors
    /// The host or the settings of TLS are invalid.
    pub(crate) fn endpoint(&self) -> Result<Endpoint, Failure> {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        let uri = format!("{scheme}://{}", self.authority());
        let mut endpoint = Endpoint::from_shared(uri)
            .map_err(|error| Failure::new(format!("{} is no address: {error}", self.authority())))?;
        if let Some(host) = &self.host_override {
            let origin = http::Uri::builder().scheme(scheme).authority(host.as_str()).path_and_query("/");
            let origin = origin.build().map_err(|error| {
                Failure::new(format!("--server_host_override: {host:?} is no host: {error}"))
            })?;
            endpoint = endpoint.origin(origin);
        }
        match &self.tls {
            Some(tls) => tls.protect(endpoint, self.host_override.as_ref().unwrap_or(&self.host)),
            None => Ok(endpoint),
        }
    }

    async fn connect_rdma(&self, endpoint: Endpoint) -> Result<UncheckedConnection, Failure> {
        let connector = RdmaConnector::with_config(configuration()?);
        let connected = endpoint.connect_with_connector(connector.clone()).await;
        let channel = connected.map_err(|error| self.unreachable(&error))?;
        let info = connector.last_connection().ok_or_else(|| Failure::new("no connection was made"))?;
        Ok(UncheckedConnection::new(CallChannel::Http2(channel), &info))
    }

    async fn connect_native(&self, endpoint: Endpoint) -> Result<UncheckedConnection, Failure> {
        let connected = RdmaChannel::builder(endpoint).config(configuration()?).connect().await;
        let channel = connected.map_err(|error| self.unreachable(&error))?;
        let info = channel.last_connection().ok_or_else(|| Failure::new("no connection was made"))?;
        Ok(UncheckedConnection::new(CallChannel::Native(channel), &info))
    }

    /// Returns host and port in the form of a URI.
    fn authority(&self) -> String {
        if self.host.contains(':') && !self.host.starts_with('[') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }

    fn unreachable(&self, error: &dyn std::error::Error) -> Failure {
        Failure::new(format!("can't connect to {}: {}", self.authority(), chain(error)))
    }
}

fn configuration() -> Result<Config, Failure> {
    Config::from_env().map_err(|error| Failure::new(error.to_string()))
}
