//! Which endpoints there are, and the task that keeps each of them connected.

use std::collections::HashMap;
use std::fmt;
use std::future::poll_fn;
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Instant;

use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::task::AbortHandle;
use tonic::transport::Endpoint;
use tonic::transport::channel::Change;

use super::backoff::Backoff;
use super::link::Link;
use super::table::Shared;
use crate::transport::RdmaConnector;
use tonic_rdma_verbs::internal::Throttle;

/// The endpoints, whatever type their keys have.
pub(super) trait Membership: fmt::Debug + Send + Sync + 'static {
    /// Applies the changes that were sent so far. Whoever makes a call does, so that it sees what was sent before it.
    fn catch_up(&self);

    /// Applies changes as they come; ready when none can come any more.
    fn poll_changes(&self, context: &mut Context<'_>) -> Poll<()>;
}

/// Applies changes as they come, for the sake of endpoints that are added while no calls are made.
pub(super) async fn apply(members: Arc<dyn Membership>) {
    poll_fn(|context| members.poll_changes(context)).await;
}

/// The endpoints by their keys.
pub(super) struct Members<K> {
    inner: Mutex<Inner<K>>,
}

struct Inner<K> {
    changes: mpsc::Receiver<Change<K, Endpoint>>,
    members: HashMap<K, Member>,
    connector: RdmaConnector,
    shared: Arc<Shared>,
    runtime: Handle,
}

/// An endpoint; dropping it withdraws it, and ends its task.
struct Member {
    id: u64,
    task: AbortHandle,
    shared: Arc<Shared>,
}

impl<K: Hash + Eq> Members<K> {
    pub(super) fn new(
        changes: mpsc::Receiver<Change<K, Endpoint>>,
        connector: RdmaConnector,
        shared: Arc<Shared>,
    ) -> Self {
        let (members, runtime) = (HashMap::new(), Handle::current());
        Self { inner: Mutex::new(Inner { changes, members, connector, shared, runtime }) }
    }

    pub(super) fn insert(&self, key: K, endpoint: Endpoint) {
        self.lock().apply(Change::Insert(key, endpoint));
    }

    fn lock(&self) -> MutexGuard<'_, Inner<K>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K: Hash + Eq> Inner<K> {
    fn apply(&mut self, change: Change<K, Endpoint>) {
        match change {
            Change::Insert(key, endpoint) => {
                let (shared, connector) = (Arc::clone(&self.shared), self.connector.clone());
                let id = shared.add(endpoint.uri().clone());
                let task = self.runtime.spawn(keep(id, endpoint, connector, Arc::clone(&shared)));
                self.members.insert(key, Member { id, task: task.abort_handle(), shared });
            }
            Change::Remove(key) => drop(self.members.remove(&key)),
        }
    }
}

impl<K: Hash + Eq + Send + 'static> Membership for Members<K> {
    fn catch_up(&self) {
        let mut inner = self.lock();
        while let Ok(change) = inner.changes.try_recv() {
            inner.apply(change);
        }
    }

    fn poll_changes(&self, context: &mut Context<'_>) -> Poll<()> {
        let mut inner = self.lock();
        while let Some(change) = ready!(inner.changes.poll_recv(context)) {
            inner.apply(change);
        }
        Poll::Ready(())
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.task.abort();
        self.shared.remove(self.id);
    }
}

impl<K> fmt::Debug for Members<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Members").finish_non_exhaustive()
    }
}

/// Keeps an endpoint connected, and the table informed, until aborted.
async fn keep(id: u64, endpoint: Endpoint, connector: RdmaConnector, shared: Arc<Shared>) {
    let uri = endpoint.uri();
    let mut backoff = Backoff::new();
    // For each endpoint by itself: one that comes and goes does not hide what becomes of the others.
    let [up, ended, down] = [const { Throttle::new(Throttle::BURST) }; 3];
    loop {
        backoff.begin();
        match Link::connect(&endpoint, &connector).await {
            Ok(link) => {
                if let Some(suppressed) = up.admit(Instant::now()) {
                    tracing::info!(%uri, verdict = %link.info().verdict(), suppressed, "endpoint is up");
                }
                let link = Arc::new(link);
                shared.up(id, Arc::clone(&link));
                link.ended().await;
                backoff.ended();
                // Dialled at once, unless it was up for no time: calls may wait for how that comes out.
                if backoff.remaining().is_zero() {
                    shared.connecting(id);
                } else {
                    shared.down(id, "the connection ended as soon as it was made");
                }
                if let Some(suppressed) = ended.admit(Instant::now()) {
                    tracing::info!(%uri, suppressed, "endpoint's connection ended");
                }
            }
            Err(reason) => {
                backoff.failed();
                shared.down(id, &reason);
                if let Some(suppressed) = down.admit(Instant::now()) {
                    tracing::warn!(%uri, reason, retry_in = ?backoff.remaining(), suppressed, "endpoint is down");
                }
            }
        }
        tokio::time::sleep(backoff.remaining()).await;
    }
}
