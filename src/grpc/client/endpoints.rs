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
use crate::endpoint::{Dialer, RdmaConnectInfo};
use crate::grpc::calls::CallConfig;
use crate::transport::balance::EndpointStatus;
use tonic_rdma_verbs::internal::lock;

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
    pub(super) fn new(endpoints: Vec<Endpoint>, balances: bool, dialer: Dialer, calls: CallConfig) -> Self {
        let (changes, _) = watch::channel(());
        let runtime = Handle::current();
        let dialling = Arc::new(Dialling { dialer, calls, last: Mutex::default() });
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
            _ => self.connection(Instant::now()).await.map(drop).map_err(ChannelError::Unavailable),
        }
    }

    /// Returns the native connection of the only endpoint, if there is one. It may refuse the call.
    pub(super) fn only_native(&self) -> Option<Arc<Connection>> {
        match &*self.members {
            [only] => only.native_connection(),
            _ => None,
        }
    }

    /// Returns a connection for a call that has `begun` then: that of the endpoint, or the less busy one of two that are up, at random.
    pub(super) fn pick(&self, begun: Instant) -> Pick {
        let count = self.members.len();
        let (one, other) = match count {
            0 => return Pick::Fail(unavailable(0, None)),
            1 => return self.among(0..1, begun),
            _ => {
                let first = fastrand::usize(..count);
                (first, (first + fastrand::usize(1..count)) % count)
            }
        };
        match (self.members[one].look(begun), self.members[other].look(begun)) {
            (Look::Up(one), Look::Up(other)) => {
                Pick::Up(if one.load() <= other.load() { one } else { other })
            }
            (Look::Up(up), _) | (_, Look::Up(up)) => Pick::Up(up),
            _ => self.among((0..count).map(|index| (one + index) % count), begun),
        }
    }

    /// Returns the connection of the first of these members that is up.
    fn among(&self, members: impl Iterator<Item = usize>, begun: Instant) -> Pick {
        let (mut waits, mut last): (bool, Option<(Instant, Uri, Arc<Failure>)>) = (false, None);
        for member in members.map(|index| &self.members[index]) {
            match member.look(begun) {
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

    /// Waits for a connection, as long as a dial is under way. The call has `begun` then.
    pub(super) async fn connection(&self, begun: Instant) -> Result<Arc<Connection>, Status> {
        let mut changes = self.changes.subscribe();
        loop {
            changes.mark_unchanged();
            match self.pick(begun) {
                Pick::Up(connection) => return Ok(connection),
                Pick::Fail(status) => return Err(status),
                // This fails only if the sender is gone, which `self` holds.
                Pick::Wait => drop(changes.changed().await),
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
