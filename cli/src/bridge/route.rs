//! A route: a place to listen, and the target of the connections that come there.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Semaphore;
use tonic_rdma::Config;
use tonic_rdma::RdmaConnectInfo;
use tonic_rdma_verbs::internal::Throttle;

use super::address::Address;
use super::meters::Meters;

/// The parts that all connections of a route share.
#[derive(Debug)]
pub(crate) struct Route {
    pub(crate) name: String,
    pub(crate) target: Address,
    pub(crate) config: Config,
    pub(crate) connect_timeout: Duration,
    pub(crate) meters: Meters,
    /// One permit for each client that the bridge may connect to an `rdma://` target at a time.
    pub(crate) dials: Semaphore,
    /// When the target was reached last.
    pub(crate) reached: Mutex<Option<Instant>>,
    /// Limits the log lines about targets that can't be connected to.
    pub(crate) unreachable: Throttle,
    /// Limits the log lines about connections that broke.
    pub(crate) broken: Throttle,
    client: TransportLog,
    server: TransportLog,
}

/// Logs which transport the connections at one end of a route use.
#[derive(Debug)]
struct TransportLog {
    /// The transport and reason in the last line.
    logged: Mutex<Option<String>>,
    throttle: Throttle,
}

impl Route {
    /// Clients that the bridge connects to an `rdma://` target at a time. A listener of this library prepares 64 connections at a time, 43
    /// of one user and address, and declines some of a larger crowd; so there is room for the clients of another bridge.
    pub(crate) const DIALS: usize = 32;

    /// Creates a route from `listen` to `target`.
    pub(crate) fn new(listen: &str, target: Address, config: Config, connect_timeout: Duration) -> Self {
        let name = format!("{listen} -> {target}");
        let meters = Meters::new(&name);
        let [unreachable, broken] = [const { Throttle::new(1) }; 2];
        let [client, server] = [TransportLog::new(), TransportLog::new()];
        let (dials, reached) = (Semaphore::new(Self::DIALS), Mutex::default());
        Self {
            name,
            target,
            config,
            connect_timeout,
            meters,
            dials,
            reached,
            unreachable,
            broken,
            client,
            server,
        }
    }

    /// Logs the transport of a client's connection if it differs from the last line.
    pub(crate) fn client_came(&self, info: &RdmaConnectInfo) {
        self.client.log(&self.name, "clients come over", info);
    }

    /// Logs the transport of the target's connection if it differs from the last line.
    pub(crate) fn target_reached(&self, info: &RdmaConnectInfo) {
        self.server.log(&self.name, "the target is reached over", info);
    }
}

impl TransportLog {
    fn new() -> Self {
        Self { logged: Mutex::default(), throttle: Throttle::new(1) }
    }

    fn log(&self, route: &str, what: &str, info: &RdmaConnectInfo) {
        let over = format!("{}: {}", info.verdict(), info.reason());
        let mut logged = self.logged.lock().unwrap_or_else(PoisonError::into_inner);
        if logged.as_ref() != Some(&over)
            && let Some(suppressed) = self.throttle.admit(Instant::now())
        {
            tracing::info!(route, suppressed, "{what} {over}");
            *logged = Some(over);
        }
    }
}
