//! `rdma-cp`, `rdma-zerocp` and `rdma-zerocp-await`: tensors by one-sided operations, without RPC.
//!
//! ```text
//!   client                                                     server
//!   control ── Prepare, Begin, End (gRPC, outside the time) ─▶ service ── a task for each mode
//!   caller ── sender ══ payload and tail, one WRITE ══════════▶ sink: looks at the tail; checks, consumes,
//!          looks at the count ◀═══════════════════ release ═══       releases: that is the acknowledgement
//! ```
//!
//! Both ends look at memory for as long as a turn of the mode lasts, and no longer: the server must not starve other modes'
//! services. Both let their runtime have a turn now and then ([`yield_timer`]). In `rdma-zerocp-await` neither looks: both wait by
//! futures ([`awaited`]). What the receiver found, it says when the turn
//! has ended, for all operations at once ([`record`]).

mod caller;
mod geometry;
mod inspector;
mod receiver;
pub(crate) mod record;
mod sender;
mod service;
mod sink;
mod stream;
#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]
mod tests;
mod yield_timer;

pub(crate) use self::caller::PlacementCaller;
pub(crate) use self::service::PlacementService;
