//! Requests that callers leave to a task of their session.
//!
//! Calls that are made together share messages. In a runtime of one thread, a task of the session sends their requests: it runs when the
//! tasks that were ready have made their calls. Elsewhere another thread would run the task, so each caller looks with its next poll whether
//! requests are left.

use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use tokio::runtime::{Handle, Id, RuntimeFlavor};
use tokio::sync::Notify;

use crate::endpoint::this_thread;

/// The session's handle of its task. Dropping this ends the task.
#[derive(Debug, Default)]
pub(super) struct LeftRequests(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    /// The task is to send.
    wanted: AtomicBool,
    /// The thread that runs the task, once it has run; 0 before.
    thread: AtomicUsize,
    /// The runtime of the task.
    runtime: OnceLock<Id>,
    wake: Notify,
}

impl LeftRequests {
    /// Starts the task, if the current runtime has one thread. It calls `send` when requests were left, until `send` returns false.
    pub(super) fn start(&self, send: impl FnMut() -> bool + Send + 'static) {
        let Ok(runtime) = Handle::try_current() else { return };
        if runtime.runtime_flavor() == RuntimeFlavor::CurrentThread
            && self.0.runtime.set(runtime.id()).is_ok()
        {
            runtime.spawn(Arc::clone(&self.0).run(send));
        }
    }

    /// Leaves a request to the task. Returns false if there is no task in this runtime, on this thread.
    pub(super) fn leave(&self) -> bool {
        let Shared { wanted, thread, runtime, wake } = &*self.0;
        if thread.load(Ordering::Relaxed) != this_thread() {
            return false;
        }
        // A thread may run one runtime after the other: the task of the one sends nothing while the thread runs the other.
        if !Handle::try_current().is_ok_and(|current| runtime.get() == Some(&current.id())) {
            return false;
        }
        if !wanted.swap(true, Ordering::AcqRel) {
            wake.notify_one();
        }
        true
    }
}

impl Drop for LeftRequests {
    fn drop(&mut self) {
        self.0.wake.notify_one();
    }
}

/// Notes that the task has ended: callers send their requests themselves again.
struct Ends(Arc<Shared>);

impl Drop for Ends {
    fn drop(&mut self) {
        self.0.thread.store(0, Ordering::Relaxed);
    }
}

impl Shared {
    async fn run(self: Arc<Self>, mut send: impl FnMut() -> bool) {
        let _ends = Ends(Arc::clone(&self));
        loop {
            // A runtime of one thread may be run by one thread after the other.
            self.thread.store(this_thread(), Ordering::Relaxed);
            self.wake.notified().await;
            // SYNC: requests that are queued from here on ask for this task once more.
            self.wanted.store(false, Ordering::Release);
            if !send() {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    #[test]
    fn a_request_is_left_only_within_the_runtime_of_the_task() {
        let runtime = || tokio::runtime::Builder::new_current_thread().build().unwrap();
        let (home, other) = (runtime(), runtime());
        let left = LeftRequests::default();
        home.block_on(async {
            assert!(!left.leave(), "the task does not run yet");
            left.start(|| true);
            tokio::task::yield_now().await;
            assert!(left.leave());
        });
        other.block_on(async { assert!(!left.leave(), "the thread does not run the task now") });
        assert!(!left.leave(), "no runtime");
        home.block_on(async { assert!(left.leave()) });
    }
}
