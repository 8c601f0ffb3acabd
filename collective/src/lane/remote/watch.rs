//! The watch over channels: notes at once when one closes.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use tokio::task::JoinSet;
use tonic_rdma::internal::lock;
use tonic_rdma_tensor::{Channel, ChannelError};

/// Tasks that wait until channels close. They end when the watch is dropped.
pub(super) struct Watch {
    shared: Arc<Shared>,
    _tasks: JoinSet<()>,
}

#[derive(Default)]
struct Shared {
    changed: AtomicBool,
    closed: Mutex<Vec<(usize, ChannelError)>>,
}

impl Watch {
    /// Watches the channels to these ranks. Must be called within a tokio runtime.
    pub(super) fn over(channels: impl IntoIterator<Item = (usize, Channel)>) -> Self {
        let shared = Arc::new(Shared::default());
        let mut tasks = JoinSet::new();
        for (rank, channel) in channels {
            let shared = Arc::clone(&shared);
            tasks.spawn(async move {
                let error = channel.closed().await;
                lock(&shared.closed).push((rank, error));
                shared.changed.store(true, Ordering::Release);
            });
        }
        Self { shared, _tasks: tasks }
    }

    /// Returns whether a channel has closed since [`take`](Self::take).
    #[inline]
    pub(super) fn has_changed(&self) -> bool {
        self.shared.changed.load(Ordering::Relaxed)
    }

    /// Returns the channels that have closed since the last call: rank and reason.
    pub(super) fn take(&self) -> Vec<(usize, ChannelError)> {
        self.shared.changed.store(false, Ordering::Release);
        std::mem::take(&mut *lock(&self.shared.closed))
    }
}
