//! The device that a connection uses, and the limit on registered memory that all connections of this process
//! share.

use std::fmt;
use std::net::SocketAddr;
use std::sync::{Arc, LazyLock, Mutex};

use super::config::{Config, Provider};
use super::reason::{RdmaUnavailable, ReasonCode};
use crate::error::{RdmaError, RdmaErrorKind};
use tonic_rdma_verbs::memory::Budget;
use tonic_rdma_verbs::unstable::lock;
use tonic_rdma_verbs::{Context, soft};

impl Provider {
    const ALL: [Self; 2] = [Self::Soft, Self::Ibverbs];

    /// Returns the name: `soft` or `ibverbs`, as in
    /// [`RdmaConnectInfo::provider`](crate::RdmaConnectInfo::provider).
    pub fn name(self) -> &'static str {
        match self {
            Self::Soft => "soft",
            Self::Ibverbs => "ibverbs",
        }
    }

    /// Returns the provider with this name.
    ///
    /// ```
    /// use tonic_rdma::Provider;
    ///
    /// assert_eq!(Provider::named("soft"), Some(Provider::Soft));
    /// ```
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|provider| provider.name() == name)
    }

    /// Returns whether the configuration allows this provider.
    pub(super) fn is_wanted(self, config: &Config) -> bool {
        match (config.provider, config.device.as_deref()) {
            (None, None) => true,
            (None, Some(name)) => (name == soft::NAME) == (self == Self::Soft),
            (Some(provider), _) => self == provider,
        }
    }
}

/// Opens the provider's device that the configuration names, or the first usable device of the provider.
///
/// # Errors
/// There is no such device, or it can't be used.
pub fn open_device(provider: Provider, config: &Config) -> Result<Arc<dyn Context>, RdmaError> {
    match provider {
        Provider::Soft => soft::open().map_err(unusable),
        Provider::Ibverbs => open_ibverbs(config),
    }
}

impl fmt::Display for Provider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Opens a device for the client's end of a TCP connection: the software device within a host, a network
/// device otherwise.
///
/// # Errors
/// No provider has a usable device.
pub(super) fn open(
    config: &Config,
    local: SocketAddr,
    peer: SocketAddr,
) -> Result<Arc<dyn Context>, RdmaUnavailable> {
    let order = if local.ip().to_canonical() == peer.ip().to_canonical() {
        Provider::ALL
    } else {
        [Provider::Ibverbs, Provider::Soft]
    };
    let (mut failed, mut code) = (Vec::new(), ReasonCode::NoDevice);
    for provider in order.into_iter().filter(|provider| provider.is_wanted(config)) {
        match open_device(provider, config).map_err(RdmaUnavailable::from) {
            Ok(context) => return Ok(context),
            Err(reason) => {
                // That a provider is not installed here says less than why another has failed.
                code = if code == ReasonCode::NoDevice { reason.code } else { code };
                failed.push(format!("{provider}: {reason}"));
            }
        }
    }
    if failed.is_empty() {
        failed.push("the configuration names a device of another provider than the one it wants".into());
    }
    Err(RdmaUnavailable::new(code, failed.join("; ")))
}

/// Returns the error of a device that can't be used.
pub(super) fn unusable(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> RdmaError {
    RdmaError::of(RdmaErrorKind::Device, error)
}

#[cfg(feature = "ibverbs")]
fn open_ibverbs(config: &Config) -> Result<Arc<dyn Context>, RdmaError> {
    let options = tonic_rdma_verbs::ibverbs::OpenOptions {
        device: config.device.clone(),
        port: config.device_port,
        gid_index: config.gid_index.map(u32::from),
        mtu: config.path.mtu,
        ..Default::default()
    };
    tonic_rdma_verbs::ibverbs::open(&options).map_err(unusable)
}

#[cfg(not(feature = "ibverbs"))]
fn open_ibverbs(_config: &Config) -> Result<Arc<dyn Context>, RdmaError> {
    Err(unusable("this build has no ibverbs provider (cargo feature ibverbs)"))
}

/// The budget, once the first connection has set its limit.
static BUDGET: LazyLock<Mutex<Option<Arc<Budget>>>> = LazyLock::new(Mutex::default);

/// Returns the budget of this process. The first call creates it with the limit of `config`.
pub(crate) fn budget(locks_memory: bool, config: &Config) -> Arc<Budget> {
    let mut budget = lock(&BUDGET);
    Arc::clone(budget.get_or_insert_with(|| Budget::for_process(locks_memory, config.pinned_limit)))
}

/// Returns the bytes that count against the budget, and its limit. `None` before the first connection.
pub(super) fn budget_in_use() -> Option<(u64, u64)> {
    lock(&BUDGET).as_ref().map(|budget| (budget.used(), budget.limit()))
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
        assert_eq!(wanted(Config::default().provider(Provider::Soft)), [true, false]);
        assert_eq!(wanted(Config::default().provider(Provider::Ibverbs)), [false, true]);
        assert_eq!(wanted(Config::default().device("soft0")), [true, false]);
        assert_eq!(wanted(Config::default().device("mlx5_0")), [false, true]);
    }

    #[test]
    fn within_a_host_the_software_device_comes_first() {
        let host = |text: &str| -> SocketAddr { text.parse().unwrap() };
        let context = open(&Config::default(), host("127.0.0.1:1"), host("[::ffff:127.0.0.1]:2")).unwrap();
        assert_eq!(context.attributes().provider, Provider::Soft.name());
        let missing = Config::default().provider(Provider::Ibverbs).device("none0");
        let reason = open(&missing, host("10.0.0.1:1"), host("10.0.0.2:2")).unwrap_err().to_string();
        assert!(reason.starts_with("ibverbs: "), "{reason}");
    }
}
