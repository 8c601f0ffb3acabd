//! The endpoints of a channel, and the task that keeps each of them connected.

use std::collections::HashMap;
use std::fmt;
use std::future::poll_fn;
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, ready};
use std::time::Instant;

use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::task::AbortHandle;
use tonic::transport::Endpoint;
use tonic::transport::channel::Change;

use super::backoff::Backoff;
use super::connection::EndpointConnection;
use super::error::DialError;
use super::table::EndpointTable;
use crate::transport::RdmaConnector;
use tonic_rdma_verbs::internal::{Throttle, lock};

/// The endpoints, without the type of their keys.
pub(super) trait Membership: fmt::Debug + Send + Sync + 'static {
    /// Applies the changes that were sent so far. Each call does this first, so that earlier changes hold for the call.
    fn catch_up(&self);

    /// Applies changes as they arrive. Ready when no more changes can arrive.
    fn poll_changes(&self, context: &mut Context<'_>) -> Poll<()>;
}

/// Applies changes as they arrive, so that a new endpoint is dialled even while no calls are made.
pub(super) async fn apply(members: Arc<dyn Membership>) {
    poll_fn(|context| members.poll_changes(context)).await;
}

/// The endpoints by their keys.
pub(super) struct Members<K> {
    inner: Mutex<MembersInner<K>>,
}

struct MembersInner<K> {
    changes: mpsc::Receiver<Change<K, Endpoint>>,
    members: HashMap<K, Member>,
    connector: RdmaConnector,
    table: Arc<EndpointTable>,
    runtime: Handle,
}

/// An endpoint. Dropping it removes it from the table, and ends its task.
struct Member {
    id: u64,
    task: AbortHandle,
    table: Arc<EndpointTable>,
}

impl<K: Hash + Eq> Members<K> {
    pub(super) fn new(
        changes: mpsc::Receiver<Change<K, Endpoint>>,
        connector: RdmaConnector,
        table: Arc<EndpointTable>,
    ) -> Self {
        let (members, runtime) = (HashMap::new(), Handle::current());
        Self { inner: Mutex::new(MembersInner { changes, members, connector, table, runtime }) }
    }

    pub(super) fn insert(&self, key: K, endpoint: Endpoint) {
        self.lock().apply(Change::Insert(key, endpoint));
    }

    fn lock(&self) -> MutexGuard<'_, MembersInner<K>> {
        lock(&self.inner)
    }
}

impl<K: Hash + Eq> MembersInner<K> {
    fn apply(&mut self, change: Change<K, Endpoint>) {
        match change {
            Change::Insert(key, endpoint) => {
                let (table, connector) = (Arc::clone(&self.table), self.connector.clone());
                let id = table.add(endpoint.uri().clone());
                let task = self.runtime.spawn(keep(id, endpoint, connector, Arc::clone(&table)));
                self.members.insert(key, Member { id, task: task.abort_handle(), table });
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
        self.table.remove(self.id);
    }
}

impl<K> fmt::Debug for Members<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Members").finish_non_exhaustive()
    }
}

/// Keeps an endpoint connected, and its entry in the table up to date, until the task is aborted.
async fn keep(id: u64, endpoint: Endpoint, connector: RdmaConnector, table: Arc<EndpointTable>) {
    let uri = endpoint.uri();
    let mut backoff = Backoff::new();
    // Each endpoint limits its own log lines, so an endpoint that comes and goes does not hide the lines of the others.
    let [up, ended, down] = [const { Throttle::new(Throttle::BURST) }; 3];
    loop {
        backoff.begin();
        match EndpointConnection::connect(&endpoint, connector.clone()).await {
            Ok(connection) => {
                if let Some(suppressed) = up.admit(Instant::now()) {
                    tracing::info!(%uri, verdict = %connection.info().verdict(), suppressed, "endpoint is up");
                }
                let connection = Arc::new(connection);
                table.up(id, Arc::clone(&connection));
                connection.ended().await;
                backoff.ended();
                // The endpoint is dialled again at once, and calls wait for that dial. After a short connection the back-off delays the
                // dial, and no call waits.
                if backoff.remaining().is_zero() {
                    table.connecting(id);
                } else {
                    table.down(id, DialError::EndedAtOnce);
                }
                if let Some(suppressed) = ended.admit(Instant::now()) {
                    tracing::info!(%uri, suppressed, "endpoint's connection ended");
                }
            }
            Err(error) => {
                backoff.failed();
                let reason = error.to_string();
                table.down(id, error);
                if let Some(suppressed) = down.admit(Instant::now()) {
                    tracing::warn!(%uri, reason, retry_in = ?backoff.remaining(), suppressed, "endpoint is down");
                }
            }
        }
        tokio::time::sleep(backoff.remaining()).await;
    }
}
