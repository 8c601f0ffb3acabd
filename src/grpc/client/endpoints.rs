//! What the clones of a channel share: the endpoints, and the choice among them.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use http::Uri;

use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tonic::Status;
use tonic::transport::Endpoint;

use super::connection::{Connection, Dialling};
use super::error::{ChannelError, Failure, unavailable};
use super::member::{Look, Member, keep};
use crate::endpoint::lock::lock;
use crate::endpoint::{Config, Dialer, RdmaConnectInfo};
use crate::grpc::calls::CallConfig;
use crate::transport::balance::EndpointStatus;

/// The endpoints of a channel.
#[derive(Debug)]
pub(super) struct Endpoints {
    members: Vec<Arc<Member>>,
    dialling: Arc<Dialling>,
    changes: watch::Sender<()>,
    keepers: Vec<AbortHandle>,
    runtime: Handle,
}

/// The answer to a call that looks for a connection.
#[derive(Debug)]
pub(super) enum Pick {
    Up(Arc<Connection>),
    /// The call waits for a dial.
    Wait,
    Fail(Status),
}

impl Endpoints {
    /// Makes the endpoints of a channel. If the channel `balances` its calls, its endpoints stay connected without calls.
    pub(super) fn new(endpoints: Vec<Endpoint>, balances: bool, config: Config, calls: CallConfig) -> Self {
        let (changes, _) = watch::channel(());
        let runtime = Handle::current();
        let dialling = Arc::new(Dialling { dialer: Dialer::new(config), calls, last: Mutex::default() });
        let member = |endpoint| Arc::new(Member::new(endpoint, &dialling, &changes, balances, &runtime));
        let members: Vec<_> = endpoints.into_iter().map(member).collect();
        let kept = members.iter().filter(|_| balances);
        let keepers = kept.map(|member| runtime.spawn(keep(Arc::downgrade(member))).abort_handle()).collect();
        Self { members, dialling, changes, keepers, runtime }
    }

    /// Connects to the endpoint, or to at least one of several.
    pub(super) async fn connect(&self) -> Result<(), ChannelError> {
        match &self.members[..] {
            [] => Err(ChannelError::NoEndpoint),
            [one] if self.keepers.is_empty() => Ok(one.connect().await?),
            _ => self.connection().await.map(drop).map_err(ChannelError::Unavailable),
        }
    }

    /// Returns a connection for a call: that of the endpoint, or the less busy one of two that are up, at random.
    pub(super) fn pick(&self) -> Pick {
        let count = self.members.len();
        let (one, other) = match count {
            0 => return Pick::Fail(unavailable(0, None)),
            1 => return self.among(0..1),
            _ => {
                let first = fastrand::usize(..count);
                (first, (first + fastrand::usize(1..count)) % count)
            }
        };
        match (self.members[one].look(), self.members[other].look()) {
            (Look::Up(one), Look::Up(other)) => {
                Pick::Up(if one.load() <= other.load() { one } else { other })
            }
            (Look::Up(up), _) | (_, Look::Up(up)) => Pick::Up(up),
            _ => self.among((0..count).map(|index| (one + index) % count)),
        }
    }

    /// Returns the connection of the first of these members that is up.
    fn among(&self, members: impl Iterator<Item = usize>) -> Pick {
        let (mut waits, mut last): (bool, Option<(Instant, Uri, Arc<Failure>)>) = (false, None);
        for member in members.map(|index| &self.members[index]) {
            match member.look() {
                Look::Up(connection) => return Pick::Up(connection),
                Look::Wait => waits = true,
                Look::Down(since, failure) => {
                    if last.as_ref().is_none_or(|(latest, ..)| *latest < since) {
                        last = Some((since, member.endpoint().uri().clone(), failure));
                    }
                }
            }
        }
        if waits {
            return Pick::Wait;
        }
        Pick::Fail(unavailable(self.members.len(), last.map(|(_, uri, failure)| (uri, failure))))
    }

    /// Waits for a connection, as long as a dial is under way.
    pub(super) async fn connection(&self) -> Result<Arc<Connection>, Status> {
        let (mut changes, mut waits_since) = (self.changes.subscribe(), None);
        loop {
            changes.mark_unchanged();
            if let Some(since) = waits_since
                && let [only] = &self.members[..]
                && let Some(failure) = only.failed_after(since)
            {
                // Another look would dial again, without end.
                return Err(unavailable(1, Some((only.endpoint().uri().clone(), failure))));
            }
            match self.pick() {
                Pick::Up(connection) => return Ok(connection),
                Pick::Fail(status) => return Err(status),
                Pick::Wait => {
                    waits_since.get_or_insert_with(Instant::now);
                    // This fails only if the sender is gone, which `self` holds.
                    drop(changes.changed().await);
                }
            }
        }
    }

    /// Returns the runtime of the channel.
    pub(super) fn runtime(&self) -> &Handle {
        &self.runtime
    }

    pub(super) fn last_connection(&self) -> Option<RdmaConnectInfo> {
        lock(&self.dialling.last).clone()
    }

    pub(super) fn status(&self) -> Vec<EndpointStatus> {
        self.members.iter().map(|member| member.status()).collect()
    }
}

impl Drop for Endpoints {
    fn drop(&mut self) {
        self.keepers.iter().for_each(AbortHandle::abort);
    }
}
