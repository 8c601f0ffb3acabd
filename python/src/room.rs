//! Room for messages that wait to be sent. A handler or a client that is quicker than the connection waits for it.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, TryAcquireError};

/// Bytes that one permit stands for.
const UNIT: usize = 1024;
/// Permits of a call. A message of more bytes takes all of them, so it waits alone.
const PERMITS: u32 = 128;

/// The room of one call, in one direction.
#[derive(Clone, Debug)]
pub(crate) struct Room(Arc<Semaphore>);

impl Room {
    pub(crate) fn new() -> Self {
        Self(Arc::new(Semaphore::new(PERMITS as usize)))
    }

    /// Waits for room for a message of `length` bytes. Returns `None` if the call has ended.
    pub(crate) async fn take(&self, length: usize) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.0).acquire_many_owned(permits(length)).await.ok()
    }

    /// Takes room if it is there.
    ///
    /// # Errors
    /// There is none now, or the call has ended.
    pub(crate) fn take_now(&self, length: usize) -> Result<OwnedSemaphorePermit, TryAcquireError> {
        Arc::clone(&self.0).try_acquire_many_owned(permits(length))
    }

    /// Ends the waits for room.
    pub(crate) fn close(&self) {
        self.0.close();
    }
}

fn permits(length: usize) -> u32 {
    u32::try_from(length / UNIT + 1).unwrap_or(PERMITS).min(PERMITS)
}
