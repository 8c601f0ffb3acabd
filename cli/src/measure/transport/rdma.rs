//! The RDMA connections of `compare` and `parameter-server`. No other file of these two commands makes RDMA
//! connections.

use std::net::SocketAddr;

use tonic::transport::{Channel, Endpoint, Server};
use tonic_rdma::{
    CallConfig, Config, Policy, ProviderChoice, RdmaChannel, RdmaConnector, RdmaIncoming, RdmaServer,
};
use tonic_rdma_commands::{Failure, ValueError};
use tonic_rdma_tensor::{DeviceBuilder, RdmaDevice};

use super::calls::native_connection;
use super::http2::Http2;
use crate::measure::process::limits::pinned;

/// The default of [`CallConfig::landing_budget`].
const LANDING_BUDGET: u64 = 256 << 20;

/// The settings of RDMA connections: the command line has precedence over the `RDMA_*` variables.
#[derive(Clone, Debug)]
pub(crate) struct Rdma {
    config: Config,
    /// Of native calls.
    calls: CallConfig,
}

/// Returns the device of this name, if it can be used.
fn usable(name: &str) -> Result<&str, Failure> {
    let found = tonic_rdma_verbs::devices();
    match found.iter().find(|device| device.name == name).map(|device| &device.state) {
        Some(Ok(_)) => Ok(name),
        Some(Err(reason)) => Err(Failure::usage(format!("--provider: {name} can't be used: {reason}"))),
        None => {
            let names: Vec<&str> = found.iter().map(|device| device.name.as_str()).collect();
            let names = names.join(", ");
            Err(Failure::usage(format!(
                "--provider: no device {name:?}; accepted: auto, soft, ibverbs, {names}"
            )))
        }
    }
}

/// The connection that both ends agreed on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RdmaConnection {
    /// The provider in use, such as `soft`.
    pub(crate) provider: String,
    /// Device and reason, for people.
    pub(crate) reason: String,
}

impl Rdma {
    /// Makes the configuration for `provider` (`auto`, `soft`, `ibverbs`, or a device). It fails if a variable or the
    /// provider is bad.
    pub(crate) fn new(provider: &str) -> Result<Self, Failure> {
        let config = Config::from_env()
            .map_err(|error| Failure::usage("an RDMA_* variable is not accepted").because(error))?;
        let config = match provider {
            "auto" => config,
            "soft" => config.provider(ProviderChoice::Soft),
            "ibverbs" => config.provider(ProviderChoice::Ibverbs),
            name => config.provider(ProviderChoice::Auto).device(usable(name)?),
        };
        Ok(Self { config: config.policy(Policy::Require), calls: CallConfig::default() })
    }

    /// Returns the settings with enough memory for so many connections, each with native calls that carry up to `longest` bytes. What the
    /// user has set, and defaults that are enough, stay as they are.
    pub(crate) fn for_load(self, connections: u32, longest: u64) -> Self {
        /// Bytes of a message beside its payload, at most.
        const BESIDE: u64 = 1 << 20;
        // A receiver may keep a message for a check after the turn, while the next one lands.
        let landing = longest.saturating_add(BESIDE).saturating_mul(2);
        let calls = if landing > LANDING_BUDGET { self.calls.landing_budget(landing) } else { self.calls };
        let is_usual = connections <= 1 && landing <= LANDING_BUDGET;
        let config = match is_usual || std::env::var_os("RDMA_PINNED_LIMIT").is_some() {
            true => self.config,
            false => self.config.pinned_limit(pinned(connections, landing)),
        };
        Self { config, calls }
    }

    /// Returns the builder of a tensor device: one queue pair to its peer.
    pub(crate) fn tensor_device(&self) -> DeviceBuilder {
        RdmaDevice::builder().config(self.config.clone())
    }

    /// Listens for RDMA peers on a free port of the loopback interface.
    pub(crate) async fn bind(&self) -> Result<(RdmaIncoming, SocketAddr), Failure> {
        let bound = RdmaIncoming::bind_with("127.0.0.1:0", self.config.clone()).await;
        let incoming = bound.map_err(|error| Failure::run("can't listen for RDMA peers").because(error))?;
        let address = incoming.local_addr();
        Ok((incoming, address))
    }

    /// Connects to `endpoint` over RDMA, without a fallback.
    pub(crate) async fn connect(&self, endpoint: Endpoint) -> Result<(Channel, RdmaConnection), Failure> {
        let connector = RdmaConnector::with_config(self.config.clone());
        let channel = endpoint
            .connect_with_connector(connector.clone())
            .await
            .map_err(|error| Failure::run("can't connect over RDMA").because(error))?;
        let info = connector.last_connection().ok_or_else(|| Failure::run("no connection was made"))?;
        let verdict = RdmaConnection {
            provider: info.provider().unwrap_or("none").to_owned(),
            reason: info.reason().to_owned(),
        };
        Ok((channel, verdict))
    }

    /// Connects to `endpoint` for native calls. A connection that carries HTTP/2 is an error.
    pub(crate) async fn connect_native(
        &self,
        endpoint: Endpoint,
    ) -> Result<(RdmaChannel, RdmaConnection), Failure> {
        let channel = RdmaChannel::builder(endpoint).config(self.config.clone()).calls(self.calls.clone());
        let connecting = channel.connect();
        let channel = connecting
            .await
            .map_err(|error| Failure::run("can't connect for native calls").because(error))?;
        let verdict = native_connection(&channel)?;
        Ok((channel, verdict))
    }

    /// Returns a server for native calls, HTTP/2 over RDMA, and TCP on one port.
    pub(crate) fn server(&self, http2: Http2) -> RdmaServer {
        let server = RdmaServer::new().config(self.config.clone()).calls(self.calls.clone());
        server.http2(http2.server(Server::builder()))
    }
}

/// Parses a name that can be a device's. The library checks whether the device exists.
pub(crate) fn parse_provider(text: &str) -> Result<String, ValueError> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.:".contains(&byte);
    if text.is_empty() || text.len() > 64 || !text.bytes().all(plain) {
        let accepted = "auto, soft, ibverbs, or the name of a device as `tonic-rdma devices` shows it";
        return Err(ValueError::unknown(accepted));
    }
    Ok(text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_landing_budget_is_the_library_s_default() {
        assert_eq!(CallConfig::default().landing_budget(LANDING_BUDGET), CallConfig::default());
    }

    #[test]
    fn a_device_s_name_has_no_blanks() {
        assert!(parse_provider("a b").is_err() && parse_provider("mlx5_0").is_ok());
    }
}
