//! Accepts the connections of a route, and carries each of them in a task.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::{Semaphore, watch};
use tonic_rdma::Dialer;

use super::listen::Acceptor;
use super::meters::ResetReason;
use super::relay::relay;
use super::route::{self, Route};
use super::stream::Stream;

/// The phase of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Phase {
    /// Accepting.
    Running,
    /// Closed to new clients, and waiting for the connections that are open.
    Draining,
    /// Resetting the connections that are still open.
    CuttingOff,
    /// All connections have ended.
    Over,
}

/// The state that all threads share.
#[derive(Debug)]
pub(crate) struct BridgeState {
    /// One permit for each allowed connection. A connection holds its permit until it ends.
    pub(crate) room: Arc<Semaphore>,
    pub(crate) phase: watch::Receiver<Phase>,
    pub(crate) cut_off: AtomicU64,
    /// The number of accepted connections. The number seeds the pauses between attempts to connect, so that
    /// these pauses differ from connection to connection.
    pub(crate) accepted: AtomicU64,
}

/// Accepts clients of a route and starts carrying them, until draining begins.
pub(crate) async fn serve(mut acceptor: Acceptor, route: Arc<Route>, shared: Arc<BridgeState>) {
    /// The pause after an error such as too many open files.
    const PAUSE: Duration = Duration::from_millis(50);
    let dialer = Dialer::new(route.config.clone());
    let mut phase = shared.phase.clone();
    loop {
        let accepted = tokio::select! {
            biased;
            _ = phase.wait_for(|phase| *phase >= Phase::Draining) => return acceptor.close(),
            accepted = acceptor.accept() => accepted,
        };
        match accepted {
            Ok(client) => {
                // At the limit this client waits here, and later clients wait in the backlog, where they cost
                // nothing.
                let room = tokio::select! {
                    biased;
                    _ = phase.wait_for(|phase| *phase >= Phase::Draining) => return acceptor.close(),
                    room = Arc::clone(&shared.room).acquire_owned() => room,
                };
                let (route, shared, dialer) = (Arc::clone(&route), Arc::clone(&shared), dialer.clone());
                tokio::spawn(async move {
                    carry(client, &route, &dialer, &shared).await;
                    drop(room);
                });
            }
            Err(error) => {
                if let Some(suppressed) = route.broken.admit(Instant::now()) {
                    tracing::warn!(route = route.name, %error, suppressed, "accepting a connection failed");
                }
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

/// Carries one connection, unless it is cut off.
async fn carry(client: Stream, route: &Route, dialer: &Dialer, shared: &BridgeState) {
    let mut phase = shared.phase.clone();
    tokio::select! {
        _ = phase.wait_for(|phase| *phase >= Phase::CuttingOff) => {
            shared.cut_off.fetch_add(1, Ordering::Relaxed);
            route.meters.failed(ResetReason::CutOff);
        }
        () = connect_and_relay(client, route, dialer, shared) => {}
    }
}

async fn connect_and_relay(client: Stream, route: &Route, dialer: &Dialer, shared: &BridgeState) {
    route.client.log(&route.name, &client);
    let seed = shared.accepted.fetch_add(1, Ordering::Relaxed);
    let target = match route::dial(route, dialer, seed).await {
        Ok(target) => target,
        Err(error) => {
            route.meters.failed(ResetReason::Dial);
            if let Some(suppressed) = route.unreachable.admit(Instant::now()) {
                tracing::warn!(route = route.name, suppressed, "client reset, target unreachable: {error}");
            }
            return;
        }
    };
    match relay(client, target, &route.meters).await {
        Err(cut) if cut.reason == ResetReason::Broken => {
            if let Some(suppressed) = route.broken.admit(Instant::now()) {
                tracing::info!(route = route.name, suppressed, "connection reset, {}", cut.error);
            }
        }
        Err(cut) => tracing::debug!(route = route.name, "connection reset by its client, {}", cut.error),
        Ok(()) => {}
    }
}
