//! The one place where `compare` and `devices` connect over RDMA.

use std::net::SocketAddr;

use tonic::transport::{Channel, Endpoint};
use tonic_rdma::{Config, Policy, ProviderChoice, RdmaConnector, RdmaIncoming};
use tonic_rdma_tensor::{DeviceBuilder, RdmaDevice};

use crate::failure::Failure;

/// How RDMA connections are to be made: the command line over the `RDMA_*` variables.
#[derive(Clone, Debug)]
pub(crate) struct Rdma {
    config: Config,
}

/// The device of this name, if it can be used.
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

/// What the two ends agreed on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Verdict {
    /// The provider in use, such as `soft`.
    pub(crate) provider: String,
    /// Device and reason, for people.
    pub(crate) reason: String,
}

impl Rdma {
    /// The configuration for `provider` (`auto`, `soft`, `ibverbs`, or a device), refused if a variable or the provider is bad.
    pub(crate) fn new(provider: &str) -> Result<Self, Failure> {
        let config = Config::from_env().map_err(|error| Failure::usage(error.to_string()))?;
        let config = match provider {
            "auto" => config,
            "soft" => config.provider(ProviderChoice::Soft),
            "ibverbs" => config.provider(ProviderChoice::Ibverbs),
            name => config.provider(ProviderChoice::Auto).device(usable(name)?),
        };
        Ok(Self { config: config.policy(Policy::Require) })
    }

    /// The configuration itself, for a tensor device.
    pub(crate) fn config(&self) -> &Config {
        &self.config
    }

    /// What a device for tensors is made with: a queue pair to its peer.
    pub(crate) fn tensor_device(&self) -> DeviceBuilder {
        RdmaDevice::builder().config(self.config.clone())
    }

    /// Listens for RDMA peers on a free port of the loopback interface.
    pub(crate) async fn bind(&self) -> Result<(RdmaIncoming, SocketAddr), Failure> {
        let bound = RdmaIncoming::bind_with("127.0.0.1:0", self.config.clone()).await;
        let incoming =
            bound.map_err(|error| Failure::run(format!("can't listen for RDMA peers: {error}")))?;
        let address = incoming.local_addr();
        Ok((incoming, address))
    }

    /// A channel to `endpoint` that is RDMA, never a fallback.
    pub(crate) async fn connect(&self, endpoint: Endpoint) -> Result<(Channel, Verdict), Failure> {
        let connector = RdmaConnector::with_config(self.config.clone());
        let channel = endpoint.connect_with_connector(connector.clone()).await.map_err(|error| {
            let cause =
                std::error::Error::source(&error).map(|cause| format!(": {cause}")).unwrap_or_default();
            Failure::run(format!("can't connect over RDMA: {error}{cause}"))
        })?;
        let info = connector.last_connection().ok_or_else(|| Failure::run("no connection was made"))?;
        let verdict = Verdict {
            provider: info.provider().unwrap_or("none").to_owned(),
            reason: info.reason().to_owned(),
        };
        Ok((channel, verdict))
    }
}
