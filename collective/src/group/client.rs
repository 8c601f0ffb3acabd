//! Calls to the service of another rank.

use std::collections::BTreeMap;
use std::time::Duration;

use tonic::Status;
use tonic::transport::Channel;
#[cfg(feature = "_tls-any")]
use tonic_rdma::internal::chain;
use tonic_rdma_tensor::internal::meeting;

use crate::error::CollectiveError;
use crate::group::agreement::{self, Standing};
use crate::group::launch::setup;
use crate::group::proto::group_client::GroupClient;
use crate::group::proto::{Proposal, StatusReply, StatusRequest};
use crate::group::settings::Settings;
use crate::group::state::GroupId;

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
        let endpoint = meeting::endpoint(settings.scheme(), address).map_err(setup)?;
        #[cfg(feature = "_tls-any")]
        let endpoint = match &settings.client_tls {
            Some(tls) => endpoint.tls_config(tls.clone()).map_err(|error| {
                let reason = chain(&error);
                setup(format!("the TLS settings for calls to other ranks can't be used: {reason}"))
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
