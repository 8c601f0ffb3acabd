//! Calls to the service of another rank.

use std::collections::BTreeMap;
use std::time::Duration;

use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status};
use tonic_rdma::internal::{chain, with_causes};

use crate::group::agreement::{Proposal, Standing};
use crate::group::proto::group_client::GroupClient;
use crate::group::proto::{
    JoinReply, JoinRequest, ProposeRequest, ReportRequest, StatusReply, StatusRequest,
};
use crate::group::settings::Settings;
use crate::group::state::GroupId;

/// The longest answer in bytes: all ranks of the largest group.
const MAX_ANSWER: usize = 4 << 20;

/// The service of another rank.
#[derive(Clone, Debug)]
pub(crate) struct Peer {
    client: GroupClient<Channel>,
}

impl Peer {
    /// Makes a client of the service at `address`. It connects at the first call.
    ///
    /// # Errors
    /// The address or the TLS settings can't be used; the text says why.
    pub(crate) fn new(settings: &Settings, address: &str) -> Result<Self, String> {
        let scheme = settings.scheme();
        let endpoint = Endpoint::from_shared(format!("{scheme}://{address}"))
            .map_err(|error| format!("{address:?} is no host:port: {}", chain(&error)))?
            .connect_timeout(Duration::from_secs(5))
            .tcp_nodelay(true)
            .http2_keep_alive_interval(Duration::from_secs(10))
            .keep_alive_timeout(Duration::from_secs(20));
        #[cfg(feature = "_tls-any")]
        let endpoint = match &settings.client_tls {
            Some(tls) => endpoint.tls_config(tls.clone()).map_err(|error| {
                format!("the TLS settings for calls to other ranks can't be used: {}", chain(&error))
            })?,
            None => endpoint,
        };
        let client = GroupClient::new(endpoint.connect_lazy()).max_decoding_message_size(MAX_ANSWER);
        Ok(Self { client })
    }

    /// Joins the meeting of rank 0.
    pub(crate) async fn join(&self, request: JoinRequest, limit: Duration) -> Result<JoinReply, Status> {
        bounded(limit, self.client.clone().join(Request::new(request))).await
    }

    /// Asks where the rank is and what it knows.
    pub(crate) async fn status(&self, group: &GroupId, limit: Duration) -> Result<StatusReply, Status> {
        let request = StatusRequest { group: group.to_vec().into() };
        bounded(limit, self.client.clone().status(Request::new(request))).await
    }

    /// Reports an error of this rank.
    pub(crate) async fn report(
        &self,
        group: &GroupId,
        generation: u64,
        rank: usize,
        message: &str,
        limit: Duration,
    ) -> Result<(), Status> {
        let (group, message) = (group.to_vec().into(), message.to_owned());
        let request = ReportRequest { group, generation, rank: rank as u32, message };
        bounded(limit, self.client.clone().report(Request::new(request))).await.map(drop)
    }

    /// Asks for a promise. Returns whether the rank gave it.
    pub(crate) async fn propose(
        &self,
        group: &GroupId,
        proposal: &Proposal,
        limit: Duration,
    ) -> Result<bool, Status> {
        let request = ProposeRequest {
            group: group.to_vec().into(),
            generation: proposal.generation,
            coordinator: proposal.coordinator as u32,
            members: proposal.members.iter().map(|rank| *rank as u32).collect(),
        };
        let reply = bounded(limit, self.client.clone().propose(Request::new(request))).await?;
        Ok(reply.refusal.is_empty())
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

/// Waits for an answer, but not longer than `limit`.
async fn bounded<T>(
    limit: Duration,
    call: impl Future<Output = Result<tonic::Response<T>, Status>>,
) -> Result<T, Status> {
    match tokio::time::timeout(limit, call).await {
        Ok(answer) => answer.map(tonic::Response::into_inner),
        Err(_) => Err(Status::deadline_exceeded(format!("it did not answer within {limit:?}"))),
    }
}

/// Returns the message of a status, with those of its sources, because tonic's message of a lost connection gives no reason.
pub(crate) fn describe(status: &Status) -> String {
    with_causes(status.message(), status)
}
