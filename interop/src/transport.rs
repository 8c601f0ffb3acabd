//! The transport of the calls: ours, with HTTP/2 or with native calls, or tonic's own TCP, which shows
//! whether a failed case is a fault of our transport. [`Target::connect`] makes all connections of a client,
//! and [`Listener`] all connections of a server.

use std::fmt;
use std::future::Future;
use std::net::SocketAddr;

use clap::ValueEnum;
use tokio::net::TcpListener;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::StdError;
use tonic::service::Routes;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Endpoint, Server, ServerTlsConfig};
use tonic_rdma::{Config, RdmaChannel, RdmaConnector, RdmaIncoming, RdmaRoutes, RdmaServer, Verdict};
use tonic_rdma_commands::{Context as _, Failure};
use tower::layer::layer_fn;
use tower::util::BoxCloneSyncService;
use tower::{Service, ServiceExt as _};

use crate::deadline::status_of;
use crate::tls::ClientTls;

/// A transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Transport {
    /// Our transport: RDMA if both ends have it, and TCP otherwise.
    Rdma,
    /// Our channel and our server: native calls if both sides make them, HTTP/2 over RDMA or TCP otherwise.
    Native,
    /// tonic's own TCP.
    Tcp,
}

tonic_rdma_commands::displayed_by_name!(Transport);

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
        let what = || format!("can't listen on {host}:{port}");
        Ok(match transport {
            Transport::Rdma | Transport::Native => {
                let bound = RdmaIncoming::builder().config(configuration()?).bind((host, port)).await;
                let incoming = bound.context(what())?;
                if transport == Transport::Native { Self::Native(incoming) } else { Self::Rdma(incoming) }
            }
            Transport::Tcp => {
                let listener = TcpListener::bind((host, port)).await.context(what())?;
                let address = listener.local_addr()?;
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
        tls: Option<ServerTlsConfig>,
        routes: Routes,
        ended: impl Future<Output = ()>,
    ) -> Result<(), Failure> {
        let mut server = Server::builder();
        if let Some(tls) = tls {
            server = server.tls_config(tls).context("--use_tls")?;
        }
        let served = match self {
            Self::Rdma(incoming) => {
                server.add_routes(routes).serve_with_incoming_shutdown(incoming, ended).await
            }
            Self::Tcp(incoming, _) => {
                server.add_routes(routes).serve_with_incoming_shutdown(incoming, ended).await
            }
            Self::Native(incoming) => {
                // These routes may be one service for all paths, their fallback, which `add_routes` leaves
                // out.
                let all = layer_fn(move |_: RdmaRoutes| routes.clone());
                let server = RdmaServer::new().http2(server).layer(all);
                let served = server.serve_with_incoming_shutdown(incoming, ended).await;
                return served.context("can't serve");
            }
        };
        served.context("can't serve")
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
pub(crate) type CallChannel = BoxCloneSyncService<http::Request<Body>, http::Response<Body>, Status>;

fn boxed<S>(channel: S) -> CallChannel
where
    S: Service<http::Request<Body>, Response = http::Response<Body>> + Clone + Send + Sync + 'static,
    S::Error: Into<StdError> + 'static,
    S::Future: Send,
{
    BoxCloneSyncService::new(channel.map_err(|error: S::Error| status_of(error.into())))
}

/// A channel, and the transport that it uses.
#[derive(Debug)]
pub(crate) struct Connected {
    pub(crate) channel: CallChannel,
    /// Transport and reason, such as `rdma: soft device`.
    pub(crate) verdict: String,
}

impl Target {
    /// Connects.
    ///
    /// # Errors
    /// The server can't be reached, or the connection does not use the required transport or device.
    pub(crate) async fn connect(&self) -> Result<Connected, Failure> {
        let endpoint = self.endpoint()?;
        let what = format!("can't connect to {}", self.authority());
        let (channel, info) = match self.transport {
            Transport::Rdma => {
                let connector = RdmaConnector::new().config(configuration()?);
                let connected = endpoint.connect_with_connector(connector.clone()).await;
                (boxed(connected.context(what)?), connector.last_connection())
            }
            Transport::Native => {
                let connected = RdmaChannel::builder(endpoint).config(configuration()?).connect().await;
                let channel = connected.context(what)?;
                (boxed(channel.clone()), channel.last_connection())
            }
            Transport::Tcp => (boxed(endpoint.connect().await.context(what)?), None),
        };
        let (carrier, device, reason) = match &info {
            None if self.transport == Transport::Tcp => (Transport::Tcp, None, "tonic's own transport"),
            None => return Err(Failure::run("no connection was made")),
            Some(info) => {
                let carrier = match info.verdict() {
                    Verdict::Rdma if info.is_native() => Transport::Native,
                    Verdict::Rdma => Transport::Rdma,
                    Verdict::Tcp => Transport::Tcp,
                };
                (carrier, info.device(), info.reason())
            }
        };
        let tls = if self.tls.is_some() { ", with TLS" } else { "" };
        let verdict = format!("{carrier}{tls}: {reason}");
        let missing = |required: &dyn fmt::Display| {
            Err(Failure::run(format!("{required} was required, the connection came out as {verdict}")))
        };
        match (self.require, self.require_device.as_deref()) {
            (Some(required), _) if required != carrier => missing(&required),
            (_, Some(required)) if device != Some(required) => missing(&required),
            _ => Ok(Connected { channel, verdict }),
        }
    }

    /// Makes the endpoint. It does not connect yet.
    ///
    /// # Errors
    /// The host or the settings of TLS are invalid.
    pub(crate) fn endpoint(&self) -> Result<Endpoint, Failure> {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        let uri = format!("{scheme}://{}", self.authority());
        let mut endpoint =
            Endpoint::from_shared(uri).context(format!("{} is no address", self.authority()))?;
        if let Some(host) = &self.host_override {
            let origin = http::Uri::builder().scheme(scheme).authority(host.as_str()).path_and_query("/");
            let origin = origin.build().context(format!("--server_host_override: {host:?} is no host"))?;
            endpoint = endpoint.origin(origin);
        }
        let Some(ClientTls(tls)) = &self.tls else { return Ok(endpoint) };
        // TLS takes IPv6 addresses without brackets.
        let name = self.host_override.as_ref().unwrap_or(&self.host);
        let name = name.trim_start_matches('[').trim_end_matches(']');
        let protected = endpoint.tls_config(tls.clone().domain_name(name));
        protected.context(format!("--use_tls, for a server named {name}"))
    }

    /// Returns host and port in the form of a URI.
    fn authority(&self) -> String {
        if self.host.contains(':') && !self.host.starts_with('[') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }
}

fn configuration() -> Result<Config, Failure> {
    Config::from_env().map_err(|error| Failure::run(error.to_string()))
}
