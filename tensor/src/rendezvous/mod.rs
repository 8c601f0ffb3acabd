//! Tensor rendezvous: a tensor is asked for by name and step, whether it is there already or not, and is written
//! straight into the requester's memory.
//!
//! The message flow is that of TensorFlow's verbs transport (`tensorflow/contrib/verbs`, README), sans-IO: a
//! [`Provider`] for what a process offers, for all its peers, and a [`Requester`] for what it asks of one peer. They are
//! told what happened, and answer with actions: frames to send, operations to post, results to hand on. They own no
//! memory, post nothing, and never look at the time, which comes in as an argument.
//!
//! ```text
//!  requester                                                            provider
//!  nothing cached     ── Request (name, step) ───────────────────────▶  keeps it until (name, step) is offered
//!                     ◀── Metadata ───────────────────────────────────  keeps the tensor for this request
//!  allocates a sink   ── Request, same number, with the sink ────────▶
//!                     ◀══ RDMA WRITE into the sink ═══════════════════
//!  revokes the grant  ◀── Written ────────────────────────────────────  lets the tensor go
//!
//!  metadata cached    ── Request with a sink ────────────────────────▶  the tensor is what the sink is made for:
//!                     ◀══ RDMA WRITE ═════════════════════════════════
//!                     ◀── Written ────────────────────────────────────
//!                                                                       or it has another shape or type: Metadata,
//!                                                                       and on as above, with a new sink
//! ```
//!
//! Answers in place of `Written`: `Dead` (the branch that would have computed the tensor was not taken) and `Status`
//! (a gRPC code and a text). **Every request gets one last answer**, `Written`, `Dead` or `Status`, also when it is
//! cancelled; until then, or until the link is gone, its sink may be written and has to stay. That is why the requester
//! holds the sinks, and why a `Cancel` is answered: by what was under way, else by a status.
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
//! | awaiting a sink | the same request with a sink | it fits: writing |
//! | writing | the device | completion: `Written`, over |
//!
//! **An offer has as many readers as it says.** A request that is matched takes a share; the share is used up by the
//! last answer, and given back when the request fails, is cancelled or loses its peer. The tensor is let go with the last
//! share, or when nobody came in time.
//!
//! **Bounds.** Offers by number and bytes, requests by number for each peer, what is remembered by number, waiting by
//! time; see [`ProviderSettings`] and [`RequesterSettings`]. A frame of a peer's is answered by at most two, so a driver
//! that grants it receives only while few frames to it are queued has a bounded queue whatever the peer does.
//!
//! **Who may ask.** Any peer of the provider, for anything, but each link no more than one share of each offer, however
//! it asks: a peer can't take what another is to get. A process that comes back over another link is another peer.
//!
//! **What a peer does wrong** it feels alone: a request that is wrong is answered by a status, and an answer that is
//! wrong is a [`Violation`], upon which the driver ends the link to that peer.
//!
//! # What a driver has to do
//!
//! - Frames of one link in the order in which they were said, both ways; `Written` after its write has completed.
//! - A sink's grant is exact and for one request. It is revoked, and the device knows, before the sink is looked at or
//!   freed ([`RequestOutcome::Arrived`], [`Free`](RequesterAction::Free)).
//! - When a link is gone its queue pairs are, too, before [`Requester::peer_gone`] gives the sinks back.
//! - A tensor that is being written stays until the device says that it is done with it, whatever the provider says.

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
pub use requester::{RequestOutcome, Requester, RequesterAction, SinkLocation};
pub use settings::{ProviderSettings, RequesterSettings};

pub use crate::wire::tensor_frame::{RequestId, Sink, TensorRequest};
