//! The settings of a group.

use std::time::Duration;

#[cfg(feature = "_tls-any")]
use tonic::transport::{ClientTlsConfig, ServerTlsConfig};
use tonic_rdma::Config;
use tonic_rdma_tensor::DeviceBuilder;

use crate::error::CollectiveError;
use crate::group::launch::setup;

/// The settings of a group.
#[derive(Clone)]
pub(crate) struct Settings {
    /// How connections are made, and which RDMA device they use. Without it, the environment says so.
    pub(crate) config: Option<Config>,
    /// How long the ranks wait for one another at the start.
    pub(crate) meeting: Duration,
    /// How long the survivors of a failure wait for a rank that lives and does not take part in the agreement.
    pub(crate) patience: Duration,
    /// How long a rank may take to answer a question.
    pub(crate) answer: Duration,
    /// TLS of calls to other ranks.
    #[cfg(feature = "_tls-any")]
    pub(crate) client_tls: Option<ClientTlsConfig>,
    /// TLS of this rank's server.
    #[cfg(feature = "_tls-any")]
    pub(crate) server_tls: Option<ServerTlsConfig>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            config: None,
            meeting: Duration::from_secs(60),
            patience: Duration::from_secs(30),
            answer: Duration::from_millis(100),
            #[cfg(feature = "_tls-any")]
            client_tls: None,
            #[cfg(feature = "_tls-any")]
            server_tls: None,
        }
    }
}

impl Settings {
    /// Returns how connections are made.
    ///
    /// # Errors
    /// A variable of the environment has a bad value. The message names it.
    pub(crate) fn config(&self) -> Result<Config, CollectiveError> {
        match &self.config {
            Some(config) => Ok(config.clone()),
            None => Config::from_env().map_err(|error| setup(error.to_string())),
        }
    }

    /// Returns the builder of the tensor device with these settings.
    pub(crate) fn device(&self) -> DeviceBuilder {
        // The names of regions contain secrets, so that only ranks of the group can attach them.
        let builder = DeviceBuilder::default().listed(false);
        let builder = match &self.config {
            Some(config) => builder.config(config.clone()),
            None => builder,
        };
        #[cfg(feature = "_tls-any")]
        if let Some(tls) = &self.client_tls {
            return builder.client_tls(tls.clone());
        }
        builder
    }

    /// Returns the scheme of calls to other ranks.
    pub(crate) fn scheme(&self) -> &'static str {
        #[cfg(feature = "_tls-any")]
        if self.client_tls.is_some() {
            return "https";
        }
        "http"
    }
}
