//! Named tensors: a requester asks for a tensor by name and step, before or after the provider offers the
//! tensor, and the provider writes the tensor straight into the requester's memory.
//!
//! The messages flow as in TensorFlow's verbs transport (`tensorflow/contrib/verbs`, README). This module
//! does no I/O. A [`Provider`] handles the offers of a process for all its peers, and a
//! [`Requester`] handles the requests to one peer. Both take events, and return actions: frames to send,
//! operations to post, results to pass on. Both own no memory, post nothing, and read no clock: the time is
//! an argument.
//!
//! ```text
//!  requester                                                            provider
//!  nothing cached     ── Request (name, step) ───────────────────────▶  keeps the request until the offer
//!                     ◀── Metadata ───────────────────────────────────  keeps the tensor for this request
//!  allocates a sink   ── Request, same number, with the sink ────────▶
//!                     ◀══ RDMA WRITE into the sink ═══════════════════
//!  revokes the grant  ◀── Written ────────────────────────────────────  releases the tensor
//!
//!  metadata cached    ── Request with a sink ────────────────────────▶  the sink fits the tensor:
//!                     ◀══ RDMA WRITE ═════════════════════════════════
//!                     ◀── Written ────────────────────────────────────
//!                                                                       or does not fit it:
//!                                                                       Metadata, then as above
//! ```
//!
//! The WRITE carries the request's number as immediate data, where both devices have any and the answer needs no
//! checksum, or the frame `Written` follows the WRITE at once. Below, `Written` means both.
//!
//! Answers in place of `Written`: `Dead` (the branch that would have computed the tensor was not taken) and
//! `Status` (a gRPC code and a text). **Every request gets one last answer**, `Written`, `Dead` or `Status`,
//! also when the request is cancelled. Until then, or until the link ends, the provider may write the sink,
//! so the sink has to stay. For this reason the requester holds the sinks, and the provider answers a
//! `Cancel`: with the answer that was under way, or with a status.
//!
//! | request, at the requester | waits for | left by |
//! |---|---|---|
//! | allocating | a sink, from the driver | `sink_ready`: asked |
//! | asked | the provider | `Metadata`, at most once: allocating; a last answer: over |
//! | cancelled | the provider, if it knows of the request | a last answer: over, the sink free |
//!
//! | request, at the provider | waits for | left by |
//! |---|---|---|
//! | waiting | an offer of (name, step) | a sink that fits: writing; otherwise `Metadata`: awaiting a sink |
//! | awaiting a sink | the request again, with a sink | the sink fits: writing |
//! | writing, with `Written` under way | the device | completion: over |
//!
//! **Each offer states its number of readers.** A request that matches an offer takes a share. The last
//! answer uses the share up. The share comes back when the request fails, is cancelled or loses its peer. The
//! provider releases the tensor with the last share, or when the readers did not come in time.
//!
//! **A reader that gives up may ask again.** A cancellation that meets the write comes too late: the share is used
//! up, so the requester keeps the tensor and gives it to the request that asks
//! again. It keeps as many tensors as it may have requests, as many bytes as
//! [`RequesterSettings::max_untaken_bytes`] says, and for as long as the driver says
//! ([`Requester::age_untaken`]).
//!
//! **Bounds.** The number and the bytes of offers, the number of requests of each peer, the number of
//! remembered requests, and the waiting time have bounds; see [`ProviderSettings`] and [`RequesterSettings`].
//! At most two frames answer one frame of a peer. The driver's queue of frames to a peer is bounded if the
//! driver grants receives to this peer only while the queue is short.
//!
//! **Access.** Any peer of the provider may ask for any tensor, but each link gets at most one share of each
//! offer, so a peer can't take the share of another peer. A process that comes back over another link is
//! another peer. The provider keeps its right to write a sink from `Written` until the program takes the
//! tensor: the driver revokes the grant before the program gets the bytes.
//!
//! **Errors of a peer** concern that peer alone. A status answers a wrong request. A wrong answer is a
//! [`Violation`], and the driver then ends the link to that peer.
//!
//! # Duties of a driver
//!
//! - Send the frames and writes of one link in the order of the actions, in both directions, and `Written` behind
//!   its write, by the same queue pair. If the link has several queue pairs, those that must stay in order are
//!   those of requests whose numbers name the same one ([`RequesterSettings::queue_pairs`]): all requests for a
//!   name do.
//! - Make a sink's grant exact and for one request. Revoke the grant, in the device too, before you read or
//!   free the sink ([`RequestOutcome::Arrived`], [`Free`](RequesterAction::Free)).
//! - When a link has ended, close its queue pairs before [`Requester::peer_gone`] gives the sinks back.
//! - Keep a tensor that is being written until the device is done with it, whatever the provider says.

mod offer_table;
mod provider;
mod requester;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tonic::Code;
use xxhash_rust::xxh3::xxh3_64;

use crate::error::TensorError;
use crate::wire::tensor_frame::{FrameError, MAX_NAME};

pub(crate) use self::offer_table::OfferedTensor;
pub use self::provider::OfferCounts;
pub(crate) use self::provider::{Provider, ProviderAction};
pub(crate) use self::requester::{Arrival, Followed, RequestOutcome, Requester, RequesterAction, Violation};
pub(crate) use crate::wire::tensor_frame::{Frame, RequestId, TensorMemory, TensorRequest};

/// Bounds of a [`Provider`](Provider).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ProviderSettings {
    /// Number of offers at a time.
    pub(crate) max_offers: usize,
    /// Bytes of all offered tensors together.
    pub(crate) max_bytes: u64,
    /// Number of requests of one peer at a time.
    pub(crate) max_requests_per_peer: usize,
    /// Number of deliveries, and of finished requests, that the provider remembers of each peer, to recognise
    /// repetitions.
    pub(crate) max_remembered: usize,
    /// Time that a request waits for an offer, and then for a sink. `None`: until its link ends.
    pub(crate) request_timeout: Option<Duration>,
    /// Time that an offer waits for its readers. `None`: without limit.
    pub(crate) offer_timeout: Option<Duration>,
}

impl Default for ProviderSettings {
    /// Returns the defaults: 16 384 offers of 16 GiB together, 2 048 requests of each peer, one minute for a
    /// request, and ten minutes for an offer. A peer has 1 024 requests at a time, and sees the end of a write
    /// before this side does.
    fn default() -> Self {
        Self {
            max_offers: 16_384,
            max_bytes: 16 << 30,
            max_requests_per_peer: 2_048,
            max_remembered: 4_096,
            request_timeout: Some(Duration::from_secs(60)),
            offer_timeout: Some(Duration::from_secs(600)),
        }
    }
}

/// Bounds of a [`Requester`](Requester).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RequesterSettings {
    /// Number of requests at a time, with cancelled requests that have no answer yet. Not more than the
    /// provider accepts.
    pub(crate) max_requests: usize,
    /// Number of names whose metadata the requester remembers. It forgets the least recently used name. 0:
    /// none.
    pub(crate) max_cached: usize,
    /// Length of the longest tensor that the requester accepts, in bytes.
    pub(crate) max_tensor_bytes: u64,
    /// Bytes of all tensors together that the requester keeps for readers that gave up. It keeps the newest
    /// one also if that one is longer.
    pub(crate) max_untaken_bytes: u64,
    /// Whether each tensor has to come with a checksum.
    pub(crate) validate: bool,
    /// Number of queue pairs to the peer. The number of a request names one of them, modulo their number.
    pub(crate) queue_pairs: u64,
}

impl Default for RequesterSettings {
    /// Returns the defaults: 1 024 requests, 4 096 names, tensors of 64 GiB, 256 MiB of untaken tensors, no
    /// checksums.
    fn default() -> Self {
        Self {
            max_requests: 1_024,
            max_cached: 4_096,
            max_tensor_bytes: 64 << 30,
            max_untaken_bytes: 256 << 20,
            validate: false,
            queue_pairs: 1,
        }
    }
}

/// Number of a link to a peer. The driver gives each number once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct PeerId(pub(crate) u64);

/// A request: its peer and its number.
pub(crate) type Reader = (PeerId, RequestId);

/// Name and step of a tensor.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct TensorKey {
    name: Arc<str>,
    step: u64,
}

impl fmt::Display for TensorKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tensor {:?} of step {}", self.name, self.step)
    }
}

/// Checks that a frame can carry `name`.
fn check_name(name: &str) -> Result<(), String> {
    match name.len() {
        1..=MAX_NAME => Ok(()),
        length => Err(FrameError::Name(length).to_string()),
    }
}

/// The reason why a request gets no tensor.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub(crate) struct Failure {
    /// Kind of failure.
    pub(crate) code: Code,
    /// Description. A frame has room for some 2 000 bytes; a longer text is cut.
    pub(crate) text: String,
}

impl Failure {
    /// Makes a failure.
    pub(crate) fn new(code: Code, text: impl Into<String>) -> Self {
        Self { code, text: text.into() }
    }

    /// Makes the answer to a request that gets no tensor.
    fn answer(self, request_id: RequestId) -> Frame<'static> {
        Frame::Status { request_id, code: self.code as u32, text: self.text.into() }
    }
}

/// Returns the XXH3 of a tensor's bytes, which a `Written` frame carries. It reads all bytes.
pub(crate) fn checksum(bytes: &[u8]) -> u64 {
    xxh3_64(bytes)
}

/// Checks that `bytes` have the checksum `expected`, which the provider computed.
///
/// # Errors
/// `bytes` have another checksum.
pub(crate) fn verify(request_id: RequestId, bytes: &[u8], expected: u64) -> Result<(), TensorError> {
    let found = checksum(bytes);
    if found == expected {
        return Ok(());
    }
    let length = bytes.len();
    Err(TensorError::other(format!(
        "{request_id}: {length} bytes with checksum {found:#018x} arrived, but the provider computed {expected:#018x}"
    )))
}
