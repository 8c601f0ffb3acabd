//! TLS for the calls by which devices find one another. Tensors don't go through it.

use std::fmt;
#[cfg(feature = "_tls-any")]
use std::sync::Arc;

#[cfg(feature = "_tls-any")]
use tonic::transport::{ClientTlsConfig, ServerTlsConfig};
use tonic::transport::{Endpoint, Server};

use super::Settings;

/// What a device was given for TLS.
#[derive(Clone, Default)]
pub(super) struct Tls {
    #[cfg(feature = "_tls-any")]
    client: Option<Arc<ClientTlsConfig>>,
    #[cfg(feature = "_tls-any")]
    server: Option<Arc<ServerTlsConfig>>,
}

#[cfg(feature = "_tls-any")]
impl Settings {
    /// Sets how to reach peers over TLS: which authority to trust, and the certificate to show. A peer's `host:port` then
    /// means `https://host:port`. Tensors are not encrypted by that; see [`plaintext_tensors`](Self::plaintext_tensors).
    ///
    /// ```no_run
    /// # fn settings() -> std::io::Result<tonic_rdma_tensor::Settings> {
    /// use tonic::transport::{Certificate, ClientTlsConfig, Identity};
    /// use tonic_rdma_tensor::Settings;
    ///
    /// let authority = Certificate::from_pem(std::fs::read("ca.pem")?);
    /// let identity = Identity::from_pem(std::fs::read("worker.pem")?, std::fs::read("worker.key")?);
    /// let tls = ClientTlsConfig::new().ca_certificate(authority).identity(identity);
    /// let settings = Settings::new(1, 2).client_tls(tls).plaintext_tensors(true);
    /// # Ok(settings)
    /// # }
    /// ```
    pub fn client_tls(mut self, config: ClientTlsConfig) -> Self {
        self.tls.client = Some(Arc::new(config));
        self
    }

    /// Sets the TLS that a device listens with, if it listens by itself. A handshake may take as long as
    /// [`patience`](Self::patience) says. Tensors are not encrypted by that; see
    /// [`plaintext_tensors`](Self::plaintext_tensors).
    ///
    /// ```no_run
    /// # async fn device() -> Result<tonic_rdma_tensor::RdmaDevice, Box<dyn std::error::Error>> {
    /// use tonic::transport::{Certificate, Identity, ServerTlsConfig};
    /// use tonic_rdma_tensor::{RdmaDevice, Settings};
    ///
    /// let identity = Identity::from_pem(std::fs::read("server.pem")?, std::fs::read("server.key")?);
    /// let authority = Certificate::from_pem(std::fs::read("ca.pem")?);
    /// let tls = ServerTlsConfig::new().identity(identity).client_ca_root(authority);
    /// let settings = Settings::new(1, 2).server_tls(tls).plaintext_tensors(true);
    /// let device = RdmaDevice::bind(settings, "0.0.0.0:50052").await?;
    /// # Ok(device)
    /// # }
    /// ```
    pub fn server_tls(mut self, config: ServerTlsConfig) -> Self {
        self.tls.server = Some(Arc::new(config));
        self
    }
}

impl Tls {
    /// What `host:port` is short for.
    pub(super) fn client_scheme(&self) -> &'static str {
        #[cfg(feature = "_tls-any")]
        if self.client.is_some() {
            return "https";
        }
        "http"
    }

    /// What a peer has to write before the address of this device.
    pub(super) fn server_prefix(&self) -> &'static str {
        #[cfg(feature = "_tls-any")]
        if self.server.is_some() {
            return "https://";
        }
        ""
    }

    /// The same endpoint, reached over TLS.
    #[cfg(feature = "_tls-any")]
    pub(super) fn secure(&self, endpoint: Endpoint) -> Result<Endpoint, String> {
        let config = self.client.as_deref();
        let config = config.ok_or("https needs Settings::client_tls, which says whom to trust")?;
        let secured = endpoint.tls_config(config.clone());
        secured.map_err(|error| format!("what Settings::client_tls has can't be used: {}", chain(&error)))
    }

    /// The same endpoint, reached over TLS.
    #[cfg(not(feature = "_tls-any"))]
    pub(super) fn secure(&self, _: Endpoint) -> Result<Endpoint, String> {
        Err("https needs tonic-rdma's feature tls-ring or tls-aws-lc".into())
    }

    /// The server of a device that listens by itself.
    pub(super) fn server(&self, settings: &Settings) -> Result<Server, String> {
        let server = Server::builder();
        #[cfg(feature = "_tls-any")]
        if let Some(config) = self.server.as_deref() {
            let config = config.clone().timeout(settings.patience);
            let secured = server.tls_config(config);
            return secured
                .map_err(|error| format!("what Settings::server_tls has can't be used: {}", chain(&error)));
        }
        let _ = settings;
        Ok(server)
    }
}

/// An error and what caused it, without what is said twice.
pub(super) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let said = error.to_string();
        if !text.contains(&said) {
            text = format!("{text}: {said}");
        }
        cause = error.source();
    }
    text
}

/// The same object, or none.
impl PartialEq for Tls {
    #[cfg(feature = "_tls-any")]
    fn eq(&self, other: &Self) -> bool {
        fn same<T>(one: Option<&Arc<T>>, other: Option<&Arc<T>>) -> bool {
            match (one, other) {
                (Some(one), Some(other)) => Arc::ptr_eq(one, other),
                (None, None) => true,
                _ => false,
            }
        }
        same(self.client.as_ref(), other.client.as_ref()) && same(self.server.as_ref(), other.server.as_ref())
    }

    #[cfg(not(feature = "_tls-any"))]
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Tls {}

impl fmt::Debug for Tls {
    /// Leaves out what was given: tonic shows private keys.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tls")
            .field("client", &self.client_scheme())
            .field("server", &self.server_prefix())
            .finish_non_exhaustive()
    }
}
