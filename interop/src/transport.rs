//! The transport of the calls: ours, or tonic's own TCP, which shows whether a failed case is a fault of our transport.
//! [`Target::connect`] makes all connections of a client, and [`Listener`] all connections of a server.

use std::fmt;
use std::future::Future;
use std::net::SocketAddr;

use clap::ValueEnum;
use tokio::net::TcpListener;
use tonic::service::Routes;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Channel, Endpoint, Server};
use tonic_rdma::{Config, RdmaConnector, RdmaIncoming};

use crate::Failure;
use crate::failure::chain;
use crate::tls::{ClientTls, ServerTls};

/// A transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Transport {
    /// Our transport: RDMA if both ends have it, and TCP otherwise.
    Rdma,
    /// tonic's own TCP.
    Tcp,
}

impl fmt::Display for Transport {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Rdma => "rdma",
            Self::Tcp => "tcp",
        })
    }
}

/// A port that a server listens on.
#[derive(Debug)]
pub(crate) enum Listener {
    Rdma(RdmaIncoming),
    Tcp(TcpIncoming, SocketAddr),
}

impl Listener {
    /// Listens on `host` and `port`. Our transport takes its configuration from the environment.
    pub(crate) async fn bind(transport: Transport, host: &str, port: u16) -> Result<Self, Failure> {
        let named = |error: std::io::Error| Failure::new(format!("can't listen on {host}:{port}: {error}"));
        Ok(match transport {
            Transport::Rdma => {
                let configuration = configuration()?;
                Self::Rdma(RdmaIncoming::bind_with((host, port), configuration).await.map_err(named)?)
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
            Self::Rdma(incoming) => incoming.local_addr().port(),
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
        let router = server.add_routes(routes);
        let served = match self {
            Self::Rdma(incoming) => router.serve_with_incoming_shutdown(incoming, ended).await,
            Self::Tcp(incoming, _) => router.serve_with_incoming_shutdown(incoming, ended).await,
        };
        served.map_err(|error| Failure::new(format!("can't serve: {}", chain(&error))))
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

/// A channel, and the transport that it uses.
#[derive(Debug)]
pub(crate) struct Connected {
    pub(crate) channel: Channel,
    /// Transport and reason, such as `rdma: soft device`.
    pub(crate) verdict: String,
}

/// A connection before its transport and device are checked.
struct UncheckedConnection {
    channel: Channel,
    carrier: Transport,
    device: Option<String>,
    reason: String,
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
            Transport::Tcp => {
                let channel = endpoint.connect().await.map_err(|error| self.unreachable(&error))?;
                let reason = "tonic's own transport".to_owned();
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
        let carrier = match info.verdict() {
            tonic_rdma::Verdict::Rdma => Transport::Rdma,
            tonic_rdma::Verdict::Tcp => Transport::Tcp,
        };
        let (device, reason) = (info.device().map(str::to_owned), info.reason().to_owned());
        Ok(UncheckedConnection { channel, carrier, device, reason })
    }

    /// Returns host and port in the form of a URI.
    fn authority(&self) -> String {
        if self.host.contains(':') && !self.host.starts_with('[') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }

    fn unreachable(&self, error: &tonic::transport::Error) -> Failure {
        Failure::new(format!("can't connect to {}: {}", self.authority(), chain(error)))
    }
}

fn configuration() -> Result<Config, Failure> {
    Config::from_env().map_err(|error| Failure::new(error.to_string()))
}
