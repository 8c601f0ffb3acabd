//! Moves crossing tensors between parts: by gRPC calls, or through static and dynamic slots (§3.2, §3.3).
//!
//! ```text
//!  mode          a tensor of known shape             any other tensor
//!  grpc-tcp      a unary call over HTTP/2 and TCP    the same
//!  grpc-rdma     a unary call over HTTP/2 and RDMA   the same
//!  grpc-native   a unary call over RDMA              the same
//!  rdma-cp       a copy, and a WRITE into a slot     a copy, a WRITE of metadata, and a READ by the receiver
//!  rdma-zerocp   a WRITE into a slot                 a WRITE of metadata, and a READ by the receiver
//! ```
//!
//! The thread of the executor looks at slots itself, which costs a load. Calls run on the threads of the session.
//! In all modes the receiver copies the content once, out of the slot or the message, into the memory of its engine.
//!
//! This module never decides how a tensor is placed, and never connects: the [session](crate::session) hands it open connections.

mod agreement;
mod base;
mod calls;
mod held;
mod mailbox;
mod mode;
mod peers;
pub(crate) mod proto;
mod slots;
#[cfg(test)]
mod tests;

pub use mode::Mode;

pub(crate) use agreement::RunsOfParts;
pub(crate) use base::Base;
pub(crate) use calls::{CallEnds, CallTransfers, Caller, LONGEST_CALL, refusal};
pub(crate) use mailbox::{Mailbox, Parcel};
pub(crate) use peers::Peers;
pub(crate) use slots::{SlotEnds, SlotReceiver, SlotSender, SlotTransfers};
