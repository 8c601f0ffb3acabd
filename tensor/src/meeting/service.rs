//! The service of a member.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use crate::meeting::proto::meeting_server::{self, MeetingServer};
use crate::meeting::proto::{self, JoinReply, JoinRequest, WatchRequest};
use crate::meeting::seats::{NotJoined, VERSION};
use crate::meeting::state::{Details, Hall, Meeting};

/// How long a call of `Join` is held before its answer names the missing members.
const HOLD: Duration = Duration::from_secs(2);

/// The longest request in bytes.
const MAX_REQUEST: usize = 64 << 10;

/// The service. Callers ask again while the hall is closed.
#[derive(Debug)]
pub struct Service<D>(Hall<D>);

/// Makes the service of a member.
pub fn service<D: Details>(hall: Hall<D>) -> MeetingServer<Service<D>> {
    MeetingServer::new(Service(hall)).max_decoding_message_size(MAX_REQUEST)
}

impl<D> Service<D> {
    fn meeting(&self) -> Result<&Arc<Meeting<D>>, Status> {
        self.0.get().ok_or_else(|| Status::unavailable("this process does not connect yet"))
    }
}

#[tonic::async_trait]
impl<D: Details> meeting_server::Meeting for Service<D> {
    async fn join(&self, request: Request<JoinRequest>) -> Result<Response<JoinReply>, Status> {
        let meeting = self.meeting()?;
        let (number, wait) = (request.get_ref().number as usize, request.get_ref().wait);
        let mut reply =
            JoinReply { version: VERSION, number: meeting.number() as u32, ..JoinReply::default() };
        let turn = match meeting.admit(request.into_inner()) {
            // The caller ends, and names the difference too.
            Err(NotJoined::Version(_)) => {
                meeting.has_heard(number);
                return Ok(Response::new(reply));
            }
            Err(NotJoined::Differs(names)) => {
                meeting.has_heard(number);
                reply.differs = names;
                return Ok(Response::new(reply));
            }
            Err(NotJoined::Refused(reason)) => return Err(Status::failed_precondition(reason)),
            Err(other) => return Err(Status::internal(format!("{other:?}"))),
            Ok(turn) => turn,
        };
        let failure = meeting.standing.borrow().failure.clone();
        if let Some(reason) = failure {
            meeting.has_heard(number);
            return Err(Status::aborted(reason));
        }
        let Some(turn) = turn else { return Ok(Response::new(reply)) };
        if wait {
            let mut seats = meeting.seats.subscribe();
            let ends = seats.wait_for(|seats| seats.is_full() || !seats.is_latest(number, turn));
            let _ = tokio::time::timeout(HOLD, ends).await;
            let seats = meeting.seats.borrow();
            if !seats.is_latest(number, turn) {
                return Err(Status::cancelled("the caller has called again"));
            }
            reply.missing = seats.missing();
            if !reply.missing.is_empty() {
                return Ok(Response::new(reply));
            }
            reply.members = seats.members();
        }
        reply.key = meeting.key(number).map(|key| key.to_vec().into()).unwrap_or_default();
        Ok(Response::new(reply))
    }

    type WatchStream = Pin<Box<dyn Stream<Item = Result<proto::Standing, Status>> + Send>>;

    async fn watch(&self, request: Request<WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let meeting = self.meeting()?;
        let caller = meeting.caller(request.get_ref().number, &request.get_ref().key)?;
        let (send, receive) = mpsc::channel(1);
        tokio::spawn(follow(Arc::clone(meeting), caller, send));
        Ok(Response::new(Box::pin(ReceiverStream::new(receive))))
    }
}

/// Sends the state of this member, and each change, until this member has left or failed or the caller is gone.
async fn follow<D: Details>(
    meeting: Arc<Meeting<D>>,
    caller: usize,
    send: mpsc::Sender<Result<proto::Standing, Status>>,
) {
    let mut standing = meeting.standing.subscribe();
    loop {
        let now = standing.borrow_and_update().encode();
        let last = now.left || now.failure.is_some();
        if send.send(Ok(now)).await.is_err() {
            break;
        }
        tokio::select! {
            // After the last message the caller ends its call.
            changed = standing.changed(), if !last => if changed.is_err() { break },
            () = send.closed() => break,
        }
    }
    // The caller has heard how this member ended, or has ended itself.
    meeting.has_heard(caller);
}
