//! Tasks that end with their owner.

use tokio::task::AbortHandle;

/// A task that ends when this is dropped.
#[derive(Debug)]
pub(crate) struct OwnedTask(pub(crate) AbortHandle);

impl Drop for OwnedTask {
    fn drop(&mut self) {
        self.0.abort();
    }
}
