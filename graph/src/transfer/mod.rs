//! Moves crossing tensors between parts: by gRPC calls, or through static and dynamic slots (§3.2, §3.3).
//!
//! ```text
//!  mode          a tensor of known shape             any other tensor
//!  grpc-tcp      a unary call over HTTP/2 and TCP    the same
//!  grpc-rdma     a unary call over HTTP/2 and RDMA   the same
//!  grpc-native   a unary call over RDMA              the same
//!  rdma-cp       a copy, and a WRITE into a slot     a copy, a WRITE of metadata, and a READ by the receiver
//!  rdma-zerocp   a WRITE into a slot                 a WRITE of metadata, and a READ by the receiver
//!  rdma-in-place a WRITE of metadata, and a READ     the same
//! ```
//!
//! The thread of the executor polls slots itself, which costs a load. Calls run on the threads of the
//! session. The receiver copies the content once, out of a static slot or a message, into the memory of its
//! engine. What it reads goes to the memory of the engine at once, if the engine can have it there
//! ([`Value::hosted`](crate::dataflow::Value::hosted)).
//!
//! This module never decides how a tensor is placed, and never connects: the [session](crate::session) hands
//! it open connections.

mod calls;
mod peers;
pub(crate) mod proto;
mod slots;
mod state;
#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};

pub(crate) use self::calls::{CallEndpoints, CallTransfers, Caller, Mailbox};
pub(crate) use self::peers::{PeerEnd, Peers, SessionHandle};
pub(crate) use self::slots::{SlotEndpoints, SlotReceiver, SlotSender, SlotTransfers};
pub(crate) use self::state::{Mailboxes, Service, SessionState};

/// How the crossing tensors of a run move from part to part. The names are those of the command line.
///
/// ```
/// use tonic_rdma_graph::transfer::TransferMode;
///
/// let mode: TransferMode = "rdma-zerocp".parse()?;
/// assert!(mode == TransferMode::RdmaZerocp && mode.uses_slots());
/// let error = "tcp".parse::<TransferMode>().unwrap_err();
/// assert!(error.reason().ends_with("use grpc-tcp, grpc-rdma, grpc-native, rdma-cp, rdma-zerocp or rdma-in-place"));
/// # Ok::<(), tonic_rdma_graph::GraphError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TransferMode {
    /// A unary gRPC call for each tensor, with tonic's codec, over HTTP/2 and TCP.
    GrpcTcp,
    /// The same calls over HTTP/2 and RDMA.
    GrpcRdma,
    /// The same calls over RDMA, without HTTP/2.
    GrpcNative,
    /// Slots. Each tensor is copied to registered memory first, as by a transport that does not allocate its
    /// users' tensors (the paper's RDMA.cp).
    RdmaCp,
    /// Slots. A tensor in registered memory is sent from where it lies (the paper's RDMA.zerocp).
    RdmaZerocp,
    /// Dynamic slots for all tensors. The receiver reads a tensor from where it lies at the sender to where
    /// its engine computes with it.
    RdmaInPlace,
}

impl TransferMode {
    /// All modes.
    pub const ALL: [Self; 6] =
        [Self::GrpcTcp, Self::GrpcRdma, Self::GrpcNative, Self::RdmaCp, Self::RdmaZerocp, Self::RdmaInPlace];

    /// Returns whether tensors move through slots, without calls.
    pub fn uses_slots(self) -> bool {
        self.has_static_slots() || self == Self::RdmaInPlace
    }

    /// Returns whether static tensors move through static slots.
    pub fn has_static_slots(self) -> bool {
        matches!(self, Self::RdmaCp | Self::RdmaZerocp)
    }

    /// Returns the number of the mode in messages between parts: its position in [`ALL`](Self::ALL), from 1.
    pub(crate) fn number(self) -> u32 {
        self as u32 + 1
    }

    /// Returns the mode with this number.
    pub(crate) fn of_number(number: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|mode| mode.number() == number)
    }
}

crate::error::named!(
    TransferMode,
    "mode",
    "grpc-tcp, grpc-rdma, grpc-native, rdma-cp, rdma-zerocp or rdma-in-place"
);
