//! The end that wants tensors of one peer.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::sync::Arc;

use lru::LruCache;
use tonic::Code;

use super::error::{RequestError, Violation};
use super::message::{Failure, Message, is_name};
use super::{RequestId, RequesterSettings, Sink};
use crate::wire::tensor_metadata::WireMetadata;

/// Where a sink is, for the provider's device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SinkLocation {
    /// Virtual address.
    pub address: u64,
    /// TensorKey of a region that is the sink and nothing else, and that this peer alone may write.
    pub rkey: u32,
    /// Length in bytes.
    pub length: u64,
}

/// What is to be done at the requester. `S` is a sink: it owns its memory.
#[derive(Debug, PartialEq, Eq)]
pub enum RequesterAction<S> {
    /// Send this.
    Send(Message),
    /// Make a sink for this and call [`Requester::sink_ready`], or [`Requester::sink_failed`] if there is none to be
    /// had, or if this is no tensor.
    Allocate {
        /// For which request.
        request_id: RequestId,
        /// What it is for: the peer's word, at most as long as [`RequesterSettings::max_tensor_bytes`] allows.
        metadata: WireMetadata,
    },
    /// Nothing will be written here any more: revoke the grant, then free it.
    Free(S),
    /// What became of a request. Comes once for each that is not cancelled.
    Finished {
        /// The request.
        request_id: RequestId,
        /// What became of it.
        result: RequestOutcome<S>,
    },
}

/// What became of a request.
#[derive(Debug, PartialEq, Eq)]
pub enum RequestOutcome<S> {
    /// The tensor is in the sink, whose grant is to be revoked now.
    Arrived {
        /// What it is.
        metadata: WireMetadata,
        /// Where it is.
        sink: S,
        /// What [`verify`](super::verify) shall find, if [`RequesterSettings::validate`] is set.
        checksum: Option<u64>,
    },
    /// The tensor is dead.
    Dead,
    /// There will be no tensor.
    Failed(Failure),
}

/// Asks one peer for tensors. `S` is a sink. See the [module](super).
#[derive(Debug)]
pub struct Requester<S> {
    settings: RequesterSettings,
    /// What tensors were when they were last told of.
    cache: Option<LruCache<Arc<str>, WireMetadata>>,
    requests: BTreeMap<RequestId, OwnRequest<S>>,
    next: u64,
    gone: Option<String>,
    actions: Vec<RequesterAction<S>>,
}

#[derive(Debug)]
struct OwnRequest<S> {
    name: Arc<str>,
    step: u64,
    /// Whether the peer has said what the tensor is. It does so once.
    told: bool,
    state: OwnRequestState<S>,
}

#[derive(Debug)]
enum OwnRequestState<S> {
    /// The driver makes a sink. If `told` the peer knows of the request, otherwise not.
    Allocating(WireMetadata),
    /// Asked, with nothing to write to.
    Asked,
    /// Asked, with a sink that the peer may be writing.
    Exposed { metadata: WireMetadata, sink: S },
    /// Nobody wants the answer, but the peer may be writing.
    Cancelled(Option<S>),
}

impl<S> OwnRequestState<S> {
    fn name(&self) -> &'static str {
        match self {
            Self::Allocating(_) => "waiting for a sink",
            Self::Asked => "without a sink",
            Self::Exposed { .. } => "with a sink made for what the tensor was said to be",
            Self::Cancelled(_) => "cancelled",
        }
    }
}

impl<S> Requester<S> {
    /// A requester that knows nothing of its peer's tensors.
    pub fn new(settings: RequesterSettings) -> Self {
        let cache = NonZeroUsize::new(settings.max_cached).map(LruCache::new);
        Self { settings, cache, requests: BTreeMap::new(), next: 0, gone: None, actions: Vec::new() }
    }

    /// Asks for (`name`, `step`): at once if nothing is known of `name`, otherwise as soon as there is a sink for what
    /// it was the last time.
    ///
    /// # Errors
    /// [`RequestError`]; nothing has changed then.
    pub fn request(
        &mut self,
        name: &str,
        step: u64,
    ) -> Result<(RequestId, RequesterAction<S>), RequestError> {
        if let Some(why) = &self.gone {
            return Err(RequestError::Gone(why.clone()));
        }
        if !is_name(name) {
            return Err(RequestError::Name { length: name.len() });
        }
        if self.requests.len() >= self.settings.max_requests {
            return Err(RequestError::TooMany { pending: self.requests.len() });
        }
        let request_id = RequestId(self.next);
        self.next += 1;
        let name: Arc<str> = name.into();
        let cached = self.cache.as_mut().and_then(|cache| cache.get(&name).copied());
        let (state, action) = match cached {
            Some(metadata) => {
                (OwnRequestState::Allocating(metadata), RequesterAction::Allocate { request_id, metadata })
            }
            None => (
                OwnRequestState::Asked,
                RequesterAction::Send(self.ask(request_id, name.clone(), step, None)),
            ),
        };
        self.requests.insert(request_id, OwnRequest { name, step, told: false, state });
        Ok((request_id, action))
    }

    /// What [`RequesterAction::Allocate`] wanted is at `place`. If nobody wants it any more it is freed again.
    pub fn sink_ready(
        &mut self,
        request_id: RequestId,
        sink: S,
        place: SinkLocation,
    ) -> Vec<RequesterAction<S>> {
        let pending = self.requests.get_mut(&request_id);
        let Some((pending, metadata)) = pending.and_then(OwnRequest::allocating) else {
            return vec![RequesterAction::Free(sink)];
        };
        let SinkLocation { address, rkey, length } = place;
        if length < metadata.bytes {
            let text = format!("a sink of {length} bytes was made for a tensor of {}", metadata.bytes);
            let mut actions = self.sink_failed(request_id, Failure::new(Code::Internal, text));
            actions.push(RequesterAction::Free(sink));
            return actions;
        }
        pending.state = OwnRequestState::Exposed { metadata, sink };
        let (name, step) = (pending.name.clone(), pending.step);
        let sink = Sink { metadata, address, rkey, length };
        vec![RequesterAction::Send(self.ask(request_id, name, step, Some(sink)))]
    }

    /// There is no sink to be had for what [`RequesterAction::Allocate`] wanted, and so no tensor.
    pub fn sink_failed(&mut self, request_id: RequestId, failure: Failure) -> Vec<RequesterAction<S>> {
        let Some((pending, _)) = self.requests.get_mut(&request_id).and_then(OwnRequest::allocating) else {
            return Vec::new();
        };
        // The next request asks what it is.
        let name = pending.name.clone();
        self.cache.as_mut().and_then(|cache| cache.pop(&name));
        self.finish(request_id, RequestOutcome::Failed(failure));
        self.give_up(request_id);
        self.take_actions()
    }

    /// Nobody wants the answer any more. The sink stays until the peer has said that it is done with it.
    pub fn cancel(&mut self, request_id: RequestId) -> Vec<RequesterAction<S>> {
        self.give_up(request_id);
        self.take_actions()
    }

    /// The peer says what the tensor is.
    ///
    /// # Errors
    /// [`Violation`]: there is no such request, or it was said before.
    pub fn handle_metadata(
        &mut self,
        request_id: RequestId,
        metadata: WireMetadata,
    ) -> Result<Vec<RequesterAction<S>>, Violation> {
        let pending = self.answered("metadata", request_id)?;
        let (name, told) = (pending.name.clone(), std::mem::replace(&mut pending.told, true));
        let unexpected =
            Err(Violation::Unexpected { frame: "metadata", request_id, state: pending.state.name() });
        if told {
            return unexpected;
        }
        let old_sink = match std::mem::replace(&mut pending.state, OwnRequestState::Allocating(metadata)) {
            OwnRequestState::Asked => None,
            OwnRequestState::Exposed { metadata: before, sink } if before != metadata => Some(sink),
            // It was said before the peer knew that it is cancelled. The last answer is to come.
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

    /// The peer says that the tensor is in the sink.
    ///
    /// # Errors
    /// [`Violation`]: there is no such request, it has no sink, or a checksum is missing or too much.
    pub fn handle_written(
        &mut self,
        request_id: RequestId,
        checksum: Option<u64>,
    ) -> Result<Vec<RequesterAction<S>>, Violation> {
        let wanted = self.settings.validate;
        let pending = self.answered("written", request_id)?;
        if !matches!(pending.state, OwnRequestState::Exposed { .. } | OwnRequestState::Cancelled(Some(_))) {
            let state = pending.state.name();
            return Err(Violation::Unexpected { frame: "written", request_id, state });
        }
        if checksum.is_some() != wanted {
            return Err(Violation::Checksum { request_id, wanted });
        }
        match self.requests.remove(&request_id).map(|pending| pending.state) {
            Some(OwnRequestState::Exposed { metadata, sink }) => {
                self.finish(request_id, RequestOutcome::Arrived { metadata, sink, checksum });
            }
            Some(OwnRequestState::Cancelled(Some(sink))) => self.actions.push(RequesterAction::Free(sink)),
            _ => {}
        }
        Ok(self.take_actions())
    }

    /// The peer says that there will be no tensor.
    ///
    /// # Errors
    /// [`Violation`]: there is no such request.
    pub fn handle_status(
        &mut self,
        request_id: RequestId,
        code: u32,
        text: &str,
    ) -> Result<Vec<RequesterAction<S>>, Violation> {
        self.answered("status", request_id)?;
        let code = i32::try_from(code).map_or(Code::Unknown, Code::from_i32);
        self.end(request_id, RequestOutcome::Failed(Failure::new(code, text)));
        Ok(self.take_actions())
    }

    /// The peer says that the tensor is dead.
    ///
    /// # Errors
    /// [`Violation`]: there is no such request, or the peer has said before what the tensor is.
    pub fn handle_dead(&mut self, request_id: RequestId) -> Result<Vec<RequesterAction<S>>, Violation> {
        let pending = self.answered("dead", request_id)?;
        if pending.told {
            let state = "for a tensor that was said to be there";
            return Err(Violation::Unexpected { frame: "dead", request_id, state });
        }
        self.end(request_id, RequestOutcome::Dead);
        Ok(self.take_actions())
    }

    /// The link is gone, its queue pairs are closed, and nothing writes any sink of it: all that was asked fails, and
    /// all that will be.
    pub fn peer_gone(&mut self, why: &str) -> Vec<RequesterAction<S>> {
        self.gone = Some(why.to_owned());
        while let Some((&request_id, _)) = self.requests.first_key_value() {
            let failure = Failure::new(Code::Unavailable, format!("the link has ended: {why}"));
            self.end(request_id, RequestOutcome::Failed(failure));
        }
        self.take_actions()
    }

    /// Requests that have no last answer, those included that are cancelled.
    pub fn pending(&self) -> usize {
        self.requests.len()
    }

    /// A request that the peer may answer.
    fn answered(
        &mut self,
        frame: &'static str,
        request_id: RequestId,
    ) -> Result<&mut OwnRequest<S>, Violation> {
        let pending = self.requests.get_mut(&request_id).filter(|pending| pending.is_asked());
        pending.ok_or(Violation::Unknown { frame, request_id })
    }

    /// A request that is over without a tensor.
    fn end(&mut self, request_id: RequestId, result: RequestOutcome<S>) {
        let Some(pending) = self.requests.remove(&request_id) else { return };
        let cancelled = matches!(pending.state, OwnRequestState::Cancelled(_));
        if let Some(sink) = pending.state.into_sink() {
            self.actions.push(RequesterAction::Free(sink));
        }
        if !cancelled {
            self.finish(request_id, result);
        }
    }

    /// The peer's tensor is longer than this end takes.
    fn refuse(&mut self, request_id: RequestId, name: &str, bytes: u64) -> Vec<RequesterAction<S>> {
        let limit = self.settings.max_tensor_bytes;
        let text =
            format!("tensor {name:?} has {bytes} bytes, of which {limit} are allowed (max_tensor_bytes)");
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
                self.actions.push(RequesterAction::Send(Message::Cancel { request_id }));
            }
        }
    }

    fn finish(&mut self, request_id: RequestId, result: RequestOutcome<S>) {
        self.actions.push(RequesterAction::Finished { request_id, result });
    }

    fn ask(&self, request_id: RequestId, name: Arc<str>, step: u64, sink: Option<Sink>) -> Message {
        Message::Request { request_id, name, step, sink, checksum_wanted: self.settings.validate }
    }

    fn take_actions(&mut self) -> Vec<RequesterAction<S>> {
        std::mem::take(&mut self.actions)
    }
}

impl<S> OwnRequest<S> {
    /// Whether the peer knows of it.
    fn is_asked(&self) -> bool {
        self.told || !matches!(self.state, OwnRequestState::Allocating(_))
    }

    fn allocating(&mut self) -> Option<(&mut Self, WireMetadata)> {
        match self.state {
            OwnRequestState::Allocating(metadata) => Some((self, metadata)),
            _ => None,
        }
    }
}

impl<S> OwnRequestState<S> {
    fn into_sink(self) -> Option<S> {
        match self {
            Self::Exposed { sink, .. } => Some(sink),
            Self::Cancelled(sink) => sink,
            Self::Allocating(_) | Self::Asked => None,
        }
    }
}
