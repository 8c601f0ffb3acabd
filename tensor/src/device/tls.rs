//! TLS for the calls by which devices find one another. Tensors don't go through it.

use std::fmt;
#[cfg(feature = "_tls-any")]
use std::sync::Arc;
use std::time::Duration;

#[cfg(feature = "_tls-any")]
use tonic::transport::{ClientTlsConfig, ServerTlsConfig};
use tonic::transport::{Endpoint, Server};
#[cfg(feature = "_tls-any")]
use tonic_rdma_verbs::internal::chain;

/// The TLS settings of a device.
#[derive(Clone, Default)]
pub(crate) struct Tls {
    #[cfg(feature = "_tls-any")]
    client: Option<Arc<ClientTlsConfig>>,
    #[cfg(feature = "_tls-any")]
    server: Option<Arc<ServerTlsConfig>>,
}

impl Tls {
    #[cfg(feature = "_tls-any")]
    pub(crate) fn set_client(&mut self, config: ClientTlsConfig) {
        self.client = Some(Arc::new(config));
    }

    #[cfg(feature = "_tls-any")]
    pub(crate) fn set_server(&mut self, config: ServerTlsConfig) {
        self.server = Some(Arc::new(config));
    }

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

/// The reason why TLS can't be used. Each message contains the messages of all sources, because the outermost message of tonic
/// gives no reason.
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
        fn is_same<T>(one: Option<&Arc<T>>, other: Option<&Arc<T>>) -> bool {
            match (one, other) {
                (Some(one), Some(other)) => Arc::ptr_eq(one, other),
                (None, None) => true,
                _ => false,
            }
        }
        is_same(self.client.as_ref(), other.client.as_ref())
            && is_same(self.server.as_ref(), other.server.as_ref())
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
