//! The table of endpoints: the endpoints' tasks write it, and calls pick a connection from it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use http::Uri;
use tokio::sync::watch;

use super::connection::{EndpointConnection, InFlight};
use super::error::{BalanceError, DialError};
use crate::endpoint::RdmaConnectInfo;

/// The state of an endpoint of a [`BalancedChannel`](super::BalancedChannel).
///
/// ```
/// use tonic_rdma::EndpointState;
///
/// fn is_up(state: &EndpointState) -> bool {
///     matches!(state, EndpointState::Up(_))
/// }
/// # assert!(!is_up(&EndpointState::Connecting));
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum EndpointState {
    /// The first dial is under way, or the first dial after the connection ended.
    Connecting,
    /// The endpoint takes calls over this connection.
    Up(RdmaConnectInfo),
    /// The endpoint takes no calls for this reason, and is dialled again by back-off.
    Down(Arc<str>),
}

/// An endpoint of a [`BalancedChannel`](super::BalancedChannel), as [`endpoints`](super::BalancedChannel::endpoints) returns it.
///
/// ```
/// use tonic_rdma::{BalancedChannel, EndpointStatus};
///
/// fn busiest(channel: &BalancedChannel) -> Option<EndpointStatus> {
///     channel.endpoints().into_iter().max_by_key(|endpoint| endpoint.calls)
/// }
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct EndpointStatus {
    /// The URI of the endpoint.
    pub uri: Uri,
    /// The state of the endpoint.
    pub state: EndpointState,
    /// The number of calls in flight on the endpoint.
    pub calls: usize,
}

/// The table of endpoints, whose changes can be waited for.
#[derive(Debug, Default)]
pub(super) struct EndpointTable {
    entries: watch::Sender<Entries>,
    ids: AtomicU64,
}

/// The endpoints by their numbers.
#[derive(Debug, Default)]
pub(super) struct Entries {
    by_id: BTreeMap<u64, Entry>,
    /// The connections of the entries that are up.
    up: Vec<Arc<EndpointConnection>>,
    /// The endpoint that failed last, and its failure.
    last: Option<(Uri, Arc<DialError>)>,
}

#[derive(Debug)]
struct Entry {
    uri: Uri,
    state: EntryState,
}

#[derive(Debug)]
enum EntryState {
    Connecting,
    Up(Arc<EndpointConnection>),
    Down(Arc<str>),
}

/// The answer to a call that looks for a connection.
#[derive(Debug)]
pub(super) enum Pick {
    /// The call takes this connection.
    Up(InFlight),
    /// The call waits for a change of the table.
    Wait,
    /// The call fails.
    Fail(BalanceError),
}

impl EndpointTable {
    /// Adds an endpoint, and returns its number.
    pub(super) fn add(&self, uri: Uri) -> u64 {
        let id = self.ids.fetch_add(1, Ordering::Relaxed);
        self.entries.send_modify(|entries| {
            entries.by_id.insert(id, Entry { uri, state: EntryState::Connecting });
        });
        id
    }

    pub(super) fn remove(&self, id: u64) {
        self.entries.send_modify(|entries| {
            entries.by_id.remove(&id);
            entries.list_up();
        });
    }

    pub(super) fn connecting(&self, id: u64) {
        self.set(id, EntryState::Connecting);
    }

    pub(super) fn up(&self, id: u64, connection: Arc<EndpointConnection>) {
        self.set(id, EntryState::Up(connection));
    }

    pub(super) fn down(&self, id: u64, error: DialError) {
        let reason = error.to_string().into();
        self.entries.send_modify(|entries| {
            if let Some(entry) = entries.by_id.get_mut(&id) {
                entries.last = Some((entry.uri.clone(), Arc::new(error)));
                entry.state = EntryState::Down(reason);
                entries.list_up();
            }
        });
    }

    /// Sets the state of an endpoint, unless it was removed meanwhile.
    fn set(&self, id: u64, state: EntryState) {
        self.entries.send_modify(|entries| {
            let Some(entry) = entries.by_id.get_mut(&id) else { return };
            entry.state = state;
            entries.list_up();
        });
    }

    /// Returns the connection for a call, or the decision that the call waits or fails.
    pub(super) fn pick(&self) -> Pick {
        self.entries.borrow().pick()
    }

    /// Returns a receiver that sees changes of the table from now on.
    pub(super) fn changes(&self) -> watch::Receiver<Entries> {
        self.entries.subscribe()
    }

    pub(super) fn status(&self) -> Vec<EndpointStatus> {
        self.entries.borrow().by_id.values().map(Entry::status).collect()
    }
}

impl Entries {
    fn list_up(&mut self) {
        self.up.clear();
        self.up.extend(self.by_id.values().filter_map(|entry| match &entry.state {
            EntryState::Up(connection) => Some(Arc::clone(connection)),
            _ => None,
        }));
    }

    /// Takes two connections at random, and returns the connection with fewer calls in flight. It is nearly as good as the least busy
    /// connection of all, and concurrent calls do not all choose one connection.
    fn pick(&self) -> Pick {
        let count = self.up.len();
        if count == 0 {
            return self.without_connection();
        }
        let first = fastrand::usize(..count);
        // Another connection than the first, if there is more than one.
        let second = (first + fastrand::usize(1..count.max(2))) % count;
        let two = [first, second].map(|index| &self.up[index]);
        let live = two
            .into_iter()
            .filter(|connection| !connection.is_ended())
            .min_by_key(|connection| connection.load());
        match live.or_else(|| self.up.iter().find(|connection| !connection.is_ended())) {
            Some(connection) => Pick::Up(InFlight::new(Arc::clone(connection))),
            // All of them have ended, and their tasks are about to notice.
            None => Pick::Wait,
        }
    }

    fn without_connection(&self) -> Pick {
        if self.by_id.values().any(|entry| matches!(entry.state, EntryState::Connecting)) {
            return Pick::Wait;
        }
        let last = match &self.last {
            Some((uri, error)) => format!("{uri}: {error}"),
            None => "none has failed".into(),
        };
        let message = match self.by_id.len() {
            0 => "there is no endpoint to call".into(),
            1 => format!("the endpoint is down: {last}"),
            count => format!("all {count} endpoints are down, the last one to fail was {last}"),
        };
        let source = self.last.as_ref().map(|(_, error)| Arc::clone(error));
        Pick::Fail(BalanceError::unavailable(message, source))
    }
}

impl Entry {
    fn status(&self) -> EndpointStatus {
        let (state, calls) = match &self.state {
            EntryState::Connecting => (EndpointState::Connecting, 0),
            EntryState::Up(connection) => (EndpointState::Up(connection.info().clone()), connection.load()),
            EntryState::Down(reason) => (EndpointState::Down(Arc::clone(reason)), 0),
        };
        EndpointStatus { uri: self.uri.clone(), state, calls }
    }
}
