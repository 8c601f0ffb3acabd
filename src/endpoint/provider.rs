//! The device that a connection uses.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use super::config::{Config, ProviderChoice};
use tonic_rdma_verbs::{Context, soft};

/// The driver of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Provider {
    /// The software device, for processes of one host.
    Soft,
    /// Devices with a driver in the kernel.
    Ibverbs,
}

impl Provider {
    const ALL: [Self; 2] = [Self::Soft, Self::Ibverbs];

    /// Returns the name that offers carry.
    pub fn name(self) -> &'static str {
        match self {
            Self::Soft => "soft",
            Self::Ibverbs => "ibverbs",
        }
    }

    /// Returns the provider with the name that an offer carries.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|provider| provider.name() == name)
    }

    /// Returns whether the configuration allows this provider.
    pub fn is_wanted(self, config: &Config) -> bool {
        match (&config.provider, config.device.as_deref()) {
            (ProviderChoice::Auto, None) => true,
            (ProviderChoice::Auto, Some(name)) => (name == soft::NAME) == (self == Self::Soft),
            (ProviderChoice::Soft, _) => self == Self::Soft,
            (ProviderChoice::Ibverbs, _) => self == Self::Ibverbs,
        }
    }

    /// Opens the device that the configuration names, or the provider's best device.
    ///
    /// # Errors
    /// There is no such device, or it can't be used.
    pub fn open(self, config: &Config) -> Result<Arc<dyn Context>, String> {
        match self {
            Self::Soft => soft::open().map_err(|error| error.to_string()),
            Self::Ibverbs => open_ibverbs(config),
        }
    }
}

impl fmt::Display for Provider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Opens a device for the client's end of a TCP connection: the software device within a host, a network device otherwise.
///
/// # Errors
/// No provider has a usable device.
pub(super) fn open(
    config: &Config,
    local: SocketAddr,
    peer: SocketAddr,
) -> Result<(Provider, Arc<dyn Context>), String> {
    let order = if local.ip().to_canonical() == peer.ip().to_canonical() {
        Provider::ALL
    } else {
        [Provider::Ibverbs, Provider::Soft]
    };
    let mut obstacles = Vec::new();
    for provider in order.into_iter().filter(|provider| provider.is_wanted(config)) {
        match provider.open(config) {
            Ok(context) => return Ok((provider, context)),
            Err(reason) => obstacles.push(format!("{provider}: {reason}")),
        }
    }
    if obstacles.is_empty() {
        obstacles.push("the configuration names a device of another provider than the one it wants".into());
    }
    Err(obstacles.join("; "))
}

#[cfg(feature = "ibverbs")]
fn open_ibverbs(config: &Config) -> Result<Arc<dyn Context>, String> {
    let mut options = tonic_rdma_verbs::ibverbs::OpenOptions::new();
    options.device.clone_from(&config.device);
    options.port = config.device_port;
    options.gid_index = config.gid_index.map(u32::from);
    options.mtu = config.path.mtu;
    tonic_rdma_verbs::ibverbs::open(&options).map_err(|error| error.to_string())
}

#[cfg(not(feature = "ibverbs"))]
fn open_ibverbs(_config: &Config) -> Result<Arc<dyn Context>, String> {
    Err("this build has no ibverbs provider (cargo feature ibverbs)".into())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    #[test]
    fn names_are_those_of_offers() {
        for provider in Provider::ALL {
            assert_eq!(Provider::named(provider.name()), Some(provider));
        }
        assert_eq!(Provider::named("carrier pigeon"), None);
    }

    #[test]
    fn the_configuration_decides() {
        let wanted = |config: Config| Provider::ALL.map(|provider| provider.is_wanted(&config));
        assert_eq!(wanted(Config::default()), [true, true]);
        assert_eq!(wanted(Config::default().provider(ProviderChoice::Soft)), [true, false]);
        assert_eq!(wanted(Config::default().provider(ProviderChoice::Ibverbs)), [false, true]);
        assert_eq!(wanted(Config::default().device("soft0")), [true, false]);
        assert_eq!(wanted(Config::default().device("mlx5_0")), [false, true]);
    }

    #[test]
    fn within_a_host_memory_comes_first() {
        let host = |text: &str| -> SocketAddr { text.parse().unwrap() };
        let (provider, _) =
            open(&Config::default(), host("127.0.0.1:1"), host("[::ffff:127.0.0.1]:2")).unwrap();
        assert_eq!(provider, Provider::Soft);
        let missing = Config::default().provider(ProviderChoice::Ibverbs).device("none0");
        let reason = open(&missing, host("10.0.0.1:1"), host("10.0.0.2:2")).unwrap_err();
        assert!(reason.starts_with("ibverbs: "), "{reason}");
    }
}
