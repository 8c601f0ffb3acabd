//! What the transfers of all modes have in common.

use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;

use crate::dataflow::KernelError;
use crate::error::GraphError;
use crate::placement::{CrossingId, Part};
use crate::transfer::agreement::RunsOfParts;
use crate::transfer::peers::Peers;

/// How long the reason for the end of a connection may take.
const REASON: Duration = Duration::from_secs(2);

/// What transfers need of their session.
#[derive(Clone)]
pub(crate) struct Base {
    pub(crate) peers: Arc<Peers>,
    /// The threads of the session.
    pub(crate) runtime: Handle,
    /// Which steps the parts run.
    pub(crate) runs: Arc<dyn RunsOfParts>,
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

    /// Notes that a connection to a part has ended. The reason comes by the watch over that part, a moment earlier or later: the part has
    /// failed, has left, or was killed. If no reason comes, the part counts as lost after a while.
    ///
    /// # Errors
    /// The reason is here.
    pub(crate) fn connection_ended(&self, peer: Part, source: &KernelError) -> Result<(), GraphError> {
        self.peers.check(peer)?;
        if self.peers.doubt(peer) {
            let peers = Arc::clone(&self.peers);
            let seconds = REASON.as_secs();
            let reason = format!(
                "a connection for tensors has ended ({source}), and in {seconds} s the part has not said why"
            );
            self.runtime.spawn(async move {
                tokio::time::sleep(REASON).await;
                if !peers.left(peer) {
                    peers.is_lost(peer, reason);
                }
            });
        }
        Ok(())
    }
}
