//! What a provider keeps of each link, and what it makes of what comes from there.

use std::collections::{BTreeMap, HashSet};

use tonic::Code;

use super::message::{Key, is_name};
use super::recent::Recent;
use super::shelf::Offer;
use super::{ProviderSettings, Request, RequestId, Sink};
use crate::wire::tensor_frame::MAX_NAME;

/// What is kept of a link.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) requests: BTreeMap<RequestId, Pending>,
    /// What they are for: nothing twice at a time.
    pub(super) asked: HashSet<Key>,
    /// What was delivered, for what is not on offer any more.
    pub(super) delivered: Recent<Key>,
    /// Requests that have their last answer.
    pub(super) finished: Recent<RequestId>,
    /// Requests that ended here while they waited for a sink. The peer may have asked again before it knew.
    pub(super) lapsed: Recent<RequestId>,
}

/// A request without a last answer, or whose tensor is still being written.
#[derive(Debug)]
pub(super) struct Pending {
    pub(super) key: Key,
    pub(super) sink: Option<Sink>,
    pub(super) checksum_wanted: bool,
    pub(super) state: State,
}

/// What a request waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// An offer. In all other states it has a share of one.
    Waiting,
    /// The peer, which has to ask again.
    AwaitingSink,
    /// The device. The last answer is to come.
    Writing,
    /// Nothing, or the device: the last answer was given.
    Answered,
}

/// Why a request gets no tensor.
pub(super) type Refusal = (Code, String);

impl Peer {
    pub(super) fn new(settings: &ProviderSettings) -> Self {
        Self {
            requests: BTreeMap::new(),
            asked: HashSet::new(),
            delivered: Recent::new(settings.max_remembered),
            finished: Recent::new(settings.max_remembered),
            lapsed: Recent::new(settings.max_remembered),
        }
    }

    /// Whether the peer may ask this, with a number that no request of its has.
    pub(super) fn check_first(
        &self,
        request: &Request<'_>,
        settings: &ProviderSettings,
    ) -> Result<Key, Refusal> {
        let Request { request_id, name, step, .. } = *request;
        if self.finished.contains(&request_id) {
            return Err((Code::AlreadyExists, format!("{request_id} was answered before")));
        }
        if !is_name(name) {
            let text = format!("a name of {} bytes, of which 1 to {MAX_NAME} are allowed", name.len());
            return Err((Code::InvalidArgument, text));
        }
        let key = Key { name: name.into(), step };
        if let Some(sink) = &request.sink {
            check_sink(sink).map_err(|text| (Code::InvalidArgument, format!("{key}: {text}")))?;
        }
        if self.requests.len() >= settings.max_requests_per_peer {
            let text =
                format!("{} requests are pending, which is as many as a peer may have", self.requests.len());
            return Err((Code::ResourceExhausted, text));
        }
        if self.asked.contains(&key) {
            return Err((Code::AlreadyExists, format!("{key} was asked for already, and is pending")));
        }
        if self.delivered.contains(&key) {
            return Err((Code::AlreadyExists, format!("{key} was delivered already")));
        }
        Ok(key)
    }
}

impl Pending {
    /// The sink that the peer asks again with, for what is on offer.
    pub(super) fn check_again<T>(
        &self,
        request: &Request<'_>,
        offer: Option<&Offer<T>>,
    ) -> Result<Sink, Refusal> {
        let (id, key) = (request.request_id, &self.key);
        let invalid = |text: String| (Code::InvalidArgument, text);
        if self.state != State::AwaitingSink {
            return Err((Code::AlreadyExists, format!("{id} is that of {key}, and is pending")));
        }
        if (&*key.name, key.step) != (request.name, request.step) {
            return Err(invalid(format!("{id} was for {key}, and asks again for another")));
        }
        let Some(sink) = request.sink else {
            return Err(invalid(format!("{id} asks again without a sink for {key}")));
        };
        check_sink(&sink).map_err(|text| invalid(format!("{key}: {text}")))?;
        match offer {
            Some(Offer::Tensor(_, metadata)) if *metadata == sink.metadata => Ok(sink),
            _ => Err(invalid(format!("the sink for {key} is not made for what the provider said it is"))),
        }
    }
}

/// Whether the sink can hold what it says it is made for. Whether its memory is there is for the device to find out.
fn check_sink(sink: &Sink) -> Result<(), String> {
    let Sink { metadata, address, length, .. } = *sink;
    if length < metadata.bytes {
        return Err(format!("a sink of {length} bytes for a tensor of {}", metadata.bytes));
    }
    if address.checked_add(length).is_none() {
        return Err(format!("a sink of {length} bytes at {address:#x}, which is beyond all addresses"));
    }
    Ok(())
}
