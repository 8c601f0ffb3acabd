//! `rdma-cp`, `rdma-zerocp`, `rdma-zerocp-await`, `rdma-dynamic` and `rdma-named`: tensors by one-sided operations,
//! without RPC.
//!
//! ```text
//!   client                                                     server
//!   control ── Prepare, Begin, End (gRPC, outside the time) ─▶ service ── a task for each trial
//!   caller ── sender ══ payload and tail, one WRITE ══════════▶ sink: polls the tail;  checks, consumes,
//!          polls the count ◀═════════════════════ release ═══       releases (the acknowledgement)
//! ```
//!
//! Both ends poll memory during a trial of the mode, and only then: otherwise the server would starve the
//! services of other modes. While they poll they yield to their runtime now and then (`YieldTimer` in
//! `geometry`). In `rdma-zerocp-await` both ends wait by futures, without polling. The receiver reports its
//! findings at the end of the trial, for all operations at once (`Record`).
//!
//! In the last two modes a tensor has no place at the receiver beforehand: the receiver reads it from the place that a
//! dynamic slot tells, or asks for it by name. Its release says only that it has been read. So the receiver
//! acknowledges each operation that it has consumed, by a static slot of the sender's device.

pub(crate) mod geometry;
pub(crate) mod receiver;
pub(crate) mod sender;
#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]
mod tests;

pub(crate) use self::sender::PlacementCaller;
pub(crate) use crate::compare::modes::placement::receiver::PlacementService;
