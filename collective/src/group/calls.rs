//! The gRPC service of a rank, and calls to that of another.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tonic::transport::Channel;
use tonic::{Request, Response, Status};

use crate::error::{CollectiveError, setup};
use crate::group::agreement::{self, Standing};
use crate::group::launch::Launch;
use crate::group::proto::group_client::GroupClient;
use crate::group::proto::group_server::Group;
use crate::group::proto::{Proposal, StatusReply, StatusRequest, Suspect};
use crate::group::session::Settings;
use crate::group::state::{GroupId, SessionState};
use tonic_rdma_tensor::unstable::bootstrap;

#[cfg(feature = "_tls-any")]
use crate::error::setting;
#[cfg(feature = "_tls-any")]
use tonic_rdma::unstable::chain;

/// The service of another rank.
#[derive(Clone, Debug)]
pub(crate) struct Peer {
    /// The connection, which is made at the first call.
    pub(crate) connection: Channel,
    client: GroupClient<Channel>,
}

impl Peer {
    /// Makes a client of the service at `address`.
    ///
    /// # Errors
    /// The address or the TLS settings can't be used; the text says why.
    pub(crate) fn new(settings: &Settings, address: &str) -> Result<Self, CollectiveError> {
        let endpoint = bootstrap::endpoint(settings.scheme(), address).map_err(setup)?;
        #[cfg(feature = "_tls-any")]
        let endpoint = match &settings.client_tls {
            Some(tls) => endpoint.tls_config(tls.clone()).map_err(|error| {
                let reason = chain(&error);
                setting(format!("the TLS settings for calls to other ranks can't be used: {reason}"))
            })?,
            None => endpoint,
        };
        let connection = endpoint.connect_lazy();
        Ok(Self { client: GroupClient::new(connection.clone()), connection })
    }

    /// Asks where the rank is and what it knows.
    pub(crate) async fn status(&self, group: &GroupId, limit: Duration) -> Result<StatusReply, Status> {
        self.ask(group, None, limit).await
    }

    /// Asks for a promise. Returns whether the rank gave it.
    pub(crate) async fn propose(
        &self,
        group: &GroupId,
        proposal: &agreement::Proposal,
        limit: Duration,
    ) -> Result<bool, Status> {
        let proposal = Proposal {
            generation: proposal.generation,
            coordinator: proposal.coordinator as u32,
            members: proposal.members.iter().map(|rank| *rank as u32).collect(),
        };
        self.ask(group, Some(proposal), limit).await.map(|reply| reply.promises)
    }

    /// Waits for an answer, but not longer than `limit`.
    async fn ask(
        &self,
        group: &GroupId,
        proposal: Option<Proposal>,
        limit: Duration,
    ) -> Result<StatusReply, Status> {
        let mut client = self.client.clone();
        let calling = client.status(StatusRequest { group: group.to_vec().into(), proposal });
        match tokio::time::timeout(limit, calling).await {
            Ok(answer) => answer.map(tonic::Response::into_inner),
            Err(_) => Err(Status::deadline_exceeded(format!("it did not answer within {limit:?}"))),
        }
    }
}

/// Returns the standing in a reply, without ranks that do not exist.
pub(crate) fn standing_of(reply: StatusReply, size: usize) -> Standing {
    let exists = |rank: &usize| *rank < size;
    let mut members: Vec<usize> =
        reply.members.into_iter().map(|rank| rank as usize).filter(exists).collect();
    members.sort_unstable();
    members.dedup();
    let suspects: BTreeMap<usize, String> = reply
        .suspects
        .into_iter()
        .map(|suspect| (suspect.rank as usize, suspect.reason))
        .filter(|(rank, _)| *rank < size)
        .collect();
    Standing {
        generation: reply.generation,
        members,
        agreeing: reply.agreeing,
        promised: reply.promised,
        suspects,
    }
}

/// The longest request in bytes.
pub(crate) const MAX_REQUEST: usize = 64 << 10;

#[derive(Debug)]
pub(crate) struct Service(pub(crate) Arc<SessionState>);

impl Service {
    /// Refuses callers of another group, and all callers once this rank has left its group.
    fn check(&self, group: &[u8]) -> Result<(), Status> {
        if let Some(reason) = self.0.left_reason() {
            return Err(Status::aborted(format!("this rank has left the group, because {reason}")));
        }
        match self.0.group() {
            Some(ours) if ours[..] == *group => Ok(()),
            Some(_) => Err(Status::permission_denied("the caller belongs to another group")),
            None => Err(Status::unavailable("the ranks have not met yet")),
        }
    }
}

#[tonic::async_trait]
impl Group for Service {
    async fn status(&self, request: Request<StatusRequest>) -> Result<Response<StatusReply>, Status> {
        let StatusRequest { group, proposal } = request.into_inner();
        self.check(&group)?;
        let mut promises = false;
        if let Some(proposal) = proposal {
            if proposal.members.len() > Launch::MAX_SIZE {
                return Err(Status::invalid_argument(format!("a group of {} ranks", proposal.members.len())));
            }
            let members = proposal.members.into_iter().map(|rank| rank as usize).collect();
            let (generation, coordinator) = (proposal.generation, proposal.coordinator as usize);
            promises = self.0.promise(&agreement::Proposal { generation, coordinator, members }).is_ok();
        }
        let (standing, epoch) = self.0.standing();
        // The position has ranks of the generation, and the reply has those of the bootstrap.
        let waits_for = epoch
            .as_ref()
            .and_then(|epoch| epoch.members.get(epoch.position.waits_for()?))
            .map(|rank| *rank as u32);
        let suspects =
            standing.suspects.into_iter().map(|(rank, reason)| Suspect { rank: rank as u32, reason });
        Ok(Response::new(StatusReply {
            generation: standing.generation,
            members: standing.members.into_iter().map(|rank| rank as u32).collect(),
            agreeing: standing.agreeing,
            promised: standing.promised,
            suspects: suspects.collect(),
            waits_for,
            promises,
        }))
    }
}
