//! The gRPC service of a part.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::{mpsc, watch};
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use crate::placement::Part;
use crate::session::state::{Hall, State};
use crate::session::text::MAX_TEXT;
use crate::transfer::proto::parts_server::Parts;
use crate::transfer::proto::{HelloReply, HelloRequest, PutReply, PutRequest, Standing, WatchRequest};
use crate::transfer::{LONGEST_CALL, refusal};

/// The largest description of a part: entries of a fingerprint.
const MAX_ENTRIES: usize = 64;

/// The service.
#[derive(Debug)]
pub(super) struct Service {
    hall: Arc<Hall>,
    /// The number of streams of `Watch`. A part that leaves waits for their end.
    watchers: Arc<AtomicUsize>,
}

impl Service {
    pub(super) fn new(hall: Arc<Hall>, watchers: Arc<AtomicUsize>) -> Self {
        Self { hall, watchers }
    }

    fn state(&self) -> Result<&Arc<State>, Status> {
        self.hall.state().ok_or_else(|| Status::unavailable("this part does not connect yet"))
    }

    /// Puts a tensor of a part into its mailbox, once there is room.
    async fn take(&self, state: &State, caller: Part, request: PutRequest) -> Result<(), Status> {
        let sequence = request.sequence;
        let (mailbox, parcel) = state.check(caller, request).map_err(Status::invalid_argument)?;
        match tokio::time::timeout(LONGEST_CALL, mailbox.put(sequence, parcel)).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(refusal)) => Err(Status::failed_precondition(refusal.to_string())),
            Err(_) => Err(Status::deadline_exceeded("the receiver took no earlier tensor in time")),
        }
    }
}

#[tonic::async_trait]
impl Parts for Service {
    async fn hello(&self, request: Request<HelloRequest>) -> Result<Response<HelloReply>, Status> {
        let state = self.state()?;
        let HelloRequest { caller, expected } = request.into_inner();
        let caller = caller.ok_or_else(|| Status::invalid_argument("the caller does not describe itself"))?;
        let texts = caller.fingerprint.iter().map(|entry| entry.name.len()).sum::<usize>();
        if caller.fingerprint.len() > MAX_ENTRIES || texts > MAX_TEXT || caller.modes.len() > MAX_ENTRIES {
            return Err(Status::invalid_argument("the caller's description is too long"));
        }
        let part = caller.part as usize;
        let failure = state.standing.borrow().failure.clone();
        let mut reply = HelloReply { server: Some(state.description()), token: Default::default() };
        match (state.compare(&caller), failure) {
            // The caller finds the difference too, and names it. It does not call again.
            (Err(misfit), _) => {
                state.has_heard(Some(part));
                state.note(part, misfit);
            }
            (Ok(()), Some(reason)) => {
                state.has_heard(Some(part));
                return Err(Status::aborted(reason));
            }
            (Ok(()), None) if expected as usize != state.me.0 || part == state.me.0 => {}
            (Ok(()), None) => {
                let unknown = || Status::invalid_argument(format!("there is no part {part}"));
                reply.token = state.token_of(part).ok_or_else(unknown)?;
                state.fits(part);
            }
        }
        Ok(Response::new(reply))
    }

    type WatchStream = Pin<Box<dyn Stream<Item = Result<Standing, Status>> + Send>>;

    async fn watch(&self, request: Request<WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let state = self.state()?;
        let caller = state.caller(&request.get_ref().token).ok_or_else(unknown_token)?;
        let (send, receive) = mpsc::channel(1);
        let watcher = Watcher::new(&self.watchers, state, caller);
        tokio::spawn(follow(state.standing.subscribe(), send, watcher));
        Ok(Response::new(Box::pin(ReceiverStream::new(receive))))
    }

    async fn put(&self, request: Request<PutRequest>) -> Result<Response<PutReply>, Status> {
        let request = request.into_inner();
        // A caller of another session means a process that listened here before. Its end is no fault of the tensor.
        let state = self.state()?;
        let caller = state.caller(&request.token).ok_or_else(unknown_token)?;
        let taken = self.take(state, caller, request).await;
        taken.map(|()| Response::new(PutReply {})).map_err(refusal)
    }
}

/// Sends the state of this part, and each change, until this part has left or failed or the caller is gone.
async fn follow(
    mut standing: watch::Receiver<Standing>,
    send: mpsc::Sender<Result<Standing, Status>>,
    _watcher: Watcher,
) {
    loop {
        let now = standing.borrow_and_update().clone();
        let last = now.left || now.failure.is_some();
        if send.send(Ok(now)).await.is_err() {
            return;
        }
        if last {
            // The caller ends its call when it has seen the last message.
            send.closed().await;
            return;
        }
        tokio::select! {
            changed = standing.changed() => if changed.is_err() { return },
            () = send.closed() => return,
        }
    }
}

/// Counts a stream.
struct Watcher {
    count: Arc<AtomicUsize>,
    state: Arc<State>,
    caller: Part,
}

impl Watcher {
    fn new(count: &Arc<AtomicUsize>, state: &Arc<State>, caller: Part) -> Self {
        count.fetch_add(1, Ordering::SeqCst);
        Self { count: Arc::clone(count), state: Arc::clone(state), caller }
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        // The caller ends its stream when it has heard how this part ended, or when it has ended itself.
        self.state.has_heard(Some(self.caller.0));
        self.count.fetch_sub(1, Ordering::SeqCst);
    }
}

fn unknown_token() -> Status {
    Status::permission_denied("the caller is no part of this session")
}
