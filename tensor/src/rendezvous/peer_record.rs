//! What a provider keeps of each link, and what it makes of what comes from there.

use std::collections::{BTreeMap, HashSet};

use tonic::Code;

use super::message::{Failure, TensorKey, is_name};
use super::offer_table::OfferedTensor;
use super::recent_set::RecentSet;
use super::{ProviderSettings, RequestId, Sink, TensorRequest};
use crate::wire::tensor_frame::MAX_NAME;

/// What is kept of a link.
#[derive(Debug)]
pub(super) struct PeerRecord {
    pub(super) requests: BTreeMap<RequestId, ReceivedRequest>,
    /// What they are for: nothing twice at a time.
    pub(super) asked: HashSet<TensorKey>,
    /// What was delivered, for what is not on offer any more.
    pub(super) delivered: RecentSet<TensorKey>,
    /// Requests that have their last answer.
    pub(super) finished: RecentSet<RequestId>,
    /// Requests that ended here while they waited for a sink. The peer may have asked again before it knew.
    pub(super) lapsed: RecentSet<RequestId>,
}

/// A request without a last answer, or whose tensor is still being written.
#[derive(Debug)]
pub(super) struct ReceivedRequest {
    pub(super) key: TensorKey,
    pub(super) sink: Option<Sink>,
    pub(super) checksum_wanted: bool,
    pub(super) state: ReceivedState,
}

/// What a request waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReceivedState {
    /// An offer. In all other states it has a share of one.
    Waiting,
    /// The peer, which has to ask again.
    AwaitingSink,
    /// The device. The last answer is to come.
    Writing,
    /// Nothing, or the device: the last answer was given.
    Answered,
}

impl PeerRecord {
    pub(super) fn new(settings: &ProviderSettings) -> Self {
        Self {
            requests: BTreeMap::new(),
            asked: HashSet::new(),
            delivered: RecentSet::new(settings.max_remembered),
            finished: RecentSet::new(settings.max_remembered),
            lapsed: RecentSet::new(settings.max_remembered),
        }
    }

    /// Whether the peer may ask this, with a number that no request of its has.
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
            let text = format!("a name of {} bytes, of which 1 to {MAX_NAME} are allowed", name.len());
            return Err(Failure::new(Code::InvalidArgument, text));
        }
        let key = TensorKey { name: name.into(), step };
        if let Some(sink) = &request.sink {
            check_sink(sink)
                .map_err(|fault| Failure::new(Code::InvalidArgument, format!("{key}: {fault}")))?;
        }
        if self.requests.len() >= settings.max_requests_per_peer {
            let text =
                format!("{} requests are pending, which is as many as a peer may have", self.requests.len());
            return Err(Failure::new(Code::ResourceExhausted, text));
        }
        if self.asked.contains(&key) {
            return Err(Failure::new(
                Code::AlreadyExists,
                format!("{key} was asked for already, and is pending"),
            ));
        }
        if self.delivered.contains(&key) {
            return Err(Failure::new(Code::AlreadyExists, format!("{key} was delivered already")));
        }
        Ok(key)
    }
}

impl ReceivedRequest {
    /// The sink that the peer asks again with, for what is on offer.
    pub(super) fn check_again<T>(
        &self,
        request: &TensorRequest<'_>,
        offer: Option<&OfferedTensor<T>>,
    ) -> Result<Sink, Failure> {
        let (id, key) = (request.request_id, &self.key);
        let invalid = |text: String| Failure::new(Code::InvalidArgument, text);
        if self.state != ReceivedState::AwaitingSink {
            return Err(Failure::new(Code::AlreadyExists, format!("{id} is that of {key}, and is pending")));
        }
        if (&*key.name, key.step) != (request.name, request.step) {
            return Err(invalid(format!("{id} was for {key}, and asks again for another")));
        }
        let Some(sink) = request.sink else {
            return Err(invalid(format!("{id} asks again without a sink for {key}")));
        };
        check_sink(&sink).map_err(|fault| invalid(format!("{key}: {fault}")))?;
        match offer {
            Some(OfferedTensor::Tensor(_, metadata)) if *metadata == sink.metadata => Ok(sink),
            _ => Err(invalid(format!("the sink for {key} is not made for what the provider said it is"))),
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

/// Checks that the sink is as long as its metadata says. The device finds out whether the memory exists.
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
