//! The provider's record of each link, and the checks of requests from that link.

use std::collections::{BTreeMap, HashSet};

use tonic::Code;

use super::message::{Failure, TensorKey, is_name};
use super::offer_table::OfferedTensor;
use super::recent_set::{RecentMap, RecentSet};
use super::{ProviderSettings, RequestId, Sink, TensorRequest};
use crate::wire::tensor_frame::MAX_NAME;

/// The record of one link.
#[derive(Debug)]
pub(super) struct PeerRecord {
    pub(super) requests: BTreeMap<RequestId, ReceivedRequest>,
    /// Tensors that the requests are for, without the requests that were given up. A peer can't have two such requests for one tensor
    /// at a time.
    pub(super) asked: HashSet<TensorKey>,
    /// Tensors with a request that was given up while the device wrote the tensor. A later request for the tensor waits for the end of
    /// the write, so a peer never has two shares of an offer.
    pub(super) given_up: HashSet<TensorKey>,
    /// Answers that used up a share. This serves tensors that are not on offer any more.
    pub(super) delivered: RecentMap<TensorKey, Delivered>,
    /// Requests that have their last answer.
    pub(super) finished: RecentSet<RequestId>,
    /// Requests that ended here while they waited for a sink. The peer may have asked again before it learnt that.
    pub(super) lapsed: RecentSet<RequestId>,
}

/// A request without a last answer, or with a write that is still under way.
#[derive(Debug)]
pub(super) struct ReceivedRequest {
    pub(super) key: TensorKey,
    pub(super) sink: Option<Sink>,
    pub(super) checksum_wanted: bool,
    pub(super) state: ReceivedState,
    /// The peer has cancelled the request while the device wrote the tensor. The share comes back when the write has ended.
    pub(super) given_up: bool,
}

/// The last answer to a request that used up a share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Delivered {
    Tensor,
    Dead,
    Failed(Failure),
}

impl Delivered {
    /// Returns the answer that uses up a share of `offer`.
    pub(super) fn of<T>(offer: &OfferedTensor<T>) -> Self {
        match offer {
            OfferedTensor::Tensor(..) => Self::Tensor,
            OfferedTensor::Dead => Self::Dead,
            OfferedTensor::Failed(failure) => Self::Failed(failure.clone()),
        }
    }
}

/// The event that a request waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReceivedState {
    /// An offer. In all other states the request has a share of an offer.
    Waiting,
    /// The peer, which has to ask again with a sink.
    AwaitingSink,
    /// The device. The last answer follows.
    Writing,
    /// Nothing, or the device. The last answer was sent.
    Answered,
}

impl PeerRecord {
    pub(super) fn new(settings: &ProviderSettings) -> Self {
        Self {
            requests: BTreeMap::new(),
            asked: HashSet::new(),
            given_up: HashSet::new(),
            delivered: RecentMap::new(settings.max_remembered),
            finished: RecentSet::new(settings.max_remembered),
            lapsed: RecentSet::new(settings.max_remembered),
        }
    }

    /// Checks a request whose number is new, and returns the tensor that it asks for.
    pub(super) fn check_first(
        &self,
        request: &TensorRequest<'_>,
        settings: &ProviderSettings,
    ) -> Result<TensorKey, Failure> {
        let TensorRequest { request_id, name, step, .. } = *request;
        if self.finished.contains(&request_id) {
            return Err(Failure::new(Code::AlreadyExists, format!("{request_id} was answered before")));
        }
        if !is_name(name) {
            let text =
                format!("the name of the tensor has {} bytes, and 1 to {MAX_NAME} are allowed", name.len());
            return Err(Failure::new(Code::InvalidArgument, text));
        }
        let key = TensorKey { name: name.into(), step };
        if let Some(sink) = &request.sink {
            check_sink(sink)
                .map_err(|fault| Failure::new(Code::InvalidArgument, format!("{key}: {fault}")))?;
        }
        if self.requests.len() >= settings.max_requests_per_peer {
            let text =
                format!("{} requests of this peer are pending already, and no more may", self.requests.len());
            return Err(Failure::new(Code::ResourceExhausted, text));
        }
        if self.asked.contains(&key) {
            return Err(Failure::new(
                Code::AlreadyExists,
                format!("{key} is asked for already, and that request is pending"),
            ));
        }
        Ok(key)
    }

    /// Returns the request that waits for this tensor.
    pub(super) fn waiting(&self, key: &TensorKey) -> Option<RequestId> {
        let waits =
            |request: &ReceivedRequest| request.state == ReceivedState::Waiting && request.key == *key;
        self.requests.iter().find(|(_, request)| waits(request)).map(|(request_id, _)| *request_id)
    }
}

impl ReceivedRequest {
    /// Checks a repeated request against the offer, and returns its sink.
    pub(super) fn check_again<T>(
        &self,
        request: &TensorRequest<'_>,
        offer: Option<&OfferedTensor<T>>,
    ) -> Result<Sink, Failure> {
        let (id, key) = (request.request_id, &self.key);
        let invalid = |text: String| Failure::new(Code::InvalidArgument, text);
        if self.state != ReceivedState::AwaitingSink {
            return Err(Failure::new(
                Code::AlreadyExists,
                format!("{id} is in use for {key}, and is pending"),
            ));
        }
        if (&*key.name, key.step) != (request.name, request.step) {
            return Err(invalid(format!("{id} was for {key}, and asks again for another tensor")));
        }
        let Some(sink) = request.sink else {
            return Err(invalid(format!("{id} asks again without a sink for {key}")));
        };
        check_sink(&sink).map_err(|fault| invalid(format!("{key}: {fault}")))?;
        match offer {
            Some(OfferedTensor::Tensor(_, metadata)) if *metadata == sink.metadata => Ok(sink),
            _ => Err(invalid(format!(
                "the sink for {key} is not made for the metadata that the provider sent"
            ))),
        }
    }
}

/// A sink that can't hold the tensor that it is meant for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
enum SinkFault {
    #[error("a sink of {length} bytes for a tensor of {bytes}")]
    TooShort { length: u64, bytes: u64 },
    #[error("a sink of {length} bytes at {address:#x}, which is beyond all addresses")]
    BeyondAddresses { length: u64, address: u64 },
}

/// Checks that the sink is at least as long as its metadata states, and does not end beyond the address space. The device
/// checks the right to the memory.
fn check_sink(sink: &Sink) -> Result<(), SinkFault> {
    let Sink { metadata, address, length, .. } = *sink;
    if length < metadata.bytes {
        return Err(SinkFault::TooShort { length, bytes: metadata.bytes });
    }
    if address.checked_add(length).is_none() {
        return Err(SinkFault::BeyondAddresses { length, address });
    }
    Ok(())
}
