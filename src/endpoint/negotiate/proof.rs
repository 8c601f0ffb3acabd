//! The proof that both ends reach one another's memory.

use crate::endpoint::error::RdmaUnavailable;
use crate::wire::hello::{Confirm, Message};
use tonic_rdma_verbs::Probe;

/// Returns the message with the value that this end read in the peer's memory.
pub(super) fn confirm(probe: Probe) -> Message {
    Message::Confirm(Confirm::Connected { nonce: probe.peers })
}

/// Checks that the peer read the value that this end wrote.
pub(super) fn check(probe: Probe, peer: &Confirm) -> Result<(), RdmaUnavailable> {
    match peer {
        Confirm::Failed { reason } => Err(RdmaUnavailable::PeerFailed(reason.clone())),
        Confirm::Connected { nonce } if *nonce == probe.ours => Ok(()),
        Confirm::Connected { .. } => Err(RdmaUnavailable::MemoryNotShared),
    }
}
