//! The gRPC service of a rank.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tonic::{Request, Response, Status};

use crate::group::agreement::Proposal;
use crate::group::launch::Launch;
use crate::group::proto::group_server::Group;
use crate::group::proto::{
    JoinReply, JoinRequest, ProposeReply, ProposeRequest, ReportReply, ReportRequest, StatusReply,
    StatusRequest, Suspect,
};
use crate::group::state::State;

/// How long a call of `Join` is held before its answer names the missing ranks.
const HOLD: Duration = Duration::from_secs(2);

/// The longest message of a report in bytes.
pub(crate) const MAX_MESSAGE: usize = 1024;

/// The longest request in bytes.
pub(crate) const MAX_REQUEST: usize = 64 << 10;

/// The service.
#[derive(Debug)]
pub(crate) struct Service {
    state: Arc<State>,
}

impl Service {
    pub(crate) fn new(state: Arc<State>) -> Self {
        Self { state }
    }

    /// Refuses callers of another group, and all callers once this rank has left its group.
    fn check(&self, group: &[u8]) -> Result<(), Status> {
        if let Some(reason) = self.state.left() {
            return Err(Status::aborted(format!("this rank has left the group, because {reason}")));
        }
        match self.state.group() {
            Some(ours) if ours[..] == *group => Ok(()),
            Some(_) => Err(Status::permission_denied("the caller belongs to another group")),
            None => Err(Status::unavailable("the ranks have not met yet")),
        }
    }
}

#[tonic::async_trait]
impl Group for Service {
    async fn join(&self, request: Request<JoinRequest>) -> Result<Response<JoinReply>, Status> {
        let request = request.into_inner();
        let rank = request.rank as usize;
        let me = self.state.me;
        let no_meeting =
            || Status::failed_precondition(format!("this is rank {me}, and the ranks meet at rank 0"));
        let turn = self.state.with_meeting(|meeting| meeting.admit(request)).ok_or_else(no_meeting)??;
        let group = self.state.group().ok_or_else(no_meeting)?;
        let until = tokio::time::Instant::now() + HOLD;
        loop {
            let mut changed = Box::pin(self.state.changed.notified());
            // From here on no change is missed.
            Pin::as_mut(&mut changed).enable();
            let (members, missing, latest) = self
                .state
                .look_at_meeting(|meeting| {
                    (meeting.members(), meeting.missing(), meeting.is_latest(rank, turn))
                })
                .ok_or_else(no_meeting)?;
            if let Some(members) = members {
                return Ok(Response::new(JoinReply {
                    missing: Vec::new(),
                    group: group.to_vec().into(),
                    members,
                }));
            }
            if !latest {
                return Err(Status::aborted("the caller has called again"));
            }
            if tokio::time::timeout_at(until, changed).await.is_err() {
                return Ok(Response::new(JoinReply { missing, ..JoinReply::default() }));
            }
        }
    }

    async fn status(&self, request: Request<StatusRequest>) -> Result<Response<StatusReply>, Status> {
        self.check(&request.get_ref().group)?;
        let (standing, epoch) = self.state.standing();
        let place = epoch.as_ref().map(|epoch| epoch.position.place());
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
            operation: place.map(|place| place.operation).unwrap_or_default(),
            step: place.map(|place| place.step).unwrap_or_default(),
            steps: place.map(|place| place.steps).unwrap_or_default(),
            waits_for,
            ready: self.state.is_ready(),
        }))
    }

    async fn report(&self, request: Request<ReportRequest>) -> Result<Response<ReportReply>, Status> {
        let request = request.get_ref();
        self.check(&request.group)?;
        self.state.report(request.generation, request.rank as usize, shortened(&request.message));
        Ok(Response::new(ReportReply {}))
    }

    async fn propose(&self, request: Request<ProposeRequest>) -> Result<Response<ProposeReply>, Status> {
        let ProposeRequest { group, generation, coordinator, members } = request.into_inner();
        self.check(&group)?;
        if members.len() > Launch::MAX_SIZE {
            return Err(Status::invalid_argument(format!("a group of {} ranks", members.len())));
        }
        let members = members.into_iter().map(|rank| rank as usize).collect();
        let proposal = Proposal { generation, coordinator: coordinator as usize, members };
        let refusal = self.state.promise(&proposal).err().unwrap_or_default();
        Ok(Response::new(ProposeReply { refusal }))
    }
}

/// Returns the beginning of a message.
pub(crate) fn shortened(message: &str) -> &str {
    let ends = message.char_indices().map(|(start, letter)| start + letter.len_utf8());
    let end = ends.take_while(|end| *end <= MAX_MESSAGE).last().unwrap_or(0);
    message.get(..end).unwrap_or_default()
}
