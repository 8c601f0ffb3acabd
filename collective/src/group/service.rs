//! The gRPC service of a rank.

use std::sync::Arc;

use tonic::{Request, Response, Status};

use crate::group::agreement::Proposal;
use crate::group::launch::Launch;
use crate::group::proto::group_server::Group;
use crate::group::proto::{StatusReply, StatusRequest, Suspect};
use crate::group::state::State;

/// The longest request in bytes.
pub(crate) const MAX_REQUEST: usize = 64 << 10;

/// The service.
#[derive(Debug)]
pub(crate) struct Service(pub(crate) Arc<State>);

impl Service {
    /// Refuses callers of another group, and all callers once this rank has left its group.
    fn check(&self, group: &[u8]) -> Result<(), Status> {
        if let Some(reason) = self.0.left() {
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
            promises = self.0.promise(&Proposal { generation, coordinator, members }).is_ok();
        }
        let (standing, epoch) = self.0.standing();
        // The position has ranks of the generation, and the reply has those of the meeting.
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
