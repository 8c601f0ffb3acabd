//! How both ends of a connection find out that they are in one process.
//!
//! Addresses and process ids don't tell: there are network namespaces, forwarded ports and proxies. But the
//! two queue pairs of the software device prove with random nonces that they are connected to one another.
//! The server's end of each native connection over that device puts them on a list before it confirms, unless
//! calls within the process are not allowed. Only a client's end of this process can find them there.

use std::any::Any;
use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::timeout;

use tonic_rdma_verbs::Probe;
use tonic_rdma_verbs::unstable::lock;

/// The nonces of the client's and the server's queue pair.
type Nonces = (u64, u64);
/// What the server's end hands to the client's end.
pub(crate) type Handed = Arc<dyn Any + Send + Sync>;

static HOSTS: LazyLock<Mutex<HashMap<Nonces, watch::Receiver<Option<Handed>>>>> =
    LazyLock::new(Mutex::default);

/// One end of a connection, and what it knows of the other end.
#[derive(Debug, Default)]
pub(crate) enum Meeting {
    /// The ends are in different processes, or don't look for one another.
    #[default]
    None,
    /// The server's end. It is on the list until the client's end finds it, or until it is dropped.
    Host(Nonces, watch::Sender<Option<Handed>>),
    /// The client's end. It has found the server's, which may take this long to serve the connection.
    Guest(watch::Receiver<Option<Handed>>, Duration),
}

impl Meeting {
    /// Puts the server's end on the list.
    pub(in crate::endpoint) fn host(probe: Probe) -> Self {
        let (Some(server), Some(client)) = (probe.ours, probe.peers) else { return Self::None };
        let (sender, receiver) = watch::channel(None);
        lock(&HOSTS).insert((client, server), receiver);
        Self::Host((client, server), sender)
    }

    /// Looks for the server's end.
    pub(in crate::endpoint) fn guest(probe: Probe, limit: Duration) -> Self {
        let (Some(client), Some(server)) = (probe.ours, probe.peers) else { return Self::None };
        lock(&HOSTS).remove(&(client, server)).map_or(Self::None, |host| Self::Guest(host, limit))
    }

    /// Hands something to the client's end, if that is of this process.
    pub(crate) fn hand(&self, handed: Handed) {
        if let Self::Host(_, sender) = self {
            sender.send_replace(Some(handed));
        }
    }

    /// Returns what the server's end hands over, once it does. `None` if the server is in another process, or
    /// does not serve the connection soon.
    pub(crate) async fn handed(&self) -> Option<Handed> {
        let Self::Guest(receiver, limit) = self else { return None };
        let mut receiver = receiver.clone();
        let handed = timeout(*limit, receiver.wait_for(Option::is_some)).await;
        handed.ok()?.ok()?.clone()
    }
}

impl Drop for Meeting {
    fn drop(&mut self) {
        if let Self::Host(nonces, _) = self {
            lock(&HOSTS).remove(nonces);
        }
    }
}
