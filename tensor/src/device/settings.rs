//! The settings of a device and their bounds, the bounds on what peers may open, and TLS for the calls by
//! which devices find one another. Tensors don't go through TLS.

use std::fmt;
use std::time::Duration;

use tonic::transport::{Endpoint, Server};

use crate::error::{TensorError, TensorErrorKind};
use crate::link::words::Notification;
use crate::wire::SERVICE_VERSIONS;
use tonic_rdma::Config;
use tonic_rdma_verbs::unstable::Versions;

#[cfg(feature = "_tls-any")]
use std::sync::Arc;

#[cfg(feature = "_tls-any")]
use tonic::transport::{ClientTlsConfig, ServerTlsConfig};

#[cfg(feature = "_tls-any")]
use tonic_rdma_verbs::unstable::chain;

/// The settings of [`DeviceBuilder`](crate::DeviceBuilder). Each field has the name of its method.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Settings {
    pub(crate) config: Config,
    pub(crate) notification: Option<Notification>,
    pub(crate) max_request_bytes: u64,
    pub(crate) max_outstanding_bytes: u64,
    pub(crate) answer_timeout: Duration,
    pub(crate) max_links: usize,
    pub(crate) max_tensor_bytes: u64,
    pub(crate) checksums: bool,
    pub(crate) listed: bool,
    pub(crate) named_tensor_timeout: Duration,
    pub(crate) plaintext_tensors: Option<bool>,
    pub(crate) tls: Tls,
    /// The versions of the tensor service. Only tests change them.
    pub(crate) versions: Versions,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            config: Config::default(),
            notification: None,
            max_request_bytes: 64 << 20,
            max_outstanding_bytes: 256 << 20,
            answer_timeout: Duration::from_secs(10),
            max_links: 1024,
            max_tensor_bytes: 64 << 30,
            checksums: false,
            listed: true,
            named_tensor_timeout: Duration::from_secs(60),
            plaintext_tensors: None,
            tls: Tls::default(),
            versions: SERVICE_VERSIONS,
        }
    }
}

impl Settings {
    /// The most queue pairs that a peer may open a link with.
    pub(crate) const MAX_QUEUE_PAIRS: u32 = 64;
    /// The most links that peers have opened and not confirmed.
    pub(crate) const UNCONFIRMED: usize = 64;
    /// The time for which an unconfirmed link can't be displaced by another peer's.
    pub(crate) const LEAST_WAIT: Duration = Duration::from_millis(250);
    /// The most `Open` calls that wait to become an unconfirmed link. One source has at most half.
    pub(crate) const WAITING: usize = 320;
    /// The most devices asked at a time whether they answer. One more displaces the oldest question.
    pub(crate) const ASKING: usize = 1024;

    /// Fails if the configuration is invalid or a number is out of range, and names the first that is.
    pub(crate) fn check(&self) -> Result<(), TensorError> {
        self.config.validate().map_err(|error| TensorError::setting("", error))?;
        let request = self.max_request_bytes;
        let numbers = [
            ("max_request_bytes", request, 4096..=1 << 31),
            ("max_outstanding_bytes", self.max_outstanding_bytes, request..=u64::MAX),
        ];
        match numbers.into_iter().find(|(_, given, accepted)| !accepted.contains(given)) {
            Some((setting, given, accepted)) => {
                let (least, most) = (accepted.start(), accepted.end());
                let text = format!("DeviceBuilder::{setting}: {given} is not within {least} to {most}");
                Err(TensorError::new(TensorErrorKind::InvalidSetting, text))
            }
            None => Ok(()),
        }
    }

    /// Returns whether tensors may go unencrypted to peers that are reached over TLS.
    pub(crate) fn allows_plaintext(&self) -> bool {
        self.plaintext_tensors.unwrap_or_else(|| self.config.get_plaintext_tensors())
    }
}

/// The TLS settings of a device.
#[derive(Clone, Default)]
pub(crate) struct Tls {
    #[cfg(feature = "_tls-any")]
    pub(crate) client: Option<Arc<ClientTlsConfig>>,
    #[cfg(feature = "_tls-any")]
    pub(crate) server: Option<Arc<ServerTlsConfig>>,
}

impl Tls {
    /// Returns the scheme that `host:port` stands for.
    pub(crate) fn client_scheme(&self) -> &'static str {
        #[cfg(feature = "_tls-any")]
        if self.client.is_some() {
            return "https";
        }
        "http"
    }

    /// Returns the prefix that peers write before the address of this device.
    pub(crate) fn server_prefix(&self) -> &'static str {
        #[cfg(feature = "_tls-any")]
        if self.server.is_some() {
            return "https://";
        }
        ""
    }

    /// Returns `endpoint` with the TLS settings of the client.
    #[cfg(feature = "_tls-any")]
    pub(crate) fn secure(&self, endpoint: Endpoint) -> Result<Endpoint, TlsError> {
        let config = self.client.as_deref().ok_or(TlsError::NoAuthority)?;
        endpoint.tls_config(config.clone()).map_err(|error| TlsError::Client(chain(&error), error))
    }

    /// Returns an error: no TLS is compiled in.
    #[cfg(not(feature = "_tls-any"))]
    pub(crate) fn secure(&self, _: Endpoint) -> Result<Endpoint, TlsError> {
        Err(TlsError::NoFeature)
    }

    /// Returns the server of a device that listens by itself. A handshake may take as long as `timeout`.
    #[cfg(feature = "_tls-any")]
    pub(crate) fn server(&self, timeout: Duration) -> Result<Server, TlsError> {
        let server = Server::builder();
        let Some(config) = self.server.as_deref() else { return Ok(server) };
        let secured = server.tls_config(config.clone().timeout(timeout));
        secured.map_err(|error| TlsError::Server(chain(&error), error))
    }

    /// Returns the server of a device that listens by itself.
    #[cfg(not(feature = "_tls-any"))]
    pub(crate) fn server(&self, _: Duration) -> Result<Server, TlsError> {
        Ok(Server::builder())
    }
}

/// The reason why TLS can't be used. Each message contains the messages of all sources, because the outermost
/// message of tonic gives no reason.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TlsError {
    #[cfg(feature = "_tls-any")]
    #[error("https needs DeviceBuilder::client_tls, which says which authority to trust")]
    NoAuthority,
    #[cfg(not(feature = "_tls-any"))]
    #[error("https needs tonic-rdma-tensor's feature tls-ring or tls-aws-lc")]
    NoFeature,
    #[cfg(feature = "_tls-any")]
    #[error("the settings of DeviceBuilder::client_tls can't be used: {0}")]
    Client(String, tonic::transport::Error),
    #[cfg(feature = "_tls-any")]
    #[error("the settings of DeviceBuilder::server_tls can't be used: {0}")]
    Server(String, tonic::transport::Error),
}

/// Compares pointers: two settings are equal if both have one object, or if both have no object.
impl PartialEq for Tls {
    #[cfg(feature = "_tls-any")]
    fn eq(&self, other: &Self) -> bool {
        self.client.as_ref().map(Arc::as_ptr) == other.client.as_ref().map(Arc::as_ptr)
            && self.server.as_ref().map(Arc::as_ptr) == other.server.as_ref().map(Arc::as_ptr)
    }

    #[cfg(not(feature = "_tls-any"))]
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Tls {}

impl fmt::Debug for Tls {
    /// Hides the settings, because tonic shows private keys.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tls")
            .field("client", &self.client_scheme())
            .field("server", &self.server_prefix())
            .finish_non_exhaustive()
    }
}
