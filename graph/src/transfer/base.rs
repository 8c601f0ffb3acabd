//! What the transfers of all modes have in common.

use std::fmt;
use std::sync::Arc;

use tokio::runtime::Handle;

use crate::dataflow::KernelError;
use crate::error::GraphError;
use crate::placement::{Crossing, CrossingId, Part};
use crate::transfer::peers::Peers;

/// What transfers need of their session.
#[derive(Clone)]
pub(crate) struct Base {
    pub(crate) peers: Arc<Peers>,
    /// The threads of the session.
    pub(crate) runtime: Handle,
    /// Tells the peers that this part has failed.
    pub(crate) abort: Arc<dyn Fn(&str) + Send + Sync>,
    /// Keeps the connections.
    pub(crate) _session: Arc<dyn Send + Sync>,
}

impl Base {
    /// Makes the error of a crossing tensor that this part does not send or receive.
    pub(crate) fn unknown(&self, crossing: CrossingId, step: u64) -> GraphError {
        let reason =
            format!("crossing tensor {} (step {step}) is none of this part in this direction", crossing.0);
        GraphError::Setting { setting: "crossing", reason }
    }

    /// Makes the error of a tensor.
    pub(crate) fn transfer(
        &self,
        crossing: &Crossing,
        peer: Part,
        step: u64,
        source: KernelError,
    ) -> GraphError {
        GraphError::Transfer { crossing: crossing.name.clone(), step, peer: peer.0, source }
    }

    /// Makes the error of a connection that ended. What the session knows of the peer says more.
    pub(crate) fn peer_lost(&self, peer: Part, source: KernelError) -> GraphError {
        match self.peers.check(peer) {
            Err(error) => error,
            Ok(()) => GraphError::PeerLost { peer: peer.0, source },
        }
    }
}

impl fmt::Debug for Base {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Base").field("peers", &self.peers).finish_non_exhaustive()
    }
}
