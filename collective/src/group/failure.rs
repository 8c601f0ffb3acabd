//! The first failure of a group.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock};
use std::task::Waker;

use tonic_rdma::internal::{lock, wake_all};

use crate::error::CollectiveError;

/// The first failure of one generation of a group. Threads that carry out operations look at it, and each look is one load.
#[derive(Debug, Default)]
pub(crate) struct Failure {
    happened: AtomicBool,
    reason: OnceLock<CollectiveError>,
    wakers: Mutex<Vec<Waker>>,
}

impl Failure {
    /// Returns whether the group has failed.
    pub(crate) fn happened(&self) -> bool {
        // SYNC POINT: pairs with the store in `set`, so that `reason` is there.
        self.happened.load(Ordering::Acquire)
    }

    /// Returns the first failure.
    pub(crate) fn reason(&self) -> Option<&CollectiveError> {
        if self.happened() { self.reason.get() } else { None }
    }

    /// Sets the failure, if there was none, and wakes all waiters. Returns whether this was the first.
    pub(crate) fn set(&self, reason: CollectiveError) -> bool {
        if self.reason.set(reason).is_err() {
            return false;
        }
        self.happened.store(true, Ordering::Release);
        let wakers = std::mem::take(&mut *lock(&self.wakers));
        wake_all(wakers);
        true
    }

    /// Wakes `waker` when the group fails, or at once if it has failed.
    pub(crate) fn wake(&self, waker: &Waker) {
        let mut wakers = lock(&self.wakers);
        if self.happened() {
            drop(wakers);
            waker.wake_by_ref();
        } else if !wakers.iter().any(|known| known.will_wake(waker)) {
            wakers.push(waker.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Failure;
    use crate::error::CollectiveError;
    use std::future::poll_fn;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Poll, Wake, Waker};

    impl Failure {
        /// Waits until the group fails, and returns the failure.
        pub(crate) async fn wait(&self) -> &CollectiveError {
            poll_fn(|context| {
                self.wake(context.waker());
                self.reason().map_or(Poll::Pending, Poll::Ready)
            })
            .await
        }
    }

    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[tokio::test]
    async fn the_first_failure_stays_and_wakes_all_waiters() {
        let failure = Arc::new(Failure::default());
        let count = Arc::new(Count(AtomicUsize::new(0)));
        let waker = Waker::from(Arc::clone(&count));
        failure.wake(&waker);
        failure.wake(&waker);
        let waiting = Arc::clone(&failure);
        let waiter = tokio::spawn(async move { waiting.wait().await.to_string() });
        tokio::task::yield_now().await;
        assert!(failure.reason().is_none());
        assert!(failure.set(CollectiveError::Setup("first".into())));
        assert!(!failure.set(CollectiveError::Setup("second".into())));
        assert_eq!(waiter.await.unwrap(), "first");
        assert_eq!(count.0.load(Ordering::Relaxed), 1);
        failure.wake(&waker);
        assert_eq!(count.0.load(Ordering::Relaxed), 2);
    }
}
