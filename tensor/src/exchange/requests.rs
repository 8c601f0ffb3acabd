//! Requests to one peer, by name and step.

use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

use super::Outbox;
use crate::device::settings::Settings;
use crate::error::ChannelError;
use crate::link::Link;
use crate::memory::landing::{Keeper, Landing};
use crate::rendezvous::{
    Arrival, Failure, RequestOutcome, Requester, RequesterAction, RequesterSettings, SinkLocation, Violation,
    verify,
};
use crate::types::{Metadata, Tensor, deserialize};
use crate::wire::tensor_frame::{Frame, RequestId};
use crate::wire::tensor_metadata::WireMetadata;
use tonic_rdma_verbs::Access;
use tonic_rdma_verbs::internal::{Grant, lock, wake_all};
use tonic_rdma_verbs::memory::SharedRegion;

/// The result of [`Channel::request`](crate::Channel::request).
#[derive(Clone, Debug)]
#[expect(clippy::large_enum_variant, reason = "one at a time, and moved once")]
pub enum Requested {
    /// The tensor.
    Tensor(Tensor),
    /// The tensor is dead: the branch of the graph that would have computed it was not taken.
    Dead,
}

/// The future of [`Channel::request`](crate::Channel::request).
#[must_use = "dropping the future cancels the request"]
pub struct Request {
    link: Arc<Link>,
    requests: Arc<Requests>,
    state: RequestState,
}

enum RequestState {
    Ended(Option<ChannelError>),
    Waiting(RequestId, Arc<PendingAnswer>),
}

/// The cell that takes the answer to a request.
#[derive(Default)]
struct PendingAnswer {
    state: Mutex<AnswerState>,
}

#[derive(Default)]
struct AnswerState {
    result: Option<Result<RequestOutcome<SinkMemory>, ChannelError>>,
    waker: Option<Waker>,
}

/// Memory that the peer may write until the grant is dropped.
#[derive(Debug)]
struct SinkMemory {
    grant: Grant,
    memory: SharedRegion,
}

/// The requests on one link.
pub(crate) struct Requests {
    requester: Mutex<Requester<SinkMemory>>,
    outbox: Outbox<RequesterAction<SinkMemory>>,
    waiting: Mutex<HashMap<RequestId, Arc<PendingAnswer>>>,
    landing: Arc<Landing>,
}

impl Requests {
    pub(crate) fn new(settings: &Settings, landing: &Arc<Landing>) -> Arc<Self> {
        let requester = Requester::new(RequesterSettings {
            max_tensor_bytes: settings.max_tensor_bytes,
            validate: settings.checksums,
            ..RequesterSettings::default()
        });
        let requests = Arc::new(Self {
            requester: Mutex::new(requester),
            outbox: Outbox::new(),
            waiting: Mutex::default(),
            landing: Arc::clone(landing),
        });
        let keeper: Arc<dyn Keeper> = Arc::clone(&requests) as _;
        landing.add_keeper(Arc::downgrade(&keeper));
        requests
    }

    pub(crate) fn request(self: &Arc<Self>, link: &Arc<Link>, name: &str, step: u64) -> Request {
        let request = |state| Request { link: Arc::clone(link), requests: Arc::clone(self), state };
        let refused = |error| request(RequestState::Ended(Some(error)));
        if let Some(fault) = link.fault() {
            return refused(fault.clone());
        }
        let mut requester = lock(&self.requester);
        let (id, action) = match requester.request(name, step) {
            Ok(begun) => begun,
            Err(error) => return refused(ChannelError::local(error)),
        };
        let pending = Arc::new(PendingAnswer::default());
        lock(&self.waiting).insert(id, Arc::clone(&pending));
        self.outbox.add([action]);
        drop(requester);
        self.run_and_wake(link);
        request(RequestState::Waiting(id, pending))
    }

    pub(crate) fn handle(
        &self,
        link: &Arc<Link>,
        frame: Frame<'_>,
        wakers: &mut Vec<Waker>,
    ) -> Result<(), Violation> {
        let mut requester = lock(&self.requester);
        let actions = match frame {
            Frame::Metadata { request_id, metadata } => requester.handle_metadata(request_id, metadata),
            Frame::Written { request_id, checksum } => requester.handle_written(request_id, checksum),
            Frame::Status { request_id, code, text } => requester.handle_status(request_id, code, text),
            Frame::Dead { request_id } => requester.handle_dead(request_id),
            _ => Ok(Vec::new()),
        };
        self.outbox.add(actions?);
        drop(requester);
        self.run(link, wakers);
        Ok(())
    }

    /// Frees tensors that no request has taken for a while, see [`Requester::age_untaken`].
    pub(crate) fn age_untaken(&self, link: &Arc<Link>) {
        let mut requester = lock(&self.requester);
        self.outbox.add(requester.age_untaken());
        drop(requester);
        self.run_and_wake(link);
    }

    pub(crate) fn link_ended(&self, fault: &ChannelError) {
        let mut requester = lock(&self.requester);
        let actions = requester.peer_gone(&fault.to_string());
        drop(requester);
        let mut wakers = Vec::new();
        for action in actions {
            match action {
                RequesterAction::Finished { request_id, .. } => {
                    self.finish(request_id, Err(fault.clone()), &mut wakers);
                }
                RequesterAction::Free(sink) => self.free(sink),
                RequesterAction::Send(_) | RequesterAction::Allocate { .. } => {}
            }
        }
        wake_all(wakers);
    }

    /// Carries out the actions and wakes the tasks whose requests have ended. For callers that don't poll a queue. The actions
    /// may belong to other threads.
    fn run_and_wake(&self, link: &Arc<Link>) {
        let mut wakers = Vec::new();
        self.run(link, &mut wakers);
        wake_all(wakers);
    }

    fn run(&self, link: &Arc<Link>, wakers: &mut Vec<Waker>) {
        self.outbox.run(|action| match action {
            RequesterAction::Send(message) => {
                // If the send fails, the link ends, and calls `link_ended`.
                let _ = link.port(0).send_frame(&message.frame());
            }
            RequesterAction::Allocate { request_id, metadata } => {
                let made = self.sink(link, metadata);
                let mut requester = lock(&self.requester);
                self.outbox.add(match made {
                    Ok((sink, place)) => requester.sink_ready(request_id, sink, place),
                    Err(error) => {
                        let failure = Failure::new(tonic::Code::ResourceExhausted, error.to_string());
                        requester.sink_failed(request_id, failure)
                    }
                });
            }
            RequesterAction::Free(sink) => self.free(sink),
            RequesterAction::Finished { request_id, result } => self.finish(request_id, Ok(result), wakers),
        });
    }

    /// Makes a sink for a tensor, which the peer may write.
    fn sink(&self, link: &Link, metadata: WireMetadata) -> Result<(SinkMemory, SinkLocation), ChannelError> {
        Metadata::try_from(metadata).map_err(ChannelError::local)?;
        let memory = self.landing.take(metadata.bytes)?.share();
        let length = metadata.bytes.max(1) as usize;
        let grant = link.grant(&memory, 0..length, Access::REMOTE_WRITE)?;
        let place = grant.place();
        let placement =
            SinkLocation { address: place.start.address, rkey: place.start.rkey.0, length: place.length };
        Ok((SinkMemory { grant, memory }, placement))
    }

    /// Makes the result for the program, which takes it.
    fn result(
        &self,
        link: &Link,
        request_id: RequestId,
        answer: RequestOutcome<SinkMemory>,
    ) -> Result<Requested, ChannelError> {
        match answer {
            RequestOutcome::Dead => Ok(Requested::Dead),
            RequestOutcome::Failed(failure) => Err(ChannelError::Refused {
                endpoint: Arc::clone(&link.peer),
                code: failure.code,
                message: failure.text.into(),
            }),
            RequestOutcome::Arrived(Arrival {
                metadata,
                sink: SinkMemory { grant, memory },
                checksum,
                ..
            }) => {
                // The peer's right to write ends here, so the bytes do not change any more.
                drop(grant);
                let region = memory.try_into_region();
                let region =
                    region.map_err(|_| ChannelError::local("another reference to the sink is left"))?;
                let bytes = self.landing.freeze(region, metadata.bytes);
                if let Some(expected) = checksum {
                    verify(request_id, &bytes, expected).map_err(ChannelError::local)?;
                }
                let metadata = Metadata::try_from(metadata).map_err(ChannelError::local)?;
                deserialize(&metadata, bytes).map(Requested::Tensor).map_err(ChannelError::local)
            }
        }
    }

    fn free(&self, sink: SinkMemory) {
        let SinkMemory { grant, memory } = sink;
        drop(grant);
        if let Ok(region) = memory.try_into_region() {
            self.landing.put(region);
        }
    }

    fn finish(
        &self,
        id: RequestId,
        result: Result<RequestOutcome<SinkMemory>, ChannelError>,
        wakers: &mut Vec<Waker>,
    ) {
        let mut waiting = lock(&self.waiting);
        if let Some(pending) = waiting.remove(&id) {
            // Under the lock, so that a future which is dropped now finds either its entry or its result.
            let mut state = lock(&pending.state);
            state.result = Some(result);
            wakers.extend(state.waker.take());
            return;
        }
        drop(waiting);
        // The future was dropped meanwhile.
        if let Ok(RequestOutcome::Arrived(arrival)) = result {
            let mut requester = lock(&self.requester);
            self.outbox.add(requester.not_taken(arrival));
        }
    }

    /// Withdraws a request whose future is dropped. A tensor that has arrived is for the next request.
    fn cancel(&self, link: &Arc<Link>, id: RequestId, pending: &PendingAnswer) {
        let is_open = lock(&self.waiting).remove(&id).is_some();
        let result = lock(&pending.state).result.take();
        let mut requester = lock(&self.requester);
        match result {
            Some(Ok(RequestOutcome::Arrived(arrival))) => self.outbox.add(requester.not_taken(arrival)),
            _ if is_open => self.outbox.add(requester.cancel(id)),
            _ => return,
        }
        drop(requester);
        self.run_and_wake(link);
    }
}

impl Keeper for Requests {
    fn give_back(&self) {
        // In a statement of its own, so that the lock is free while grants are revoked.
        let actions = lock(&self.requester).free_untaken();
        for action in actions {
            if let RequesterAction::Free(sink) = action {
                self.free(sink);
            }
        }
    }
}

impl Future for Request {
    type Output = Result<Requested, ChannelError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        match &mut this.state {
            RequestState::Ended(error) => match error.take() {
                Some(error) => Poll::Ready(Err(error)),
                None => Poll::Pending,
            },
            RequestState::Waiting(id, pending) => {
                let mut state = lock(&pending.state);
                let Some(result) = state.result.take() else {
                    state.waker = Some(context.waker().clone());
                    return Poll::Pending;
                };
                drop(state);
                Poll::Ready(result.and_then(|result| this.requests.result(&this.link, *id, result)))
            }
        }
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        if let RequestState::Waiting(id, pending) = &self.state {
            self.requests.cancel(&self.link, *id, pending);
        }
    }
}

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Request").field("link", &self.link).finish_non_exhaustive()
    }
}
