//! Tensor rendezvous: a requester asks for a tensor by name and step, before or after the provider offers the tensor, and the
//! provider writes the tensor straight into the requester's memory.
//!
//! The messages flow as in TensorFlow's verbs transport (`tensorflow/contrib/verbs`, README). This module does no input or
//! output. A [`Provider`] handles the offers of a process for all its peers, and a [`Requester`] handles the requests to one
//! peer. Both take events, and return actions: frames to send, operations to post, results to pass on. Both own no memory,
//! post nothing, and read no clock: the time is an argument.
//!
//! ```text
//!  requester                                                            provider
//!  nothing cached     ── Request (name, step) ───────────────────────▶  keeps the request until (name, step) is offered
//!                     ◀── Metadata ───────────────────────────────────  keeps the tensor for this request
//!  allocates a sink   ── Request, same number, with the sink ────────▶
//!                     ◀══ RDMA WRITE into the sink ═══════════════════
//!  revokes the grant  ◀── Written ────────────────────────────────────  releases the tensor
//!
//!  metadata cached    ── Request with a sink ────────────────────────▶  the sink fits the tensor:
//!                     ◀══ RDMA WRITE ═════════════════════════════════
//!                     ◀── Written ────────────────────────────────────
//!                                                                       or the tensor has another shape or type:
//!                                                                       Metadata, and on as above, with a new sink
//! ```
//!
//! Answers in place of `Written`: `Dead` (the branch that would have computed the tensor was not taken) and `Status`
//! (a gRPC code and a text). **Every request gets one last answer**, `Written`, `Dead` or `Status`, also when the request is
//! cancelled. Until then, or until the link ends, the provider may write the sink, so the sink has to stay. For this reason
//! the requester holds the sinks, and the provider answers a `Cancel`: with the answer that was under way, or with a status.
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
//! | writing | the device | completion: `Written`, or a status if the request was cancelled meanwhile; over |
//!
//! **Each offer states its number of readers.** A request that matches an offer takes a share. The last answer uses the share
//! up. The share comes back when the request fails, is cancelled or loses its peer. The provider releases the tensor with the
//! last share, or when the readers did not come in time.
//!
//! **A reader that gives up may ask again.** A cancellation that reaches the provider during the write brings the share back when the
//! write has ended, and a request that asks again waits for that. If `Written` was sent before, the share is used up, so the requester
//! keeps the tensor and gives it to the request that asks again. It keeps as many tensors as it may have requests, as many bytes as
//! [`RequesterSettings::max_untaken_bytes`] says, and for as long as the driver says ([`Requester::age_untaken`]).
//!
//! **Bounds.** The number and the bytes of offers, the number of requests of each peer, the number of remembered requests, and
//! the waiting time have bounds; see [`ProviderSettings`] and [`RequesterSettings`]. At most two frames answer one frame of a
//! peer. The driver's queue of frames to a peer is bounded if the driver grants receives to this peer only while the queue is
//! short.
//!
//! **Access.** Any peer of the provider may ask for any tensor, but each link gets at most one share of each offer, so a peer
//! can't take the share of another peer. A process that comes back over another link is another peer. The provider keeps its right to
//! write a sink from `Written` until the program takes the tensor: the driver revokes the grant before the program gets the bytes.
//!
//! **Errors of a peer** concern that peer alone. A status answers a wrong request. A wrong answer is a [`Violation`], and the
//! driver then ends the link to that peer.
//!
//! # Duties of a driver
//!
//! - Send the frames of one link in the order of the actions, in both directions, and `Written` after its write has completed.
//! - Make a sink's grant exact and for one request. Revoke the grant, in the device too, before you read or free the sink
//!   ([`RequestOutcome::Arrived`], [`Free`](RequesterAction::Free)).
//! - When a link has ended, close its queue pairs before [`Requester::peer_gone`] gives the sinks back.
//! - Keep a tensor that is being written until the device is done with it, whatever the provider says.

mod checksum;
mod deadlines;
mod error;
mod message;
mod offer_table;
mod peer_record;
mod provider;
mod recent_set;
mod requester;
mod settings;
#[cfg(test)]
mod tests;

pub use checksum::{ChecksumMismatch, checksum, verify};
pub use error::{RequestError, Violation};
pub use message::{Failure, Message, PeerId};
pub use offer_table::{OfferError, OfferedTensor};
pub use provider::{Held, Provider, ProviderAction};
pub use requester::{Arrival, RequestOutcome, Requester, RequesterAction, SinkLocation};
pub use settings::{ProviderSettings, RequesterSettings};

pub use crate::wire::tensor_frame::{RequestId, Sink, TensorRequest};
