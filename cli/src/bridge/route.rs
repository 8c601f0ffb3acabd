//! A route: what is accepted here goes there.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tonic_rdma::Config;
use tonic_rdma::RdmaConnectInfo;
use tonic_rdma_verbs::internal::Throttle;

use super::address::Address;
use super::meters::Meters;

/// What all connections of a route have in common.
#[derive(Debug)]
pub(crate) struct Route {
    pub(crate) name: String,
    pub(crate) target: Address,
    pub(crate) config: Config,
    pub(crate) connect_timeout: Duration,
    pub(crate) meters: Meters,
    /// Of lines about targets that can't be connected to.
    pub(crate) unreachable: Throttle,
    /// Of lines about connections that broke.
    pub(crate) broken: Throttle,
    client: Carried,
    server: Carried,
}

/// What the connections of one end of a route go over, as far as was told.
#[derive(Debug)]
struct Carried {
    told: Mutex<Option<String>>,
    throttle: Throttle,
}

impl Route {
    pub(crate) fn new(listen: &str, target: Address, config: Config, connect_timeout: Duration) -> Self {
        let name = format!("{listen} -> {target}");
        let meters = Meters::new(&name);
        let [unreachable, broken] = [const { Throttle::new(1) }; 2];
        let [client, server] = [Carried::new(), Carried::new()];
        Self { name, target, config, connect_timeout, meters, unreachable, broken, client, server }
    }

    /// Says what a client's connection goes over, if it is something new.
    pub(crate) fn client_came(&self, info: &RdmaConnectInfo) {
        self.client.tell(&self.name, "clients come over", info);
    }

    /// Says what the target's connection goes over, if it is something new.
    pub(crate) fn target_reached(&self, info: &RdmaConnectInfo) {
        self.server.tell(&self.name, "the target is reached over", info);
    }
}

impl Carried {
    fn new() -> Self {
        Self { told: Mutex::default(), throttle: Throttle::new(1) }
    }

    fn tell(&self, route: &str, what: &str, info: &RdmaConnectInfo) {
        let over = format!("{}: {}", info.verdict(), info.reason());
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        if told.as_ref() != Some(&over)
            && let Some(suppressed) = self.throttle.admit(Instant::now())
        {
            tracing::info!(route, suppressed, "{what} {over}");
            *told = Some(over);
        }
    }
}
