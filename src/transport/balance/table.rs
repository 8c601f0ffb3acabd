//! Who is up, as calls and the endpoints' tasks see it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use http::Uri;
use tokio::sync::watch;

use super::link::{InFlight, Link};
use crate::endpoint::RdmaConnectInfo;

/// How an endpoint of a [`BalancedChannel`](super::BalancedChannel) is.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum EndpointState {
    /// Its first dial is under way, or the one after its connection ended.
    Connecting,
    /// It takes calls, over this connection.
    Up(RdmaConnectInfo),
    /// It takes none, for this reason, and is dialled again by back-off.
    Down(Arc<str>),
}

/// An endpoint of a [`BalancedChannel`](super::BalancedChannel).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct EndpointStatus {
    /// Where it is.
    pub uri: Uri,
    /// How it is.
    pub state: EndpointState,
    /// Calls that are on it now.
    pub calls: usize,
}

/// The table, and who waits for it to change.
#[derive(Debug, Default)]
pub(super) struct Shared {
    table: watch::Sender<Table>,
    ids: AtomicU64,
}

/// The endpoints, and how each is.
#[derive(Debug, Default)]
pub(super) struct Table {
    entries: BTreeMap<u64, Entry>,
    /// Of the entries that are up, their connections.
    up: Vec<Arc<Link>>,
    /// The last failure, with whose it was.
    last: Option<String>,
}

#[derive(Debug)]
struct Entry {
    uri: Uri,
    state: State,
}

#[derive(Debug)]
enum State {
    Connecting,
    Up(Arc<Link>),
    Down(Arc<str>),
}

/// What a call comes to.
#[derive(Debug)]
pub(super) enum Pick {
    /// It takes this connection.
    Up(InFlight),
    /// It waits for a change.
    Wait,
    /// It fails, for this reason.
    Fail(String),
}

impl Shared {
    /// Adds an endpoint.
    pub(super) fn add(&self, uri: Uri) -> u64 {
        let id = self.ids.fetch_add(1, Ordering::Relaxed);
        self.table.send_modify(|table| {
            table.entries.insert(id, Entry { uri, state: State::Connecting });
        });
        id
    }

    pub(super) fn remove(&self, id: u64) {
        self.table.send_modify(|table| {
            table.entries.remove(&id);
            table.list();
        });
    }

    pub(super) fn connecting(&self, id: u64) {
        self.set(id, State::Connecting);
    }

    pub(super) fn up(&self, id: u64, link: Arc<Link>) {
        self.set(id, State::Up(link));
    }

    pub(super) fn down(&self, id: u64, reason: &str) {
        self.set(id, State::Down(reason.into()));
    }

    /// Sets the state of an endpoint, unless it was removed meanwhile.
    fn set(&self, id: u64, state: State) {
        self.table.send_modify(|table| {
            let Some(entry) = table.entries.get_mut(&id) else { return };
            if let State::Down(reason) = &state {
                table.last = Some(format!("{}: {reason}", entry.uri));
            }
            entry.state = state;
            table.list();
        });
    }

    /// Says where a call goes.
    pub(super) fn pick(&self) -> Pick {
        self.table.borrow().pick()
    }

    /// What tells of changes from now on.
    pub(super) fn changes(&self) -> watch::Receiver<Table> {
        self.table.subscribe()
    }

    pub(super) fn status(&self) -> Vec<EndpointStatus> {
        self.table.borrow().entries.values().map(Entry::status).collect()
    }
}

impl Table {
    fn list(&mut self) {
        self.up.clear();
        self.up.extend(self.entries.values().filter_map(|entry| match &entry.state {
            State::Up(link) => Some(Arc::clone(link)),
            _ => None,
        }));
    }

    /// The less busy one of two connections taken at random, which is nearly as good as the least busy of all, and does
    /// not make all callers choose alike.
    fn pick(&self) -> Pick {
        let count = self.up.len();
        if count == 0 {
            return self.none();
        }
        let first = fastrand::usize(..count);
        // Any other than the first, if there is another.
        let second = (first + fastrand::usize(1..count.max(2))) % count;
        let two = [first, second].map(|index| &self.up[index]);
        let live = two.into_iter().filter(|link| !link.is_over()).min_by_key(|link| link.load());
        match live.or_else(|| self.up.iter().find(|link| !link.is_over())) {
            Some(link) => Pick::Up(InFlight::new(Arc::clone(link))),
            // Their tasks are about to notice.
            None => Pick::Wait,
        }
    }

    fn none(&self) -> Pick {
        if self.entries.values().any(|entry| matches!(entry.state, State::Connecting)) {
            return Pick::Wait;
        }
        let last = self.last.as_deref().unwrap_or("none has failed");
        Pick::Fail(match self.entries.len() {
            0 => "there is no endpoint to call".into(),
            1 => format!("the endpoint is down: {last}"),
            count => format!("all {count} endpoints are down, the last one to fail was {last}"),
        })
    }
}

impl Entry {
    fn status(&self) -> EndpointStatus {
        let (state, calls) = match &self.state {
            State::Connecting => (EndpointState::Connecting, 0),
            State::Up(link) => (EndpointState::Up(link.info().clone()), link.load()),
            State::Down(reason) => (EndpointState::Down(Arc::clone(reason)), 0),
        };
        EndpointStatus { uri: self.uri.clone(), state, calls }
    }
}
