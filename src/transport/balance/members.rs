//! The endpoints of a channel: those that it is made with, and those that come and go by changes.

use std::collections::HashMap;
use std::fmt;
use std::future::poll_fn;
use std::hash::Hash;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, ready};
use std::time::Instant;

use tokio::sync::mpsc;
use tonic::Status;
use tonic::transport::Endpoint;
use tonic::transport::channel::Change;

use super::table::{Connection, KeptEndpoint, Table};
use crate::endpoint::OwnedTask;
use tonic_rdma_verbs::unstable::lock;

/// The endpoints of a channel, which calls pick from. All clones of the channel share it; the tasks of the
/// endpoints do not hold it. Dropping it ends these tasks.
pub(crate) struct Members<C: Connection> {
    table: Arc<Table<C>>,
    /// Those that the channel was made with.
    _first: Vec<KeptEndpoint<C>>,
    /// How changes are applied, and the task that does it as they arrive.
    changing: Option<(Arc<Apply>, OwnedTask)>,
}

/// Applies the changes that were sent so far, or with a context changes as they arrive. Ready when no more
/// changes are there, or with a context when no more can arrive.
type Apply = dyn Fn(Option<&mut Context<'_>>) -> Poll<()> + Send + Sync;

impl<C: Connection> Members<C> {
    /// Makes the endpoints of a channel from those of `table`.
    pub(crate) fn new(table: Arc<Table<C>>, first: Vec<KeptEndpoint<C>>) -> Self {
        Self { table, _first: first, changing: None }
    }

    /// Adds and removes endpoints by `changes`, besides those that the channel was made with. `keep` adds an
    /// endpoint to the table.
    pub(crate) fn changing<K: Hash + Eq + Send + 'static>(
        self,
        changes: mpsc::Receiver<Change<K, Endpoint>>,
        keep: impl Fn(&Arc<Table<C>>, Endpoint) -> KeptEndpoint<C> + Send + 'static,
    ) -> Self {
        let table = Arc::clone(&self.table);
        let apply = apply(changes, move |endpoint| keep(&table, endpoint));
        // As changes arrive, so that a new endpoint is dialled even while no calls are made.
        let applying = Arc::clone(&apply);
        let applying = tokio::spawn(poll_fn(move |context| applying(Some(context)))).abort_handle();
        Self { changing: Some((apply, OwnedTask(applying))), ..self }
    }

    /// Returns the table, with all changes that were sent so far. Each call asks for it at each try, so that
    /// earlier changes hold for the call.
    pub(crate) fn table(&self) -> &Arc<Table<C>> {
        if let Some((apply, _)) = &self.changing {
            // Without a context this is always ready.
            let _ = apply(None);
        }
        &self.table
    }

    /// Waits for a connection for a call that began at `begun`, as long as an endpoint is being dialled.
    ///
    /// # Errors
    /// No endpoint is up.
    pub(crate) async fn connection(&self, begun: Instant) -> Result<Arc<C>, Status> {
        let mut changes = self.table.changes.subscribe();
        loop {
            changes.mark_unchanged();
            if let Some(connection) = self.table().pick(begun)? {
                return Ok(connection);
            }
            // This fails only if the sender is gone, which the table holds.
            let _ = changes.changed().await;
        }
    }
}

impl<C: Connection> fmt::Debug for Members<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.table.status()).finish()
    }
}

/// Keeps the endpoints of `changes` by their keys.
fn apply<C: Connection, K: Hash + Eq + Send + 'static>(
    changes: mpsc::Receiver<Change<K, Endpoint>>,
    keep: impl Fn(Endpoint) -> KeptEndpoint<C> + Send + 'static,
) -> Arc<Apply> {
    let members = Mutex::new((HashMap::new(), changes, keep));
    Arc::new(move |mut context| {
        let (members, changes, keep) = &mut *lock(&members);
        loop {
            let change = match &mut context {
                Some(context) => ready!(changes.poll_recv(context)),
                None => changes.try_recv().ok(),
            };
            match change {
                None => return Poll::Ready(()),
                Some(Change::Insert(key, endpoint)) => drop(members.insert(key, keep(endpoint))),
                Some(Change::Remove(key)) => drop(members.remove(&key)),
            }
        }
    })
}
