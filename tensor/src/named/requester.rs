//! The requester: the side that asks one peer for tensors. [`named`](super) describes the protocol.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::sync::Arc;

use lru::LruCache;
use tonic::Code;
use xxhash_rust::xxh3::xxh3_64;

use super::{
    Failure, Frame, RequestId, RequesterSettings, TensorKey, TensorMemory, TensorRequest, check_name,
};
use crate::error::{TensorError, TensorErrorKind};
use crate::wire::tensor_metadata::WireMetadata;
use tonic_rdma_verbs::unstable::RemoteRange;

/// An action for the driver of a requester. `S` is a sink, which owns its memory.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum RequesterAction<S> {
    /// Send a frame of this request.
    Send(RequestId, Frame<'static>),
    /// Make a sink for a tensor with this metadata and call [`Requester::sink_ready`]. Call
    /// [`Requester::sink_failed`] if there is no memory, or if no tensor has such metadata.
    Allocate {
        /// The request that needs the sink.
        request_id: RequestId,
        /// The peer's description of the tensor, at most as long as [`RequesterSettings::max_tensor_bytes`]
        /// allows.
        metadata: WireMetadata,
    },
    /// Revoke the grant of a sink, then free the sink. The peer does not write to the sink any more.
    Free(S),
    /// Pass on the outcome of a request. There is one such action for each request that is not cancelled.
    Finished {
        /// The request.
        request_id: RequestId,
        /// The outcome.
        result: RequestOutcome<S>,
    },
}

/// The actions that follow from an answer of the peer.
pub(crate) type Followed<S> = Result<Vec<RequesterAction<S>>, Violation>;

/// The outcome of a request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum RequestOutcome<S> {
    /// The tensor is in the sink. The driver has to revoke the sink's grant before the program gets the
    /// tensor. If the program does not take it, the driver passes the arrival to [`Requester::not_taken`].
    Arrived(Arrival<S>),
    /// The tensor is dead.
    Dead,
    /// There will be no tensor.
    Failed(Failure),
}

/// A tensor in a sink.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Arrival<S> {
    /// Name of the tensor.
    pub(crate) name: Arc<str>,
    /// Step of the tensor.
    pub(crate) step: u64,
    /// Type, shape and length of the tensor.
    pub(crate) metadata: WireMetadata,
    /// The sink with the tensor.
    pub(crate) sink: S,
    /// The checksum for [`verify`](super::verify), if [`RequesterSettings::validate`] is set.
    pub(crate) checksum: Option<u64>,
}

/// Asks one peer for tensors. `S` is a sink.
#[derive(Debug)]
pub(crate) struct Requester<S> {
    settings: RequesterSettings,
    /// The latest metadata of each tensor, by name.
    cache: Option<LruCache<Arc<str>, WireMetadata>>,
    requests: BTreeMap<RequestId, OwnRequest<S>>,
    /// Tensors that arrived for requests that were given up. The provider counts them as delivered, so the
    /// next request gets them from here. In the order of their arrival. With each, whether it was there at
    /// the last [`Requester::age_untaken`].
    untaken: LruCache<TensorKey, (Arrival<S>, bool)>,
    next: u64,
    gone: Option<String>,
    actions: Vec<RequesterAction<S>>,
}

#[derive(Debug)]
struct OwnRequest<S> {
    name: Arc<str>,
    step: u64,
    /// Whether the peer has sent the metadata. A peer sends metadata once for each request.
    has_metadata: bool,
    state: OwnRequestState<S>,
}

#[derive(Debug)]
enum OwnRequestState<S> {
    /// The driver makes a sink. The peer knows of the request if it has sent the metadata.
    Allocating(WireMetadata),
    /// Asked without a sink.
    Asked,
    /// Asked with a sink, which the peer may be writing.
    Exposed { metadata: WireMetadata, sink: S },
    /// Cancelled by the application, but the peer may still write the sink.
    Cancelled(Option<(WireMetadata, S)>),
}

impl<S> OwnRequestState<S> {
    fn name(&self) -> &'static str {
        match self {
            Self::Allocating(_) => "waiting for a sink",
            Self::Asked => "without a sink",
            Self::Exposed { .. } => "with a sink made for the metadata that the peer sent",
            Self::Cancelled(_) => "cancelled",
        }
    }

    fn into_sink(self) -> Option<(WireMetadata, S)> {
        match self {
            Self::Exposed { metadata, sink } => Some((metadata, sink)),
            Self::Cancelled(sink) => sink,
            Self::Allocating(_) | Self::Asked => None,
        }
    }
}

impl<S> Requester<S> {
    /// The number of requests among which immediate data finds its request.
    const SPAN: u64 = 1 << 31;

    /// Makes a requester without cached metadata.
    pub(crate) fn new(settings: RequesterSettings) -> Self {
        let cache = NonZeroUsize::new(settings.max_cached).map(LruCache::new);
        Self {
            settings,
            cache,
            requests: BTreeMap::new(),
            untaken: LruCache::unbounded(),
            next: 0,
            gone: None,
            actions: Vec::new(),
        }
    }

    /// Asks for (`name`, `step`). Without cached metadata of `name` the request goes out at once. With cached
    /// metadata it goes out when there is a sink for a tensor like the last one. A tensor that has arrived
    /// for a request that was given up is the result at once.
    ///
    /// # Errors
    /// The request was not sent, and nothing has changed.
    pub(crate) fn request(
        &mut self,
        name: &str,
        step: u64,
    ) -> Result<(RequestId, RequesterAction<S>), TensorError> {
        if let Some(why) = &self.gone {
            return Err(TensorError::new(TensorErrorKind::PeerLost, format!("the link has ended: {why}")));
        }
        check_name(name).map_err(TensorError::argument)?;
        let busy = |text: String| Err(TensorError::new(TensorErrorKind::Busy, text));
        let pending = self.requests.len();
        if pending >= self.settings.max_requests {
            return busy(format!(
                "{pending} requests wait for an answer already, and no more may (max_requests)"
            ));
        }
        // The requests for a name have one queue pair, so that a cancellation does not come after the next one.
        let pairs = self.settings.queue_pairs.max(1);
        let request_id = RequestId(self.next * pairs + xxh3_64(name.as_bytes()) % pairs);
        let oldest = self.requests.keys().next();
        if let Some(&oldest) = oldest.filter(|oldest| (self.next + 1) * pairs - oldest.0 > Self::SPAN) {
            // Its answer could be taken for that of the next request.
            return busy(format!("{oldest} waits for an answer, and the next number is 2^31 or more above"));
        }
        self.next += 1;
        let name: Arc<str> = name.into();
        if let Some((arrival, _)) = self.untaken.pop(&TensorKey { name: name.clone(), step }) {
            let result = RequestOutcome::Arrived(arrival);
            return Ok((request_id, RequesterAction::Finished { request_id, result }));
        }
        let cached = self.cache.as_mut().and_then(|cache| cache.get(&name).copied());
        let (state, action) = match cached {
            Some(metadata) => {
                (OwnRequestState::Allocating(metadata), RequesterAction::Allocate { request_id, metadata })
            }
            None => (OwnRequestState::Asked, self.ask(request_id, &name, step, None)),
        };
        self.requests.insert(request_id, OwnRequest { name, step, has_metadata: false, state });
        Ok((request_id, action))
    }

    /// Takes the sink for a [`RequesterAction::Allocate`], which is at `place`. If the request is over, the
    /// sink is freed.
    pub(crate) fn sink_ready(
        &mut self,
        request_id: RequestId,
        sink: S,
        place: RemoteRange,
    ) -> Vec<RequesterAction<S>> {
        let pending = self.requests.get_mut(&request_id);
        let Some((pending, metadata)) = pending.and_then(OwnRequest::allocating) else {
            return vec![RequesterAction::Free(sink)];
        };
        if place.length < metadata.bytes {
            let text =
                format!("a sink of {} bytes was made for a tensor of {}", place.length, metadata.bytes);
            let mut actions = self.sink_failed(request_id, Failure::new(Code::Internal, text));
            actions.push(RequesterAction::Free(sink));
            return actions;
        }
        pending.state = OwnRequestState::Exposed { metadata, sink };
        let (name, step) = (pending.name.clone(), pending.step);
        vec![self.ask(request_id, &name, step, Some(TensorMemory { metadata, place }))]
    }

    /// Ends a request for which the driver could not make the sink of a [`RequesterAction::Allocate`].
    pub(crate) fn sink_failed(&mut self, request_id: RequestId, failure: Failure) -> Vec<RequesterAction<S>> {
        let Some((pending, _)) = self.requests.get_mut(&request_id).and_then(OwnRequest::allocating) else {
            return Vec::new();
        };
        // The next request asks for the metadata again.
        let name = pending.name.clone();
        self.cache.as_mut().and_then(|cache| cache.pop(&name));
        self.finish(request_id, RequestOutcome::Failed(failure));
        self.give_up(request_id);
        self.take_actions()
    }

    /// Takes an arrival back that the program did not take, for the next request for this tensor.
    pub(crate) fn not_taken(&mut self, arrival: Arrival<S>) -> Vec<RequesterAction<S>> {
        self.keep(arrival);
        self.take_actions()
    }

    /// Frees the tensors for which no request has come since the last call. Call this in intervals for which
    /// a tensor is on offer.
    pub(crate) fn age_untaken(&mut self) -> Vec<RequesterAction<S>> {
        while self.untaken.peek_lru().is_some_and(|(_, (_, is_old))| *is_old) {
            self.free_oldest();
        }
        self.untaken.iter_mut().for_each(|(_, (_, is_old))| *is_old = true);
        self.take_actions()
    }

    /// Frees all tensors for which no request has come, because the memory is needed.
    pub(crate) fn free_untaken(&mut self) -> Vec<RequesterAction<S>> {
        while self.free_oldest().is_some() {}
        self.take_actions()
    }

    /// Cancels a request. Its sink stays until the last answer of the peer.
    pub(crate) fn cancel(&mut self, request_id: RequestId) -> Vec<RequesterAction<S>> {
        self.give_up(request_id);
        self.take_actions()
    }

    /// Handles the metadata of a tensor.
    ///
    /// # Errors
    /// [`Violation`]: there is no such request, or it has metadata already.
    pub(crate) fn handle_metadata(&mut self, request_id: RequestId, metadata: WireMetadata) -> Followed<S> {
        let pending = self.answered("metadata", request_id)?;
        let (name, repeated) = (pending.name.clone(), std::mem::replace(&mut pending.has_metadata, true));
        let unexpected =
            Err(Violation::Unexpected { frame: "metadata", request_id, state: pending.state.name() });
        if repeated {
            return unexpected;
        }
        let old_sink = match std::mem::replace(&mut pending.state, OwnRequestState::Allocating(metadata)) {
            OwnRequestState::Asked => None,
            OwnRequestState::Exposed { metadata: before, sink } if before != metadata => Some(sink),
            // The peer sent the metadata before it learnt of the cancellation. The last answer follows.
            cancelled @ OwnRequestState::Cancelled(_) => {
                pending.state = cancelled;
                return Ok(Vec::new());
            }
            other => {
                pending.state = other;
                return unexpected;
            }
        };
        self.actions.extend(old_sink.map(RequesterAction::Free));
        if metadata.bytes > self.settings.max_tensor_bytes {
            return Ok(self.refuse(request_id, &name, metadata.bytes));
        }
        self.cache.as_mut().and_then(|cache| cache.put(name, metadata));
        self.actions.push(RequesterAction::Allocate { request_id, metadata });
        Ok(self.take_actions())
    }

    /// Handles the peer's message that the tensor is in the sink.
    ///
    /// # Errors
    /// [`Violation`]: there is no such request, the request has no sink, a checksum is missing, or there is
    /// one that the request did not ask for.
    pub(crate) fn handle_written(&mut self, request_id: RequestId, checksum: Option<u64>) -> Followed<S> {
        let wanted = self.settings.validate;
        let pending = self.answered("written", request_id)?;
        if !matches!(pending.state, OwnRequestState::Exposed { .. } | OwnRequestState::Cancelled(Some(_))) {
            let state = pending.state.name();
            return Err(Violation::Unexpected { frame: "written", request_id, state });
        }
        if checksum.is_some() != wanted {
            return Err(Violation::Checksum { request_id, wanted });
        }
        let Some(OwnRequest { name, step, state, .. }) = self.requests.remove(&request_id) else {
            return Ok(Vec::new());
        };
        match state {
            OwnRequestState::Exposed { metadata, sink } => {
                let arrival = Arrival { name, step, metadata, sink, checksum };
                self.finish(request_id, RequestOutcome::Arrived(arrival));
            }
            OwnRequestState::Cancelled(Some((metadata, sink))) => {
                self.keep(Arrival { name, step, metadata, sink, checksum });
            }
            _ => {}
        }
        Ok(self.take_actions())
    }

    /// Handles the immediate data of a write, which says the same. `number` has the low 31 bits of the request's
    /// number.
    ///
    /// # Errors
    /// As for [`handle_written`](Self::handle_written).
    pub(crate) fn handle_announced(&mut self, number: u32) -> Followed<S> {
        // The numbers of requests that wait are among the last `SPAN` ones.
        let end = self.next * self.settings.queue_pairs.max(1);
        let latest = (end & !(Self::SPAN - 1)) | u64::from(number);
        let latest = if latest < end { Some(latest) } else { latest.checked_sub(Self::SPAN) };
        self.handle_written(RequestId(latest.unwrap_or(number.into())), None)
    }

    /// Handles the peer's status: there will be no tensor.
    ///
    /// # Errors
    /// [`Violation`]: there is no such request.
    pub(crate) fn handle_status(&mut self, request_id: RequestId, code: u32, text: &str) -> Followed<S> {
        self.answered("status", request_id)?;
        let code = i32::try_from(code).map_or(Code::Unknown, Code::from_i32);
        self.end(request_id, RequestOutcome::Failed(Failure::new(code, text)));
        Ok(self.take_actions())
    }

    /// Handles the peer's message that the tensor is dead.
    ///
    /// # Errors
    /// [`Violation`]: there is no such request, or the peer has sent the metadata of this tensor.
    pub(crate) fn handle_dead(&mut self, request_id: RequestId) -> Followed<S> {
        let pending = self.answered("dead", request_id)?;
        if pending.has_metadata {
            let state = "for a tensor whose metadata the peer sent";
            return Err(Violation::Unexpected { frame: "dead", request_id, state });
        }
        self.end(request_id, RequestOutcome::Dead);
        Ok(self.take_actions())
    }

    /// Ends all requests, because the link has ended. Its queue pairs are closed, so nothing writes a sink
    /// any more. Later requests fail at once.
    pub(crate) fn peer_gone(&mut self, why: &str) -> Vec<RequesterAction<S>> {
        self.gone = Some(why.to_owned());
        while let Some((&request_id, _)) = self.requests.first_key_value() {
            let failure = Failure::new(Code::Unavailable, format!("the link has ended: {why}"));
            self.end(request_id, RequestOutcome::Failed(failure));
        }
        self.free_untaken()
    }

    /// Continues the count of requests at `next`.
    #[cfg(test)]
    pub(crate) fn count_from(&mut self, next: u64) {
        self.next = next;
    }

    /// Returns the number of requests without a last answer, with the cancelled ones.
    #[cfg(test)]
    pub(crate) fn pending(&self) -> usize {
        self.requests.len()
    }

    /// Returns the request if the peer may answer it.
    fn answered(
        &mut self,
        frame: &'static str,
        request_id: RequestId,
    ) -> Result<&mut OwnRequest<S>, Violation> {
        let pending = self.requests.get_mut(&request_id).filter(|pending| pending.is_asked());
        pending.ok_or(Violation::Unknown { frame, request_id })
    }

    /// Ends a request without a tensor.
    fn end(&mut self, request_id: RequestId, result: RequestOutcome<S>) {
        let Some(pending) = self.requests.remove(&request_id) else { return };
        let cancelled = matches!(pending.state, OwnRequestState::Cancelled(_));
        if let Some((_, sink)) = pending.state.into_sink() {
            self.actions.push(RequesterAction::Free(sink));
        }
        if !cancelled {
            self.finish(request_id, result);
        }
    }

    /// Refuses a tensor that is longer than this side accepts.
    fn refuse(&mut self, request_id: RequestId, name: &str, bytes: u64) -> Vec<RequesterAction<S>> {
        let limit = self.settings.max_tensor_bytes;
        let text = format!("tensor {name:?} has {bytes} bytes, and {limit} are allowed (max_tensor_bytes)");
        self.sink_failed(request_id, Failure::new(Code::ResourceExhausted, text))
    }

    fn give_up(&mut self, request_id: RequestId) {
        let Some(pending) = self.requests.get_mut(&request_id) else { return };
        if !pending.is_asked() {
            self.requests.remove(&request_id);
            return;
        }
        match std::mem::replace(&mut pending.state, OwnRequestState::Cancelled(None)) {
            OwnRequestState::Cancelled(sink) => pending.state = OwnRequestState::Cancelled(sink),
            state => {
                pending.state = OwnRequestState::Cancelled(state.into_sink());
                self.actions.push(RequesterAction::Send(request_id, Frame::Cancel { request_id }));
            }
        }
    }

    /// Gives a tensor that arrived for a request that was given up to the request that asks again. If there
    /// is none, keeps the tensor.
    fn keep(&mut self, arrival: Arrival<S>) {
        let asks_again = |request: &OwnRequest<S>| {
            let is_open = !matches!(request.state, OwnRequestState::Cancelled(_));
            is_open && (&request.name, request.step) == (&arrival.name, arrival.step)
        };
        let again = self.requests.iter().find(|(_, request)| asks_again(request)).map(|(id, _)| *id);
        if let Some(request_id) = again {
            self.finish(request_id, RequestOutcome::Arrived(arrival));
            self.give_up(request_id);
            return;
        }
        let key = TensorKey { name: arrival.name.clone(), step: arrival.step };
        let replaced = self.untaken.put(key, (arrival, false));
        self.actions.extend(replaced.map(|(arrival, _)| RequesterAction::Free(arrival.sink)));
        let most = if self.gone.is_some() { 0 } else { self.settings.max_requests };
        let mut bytes: u64 = self.untaken.iter().map(|(_, (kept, _))| kept.metadata.bytes).sum();
        while self.untaken.len() > most || (self.untaken.len() > 1 && bytes > self.settings.max_untaken_bytes)
        {
            bytes -= self.free_oldest().unwrap_or_default();
        }
    }

    /// Frees the tensor that no request has taken for the longest time. Returns its length in bytes.
    fn free_oldest(&mut self) -> Option<u64> {
        let (_, (oldest, _)) = self.untaken.pop_lru()?;
        self.actions.push(RequesterAction::Free(oldest.sink));
        Some(oldest.metadata.bytes)
    }

    fn finish(&mut self, request_id: RequestId, result: RequestOutcome<S>) {
        self.actions.push(RequesterAction::Finished { request_id, result });
    }

    fn ask(
        &self,
        request_id: RequestId,
        name: &str,
        step: u64,
        sink: Option<TensorMemory>,
    ) -> RequesterAction<S> {
        let (checksum_wanted, name) = (self.settings.validate, name.to_owned().into());
        let request = TensorRequest { request_id, step, sink, checksum_wanted, name };
        RequesterAction::Send(request_id, Frame::Request(request))
    }

    fn take_actions(&mut self) -> Vec<RequesterAction<S>> {
        std::mem::take(&mut self.actions)
    }
}

impl<S> OwnRequest<S> {
    /// Returns whether the peer knows of the request.
    fn is_asked(&self) -> bool {
        self.has_metadata || !matches!(self.state, OwnRequestState::Allocating(_))
    }

    fn allocating(&mut self) -> Option<(&mut Self, WireMetadata)> {
        match self.state {
            OwnRequestState::Allocating(metadata) => Some((self, metadata)),
            _ => None,
        }
    }
}

/// An answer that breaks the protocol. It ends the link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum Violation {
    /// No request with this number waits for an answer.
    #[error("the answer {frame:?} is for {request_id}, which does not wait for an answer")]
    Unknown {
        /// The frame's kind.
        frame: &'static str,
        /// The request that the frame answers.
        request_id: RequestId,
    },
    /// The request can't have this answer in its state.
    #[error("the answer {frame:?} is for {request_id}, which is {state}")]
    Unexpected {
        /// The frame's kind.
        frame: &'static str,
        /// The request that the frame answers.
        request_id: RequestId,
        /// State of the request.
        state: &'static str,
    },
    /// A checksum is missing, or comes although the request did not ask for one.
    #[error("the answer to {request_id} comes {}", if *.wanted { "without the checksum that it asked for" } else { "with a checksum that it did not ask for" })]
    Checksum {
        /// The request.
        request_id: RequestId,
        /// Whether the request asked for a checksum.
        wanted: bool,
    },
}
