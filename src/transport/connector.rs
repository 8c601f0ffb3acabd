//! The connector for clients, which `tonic::transport::Endpoint` takes.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use http::Uri;
use http::uri::Scheme;
use tower_service::Service;

use crate::endpoint::{Config, ConnectError, Dialer, EndpointStream, RdmaConnectInfo};
use tonic_rdma_verbs::internal::lock;

/// Connects a tonic channel: over RDMA where both ends have it, and over TCP elsewhere, if the [`Config`]'s policy allows that.
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
    last: Arc<Mutex<Option<RdmaConnectInfo>>>,
}

impl RdmaConnector {
    /// Makes a connector with the configuration of the environment ([`Config::from_env`]). If a variable has a value that can't be used,
    /// every connect fails with an error that names the variable.
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
        Self { dialer: Dialer::configured(None), last: Arc::default() }
    }

    /// Makes a connector with this configuration. The environment does not change it.
    ///
    /// ```
    /// use tonic_rdma::{Config, Policy, RdmaConnector};
    ///
    /// let connector = RdmaConnector::with_config(Config::default().policy(Policy::Require));
    /// # assert!(connector.last_connection().is_none());
    /// ```
    pub fn with_config(config: Config) -> Self {
        Self { dialer: Dialer::new(config), last: Arc::default() }
    }

    /// Returns what was negotiated for the last connection of this connector and its clones; `None` before the first connection. The
    /// counters in it are live.
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
        lock(&self.last).clone()
    }

    async fn connect(self, uri: Uri) -> Result<EndpointStream, ConnectError> {
        let (host, port) = host_and_port(&uri)?;
        let stream = self.dialer.dial(host, port).await?;
        *lock(&self.last) = Some(stream.info().clone());
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
    type Error = ConnectError;
    type Future = Pin<Box<dyn Future<Output = Result<EndpointStream, ConnectError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), ConnectError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        Box::pin(self.clone().connect(uri))
    }
}

/// Returns the host and the port of a URI.
///
/// # Errors
/// The URI has no host.
pub(crate) fn host_and_port(uri: &Uri) -> Result<(&str, u16), ConnectError> {
    let host = uri.host().ok_or_else(|| ConnectError::NoHost(uri.to_string()))?;
    // An IPv6 address stands in brackets in a URI, and without them everywhere else.
    let host = host.trim_start_matches('[').trim_end_matches(']');
    Ok((host, uri.port_u16().unwrap_or(if is_tls(uri) { 443 } else { 80 })))
}

/// Returns whether calls to `uri` go over TLS, and so over HTTP/2.
pub(crate) fn is_tls(uri: &Uri) -> bool {
    uri.scheme() == Some(&Scheme::HTTPS)
}
