//! Calls of devices that may block.

use crate::endpoint::error::RdmaUnavailable;

/// Runs `work`, which calls devices and may block for a moment, on a thread that may block.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, RdmaUnavailable> + Send + 'static,
) -> Result<T, RdmaUnavailable> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| Err(RdmaUnavailable::setup(error)))
}
