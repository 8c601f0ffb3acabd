//! Counts of handlers that began and ended, which a behaviour waits for.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use support::until;

/// Counts what handlers do. Clones share their counts.
#[derive(Clone, Debug, Default)]
pub(crate) struct Watch {
    began: Arc<AtomicUsize>,
    ended: Arc<AtomicUsize>,
}

impl Watch {
    /// Notes that a handler begins. The drop of the returned value notes its end.
    pub(crate) fn begin(&self) -> Guard {
        self.began.fetch_add(1, Ordering::SeqCst);
        Guard(self.clone())
    }

    /// Returns the number of handlers that began.
    pub(crate) fn began(&self) -> usize {
        self.began.load(Ordering::SeqCst)
    }

    /// Returns the number of handlers that ended.
    pub(crate) fn ended(&self) -> usize {
        self.ended.load(Ordering::SeqCst)
    }

    /// Waits until `count` handlers began.
    pub(crate) async fn until_began(&self, count: usize) {
        until(|| self.began() >= count).await;
    }

    /// Waits until all handlers that began have ended.
    pub(crate) async fn until_ended(&self) {
        until(|| self.began() == self.ended()).await;
    }
}

/// A handler under way.
#[derive(Debug)]
pub(crate) struct Guard(Watch);

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.ended.fetch_add(1, Ordering::SeqCst);
    }
}
