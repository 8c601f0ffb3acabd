//! A route: what is accepted here goes there.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tonic_rdma::Config;
use tonic_rdma::endpoint::ConnectionInfo;

use super::address::Address;
use super::meters::Meters;
use super::quiet::Quiet;

/// What all connections of a route have in common.
#[derive(Debug)]
pub(crate) struct Route {
    pub(crate) name: String,
    pub(crate) target: Address,
    pub(crate) config: Config,
    pub(crate) connect_timeout: Duration,
    pub(crate) meters: Meters,
    /// Of lines about targets that can't be connected to.
    pub(crate) unreachable: Quiet,
    /// Of lines about connections that broke.
    pub(crate) broken: Quiet,
    client: Carried,
    server: Carried,
}

/// What the connections of one end of a route go over, as far as was told.
#[derive(Debug, Default)]
struct Carried {
    told: Mutex<Option<String>>,
    quiet: Quiet,
}

impl Route {
    pub(crate) fn new(listen: &str, target: Address, config: Config, connect_timeout: Duration) -> Self {
        let name = format!("{listen} -> {target}");
        let meters = Meters::new(&name);
        let (unreachable, broken) = (Quiet::default(), Quiet::default());
        let (client, server) = (Carried::default(), Carried::default());
        Self { name, target, config, connect_timeout, meters, unreachable, broken, client, server }
    }

    /// Says what a client's connection goes over, if it is something new.
    pub(crate) fn client_came(&self, info: &ConnectionInfo) {
        self.client.tell(&self.name, "clients come", info);
    }

    /// Says what the target's connection goes over, if it is something new.
    pub(crate) fn target_reached(&self, info: &ConnectionInfo) {
        self.server.tell(&self.name, "the target is reached", info);
    }
}

impl Carried {
    fn tell(&self, route: &str, who: &str, info: &ConnectionInfo) {
        let over = format!("{}: {}", info.verdict(), info.reason());
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        if told.as_ref() != Some(&over)
            && let Some(suppressed) = self.quiet.may_speak(Instant::now())
        {
            tracing::info!(route, suppressed, "{who} over {over}");
            *told = Some(over);
        }
    }
}
