//! The thread that delivers delayed tensors.

use std::sync::Arc;
use std::thread;

use super::network::Network;
use crate::error::GraphError;

/// Starts the thread. It ends when all parts have dropped their transfers.
pub(super) fn spawn(network: &Arc<Network>) -> Result<(), GraphError> {
    let network = Arc::clone(network);
    let spawned = thread::Builder::new().name("courier".to_owned()).spawn(move || while network.deliver() {});
    spawned.map(drop).map_err(|error| GraphError::Setting {
        setting: "delay",
        reason: format!("delayed transfers need a thread, and the system gave none: {error}"),
    })
}
