//! The gRPC service by which a part gets tensors.

use std::sync::{Arc, OnceLock};

use tonic::{Request, Response, Status};

use crate::placement::Part;
use crate::session::state::State;
use crate::transfer::proto::parts_server::Parts;
use crate::transfer::proto::{PutReply, PutRequest};
use crate::transfer::{LONGEST_CALL, refusal};

/// The service. Its content is empty while the part does not connect yet.
#[derive(Clone, Debug, Default)]
pub(super) struct Service(pub(super) Arc<OnceLock<Arc<State>>>);

/// Puts a tensor of a part into its mailbox, once there is room.
async fn take(state: &State, caller: Part, request: PutRequest) -> Result<(), Status> {
    let sequence = request.sequence;
    let (mailbox, parcel) = state.check(caller, request).map_err(Status::invalid_argument)?;
    match tokio::time::timeout(LONGEST_CALL, mailbox.put(sequence, parcel)).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(refusal)) => Err(Status::failed_precondition(refusal.to_string())),
        Err(_) => Err(Status::deadline_exceeded("the receiver took no earlier tensor in time")),
    }
}

#[tonic::async_trait]
impl Parts for Service {
    async fn put(&self, request: Request<PutRequest>) -> Result<Response<PutReply>, Status> {
        let request = request.into_inner();
        let state = self.0.get().ok_or_else(|| Status::unavailable("this part does not connect yet"))?;
        // A caller of another session means a process that listened here before. Its end is no fault of the tensor.
        let caller = state.meeting.caller(request.part, &request.key)?;
        let taken = take(state, Part(caller), request).await;
        taken.map(|()| Response::new(PutReply {})).map_err(refusal)
    }
}
