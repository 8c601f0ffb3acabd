//! The builder of a channel.

use std::error::Error;
use std::sync::Arc;

use tonic::transport::Endpoint;

use super::RdmaChannel;
use super::endpoints::Endpoints;
use super::error::ChannelError;
use crate::endpoint::{Config, Dialer};
use crate::grpc::calls::CallConfig;

/// The settings of an [`RdmaChannel`], from [`RdmaChannel::builder`] or [`RdmaChannel::balance`].
///
/// ```no_run
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use tonic::transport::Endpoint;
/// use tonic_rdma::{Config, Policy, RdmaChannel, RdmaChannelBuilder};
///
/// let endpoint = Endpoint::from_static("http://ps0:50051").timeout(Duration::from_secs(5));
/// let config = Config::default().policy(Policy::Require);
/// let builder: RdmaChannelBuilder = RdmaChannel::builder(endpoint).config(config);
/// let channel = builder.connect().await?;
/// # drop(channel);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use = "a builder does nothing until it connects"]
pub struct RdmaChannelBuilder {
    endpoints: Vec<Endpoint>,
    /// The channel spreads its calls, and stays connected to all of its endpoints.
    balances: bool,
    /// The environment decides if there is none.
    config: Option<Config>,
    calls: CallConfig,
}

impl RdmaChannelBuilder {
    pub(super) fn new(endpoints: Vec<Endpoint>, balances: bool) -> Self {
        Self { endpoints, balances, config: None, calls: CallConfig::default() }
    }

    /// Sets the configuration of the connections. Default: [`Config::from_env`], which is read when the channel is made.
    pub fn config(mut self, config: Config) -> Self {
        self.config = Some(config);
        self
    }

    /// Sets the limits of calls without HTTP/2. Default: [`CallConfig::default`]. The times in it are limits of servers, and have no effect
    /// here.
    pub fn calls(mut self, calls: CallConfig) -> Self {
        self.calls = calls;
        self
    }

    /// Connects to the endpoint, or to at least one of several.
    ///
    /// # Errors
    /// A setting or a variable has a value that can't be used, there is no endpoint, or no endpoint can be connected to.
    pub async fn connect(self) -> Result<RdmaChannel, ChannelError> {
        let config = self.config.clone().map_or_else(Config::from_env, Ok)?;
        config.validate()?;
        self.calls.validate()?;
        let dialer = Dialer::configured(Some(config));
        let endpoints = Endpoints::connected(self.endpoints, self.balances, dialer, self.calls).await?;
        Ok(RdmaChannel { endpoints: Arc::new(endpoints) })
    }

    /// Makes a channel to one endpoint that connects at the first call, or a channel to several endpoints that connects to all of
    /// them in the background. If the channel has no endpoint, or a setting or a variable has a
    /// value that can't be used, calls fail, with the reason.
    ///
    /// # Panics
    /// Outside a tokio runtime, as tonic's method does.
    pub fn connect_lazy(self) -> RdmaChannel {
        let dialer = Dialer::configured(self.config);
        let endpoints = Endpoints::new(self.endpoints, self.balances, dialer, self.calls);
        RdmaChannel { endpoints: Arc::new(endpoints) }
    }
}

/// Converts the argument of `connect`.
pub(super) fn endpoint<E>(endpoint: E) -> Result<Endpoint, ChannelError>
where
    E: TryInto<Endpoint>,
    E::Error: Into<Box<dyn Error + Send + Sync>>,
{
    Endpoint::new(endpoint).map_err(|error| ChannelError::Endpoint(error.into()))
}
