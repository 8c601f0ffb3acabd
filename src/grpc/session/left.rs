//! Requests that callers leave to a task of their session.
//!
//! Calls that are made together share messages. In a runtime of one thread, a task of the session sends their requests: it runs when the
//! tasks that were ready have made their calls. Elsewhere another thread would run the task, so each caller looks with its next poll whether
//! requests are left.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::Notify;

/// The session's handle of its task. Dropping this ends the task.
#[derive(Debug, Default)]
pub(super) struct LeftRequests(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    /// The task is to send.
    wanted: AtomicBool,
    /// The thread that runs the task, once it has run; 0 before.
    thread: AtomicUsize,
    wake: Notify,
}

thread_local! {
    /// Its address tells threads apart.
    static THREAD: u8 = const { 0 };
}

/// Returns a number that no other thread of this process has, and that is not 0.
fn this_thread() -> usize {
    THREAD.try_with(|byte| std::ptr::from_ref(byte).addr()).unwrap_or(usize::MAX)
}

impl LeftRequests {
    /// Starts the task, if the current runtime has one thread. It calls `send` when requests were left, until `send` returns false.
    pub(super) fn start(&self, send: impl FnMut() -> bool + Send + 'static) {
        let Ok(runtime) = Handle::try_current() else { return };
        if runtime.runtime_flavor() == RuntimeFlavor::CurrentThread {
            runtime.spawn(Arc::clone(&self.0).run(send));
        }
    }

    /// Leaves a request to the task. Returns false if there is no task on this thread.
    pub(super) fn leave(&self) -> bool {
        let Shared { wanted, thread, wake } = &*self.0;
        if thread.load(Ordering::Relaxed) != this_thread() {
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
