//! Requests that callers leave to others.
//!
//! Calls that are made together share messages. In a runtime of one thread, a task of the session sends their
//! requests: it runs when the tasks that were ready have made their calls. In other runtimes another thread
//! would run the task at once, so each caller checks with its next poll whether requests were left. Callers
//! may have no next poll for a long time, so the task checks as well, some milliseconds later.

use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::runtime::{Handle, Id, RuntimeFlavor};
use tokio::sync::Notify;

use crate::endpoint::this_thread;

/// The session's handle of its task. Dropping this ends the task.
#[derive(Debug, Default)]
pub(super) struct AbandonedRequests(Arc<AbandonedState>);

/// Who sends a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sends {
    /// The task of the session, when the tasks that are ready have run.
    Task,
    /// The next poll of a caller, or else the task, later.
    Callers,
    /// The caller, now.
    Caller,
}

/// The task was woken, and will check for requests.
const WOKEN: u8 = 1;
/// Requests are left to callers.
const ABANDONED: u8 = 2;
/// The session is gone.
const OVER: u8 = 4;
/// In place of a thread: the threads of a runtime of several threads. No thread has this number.
const SEVERAL: usize = usize::MAX - 1;

#[derive(Debug, Default)]
struct AbandonedState {
    /// [`WOKEN`], [`ABANDONED`] and [`OVER`].
    state: AtomicU8,
    /// The thread that runs the task, once it has run; 0 before, and after its end.
    thread: AtomicUsize,
    /// The runtime of the task.
    runtime: OnceLock<Id>,
    wake: Notify,
}

impl AbandonedRequests {
    /// Starts the task in the current runtime. It calls `send` when requests were left, until `send` returns
    /// false.
    pub(super) fn start(&self, send: impl FnMut() -> bool + Send + 'static) {
        let Ok(runtime) = Handle::try_current() else { return };
        if self.0.runtime.set(runtime.id()).is_err() {
            return;
        }
        let task = Task { shared: Arc::clone(&self.0), send };
        if runtime.runtime_flavor() == RuntimeFlavor::CurrentThread {
            runtime.spawn(task.run());
        } else {
            self.0.thread.store(SEVERAL, Ordering::SeqCst);
            runtime.spawn(task.run_late());
        }
    }

    /// Leaves a request that is queued. Returns who sends it.
    pub(super) fn leave(&self) -> Sends {
        let AbandonedState { thread, runtime, .. } = &*self.0;
        let home = thread.load(Ordering::Relaxed);
        if home == SEVERAL {
            // If both bits are set, the thread that clears them locks the session's state afterwards, and so
            // finds this request.
            if self.0.state.load(Ordering::Relaxed) != ABANDONED | WOKEN {
                self.0.wake(ABANDONED | WOKEN);
                // SYNC: either the task that ends finds this request, or this load finds that the task has
                // ended.
                if thread.load(Ordering::SeqCst) == 0 {
                    return Sends::Caller;
                }
            }
            return Sends::Callers;
        }
        // A thread may run one runtime after the other: the task of the one sends nothing while the thread
        // runs the other.
        if home != this_thread()
            || !Handle::try_current().is_ok_and(|current| runtime.get() == Some(&current.id()))
        {
            return Sends::Caller;
        }
        self.0.wake(WOKEN);
        Sends::Task
    }

    /// Returns whether requests are left to callers, and notes that this caller sends them.
    pub(super) fn take(&self) -> bool {
        let state = &self.0.state;
        state.load(Ordering::Relaxed) & ABANDONED != 0
            && state.fetch_and(!ABANDONED, Ordering::AcqRel) & ABANDONED != 0
    }
}

impl Drop for AbandonedRequests {
    fn drop(&mut self) {
        self.0.wake(OVER);
    }
}

impl AbandonedState {
    /// Sets bits, and wakes the task unless it was woken after its last check.
    fn wake(&self, bits: u8) {
        if self.state.fetch_or(bits, Ordering::SeqCst) & WOKEN == 0 {
            self.wake.notify_one();
        }
    }
}

/// The task of a session.
struct Task<F: FnMut() -> bool> {
    shared: Arc<AbandonedState>,
    send: F,
}

impl<F: FnMut() -> bool> Task<F> {
    /// Runs in a runtime of one thread, and sends when it is woken.
    async fn run(mut self) {
        loop {
            // A runtime of one thread may be run by one thread after the other.
            self.shared.thread.store(this_thread(), Ordering::Relaxed);
            self.shared.wake.notified().await;
            // SYNC: requests that are queued from here on ask for this task once more.
            self.shared.state.swap(0, Ordering::AcqRel);
            if !(self.send)() {
                return;
            }
        }
    }

    /// Runs in a runtime of several threads, and sends what no caller has sent.
    async fn run_late(mut self) {
        /// A caller that has left a request is usually polled again within microseconds. This time bounds
        /// what the task costs while calls are made all the time.
        const LATE: Duration = Duration::from_millis(5);
        loop {
            self.shared.wake.notified().await;
            tokio::time::sleep(LATE).await;
            if !self.send_abandoned() {
                return;
            }
        }
    }

    /// Sends if requests are left to callers. Returns false if the session is gone.
    fn send_abandoned(&mut self) -> bool {
        let state = self.shared.state.swap(0, Ordering::SeqCst);
        state & OVER == 0 && (state & ABANDONED == 0 || (self.send)())
    }
}

/// Callers send their requests themselves when the task has ended.
impl<F: FnMut() -> bool> Drop for Task<F> {
    fn drop(&mut self) {
        self.shared.thread.store(0, Ordering::SeqCst);
        if !std::thread::panicking() {
            self.send_abandoned();
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
        let left = AbandonedRequests::default();
        home.block_on(async {
            assert_eq!(left.leave(), Sends::Caller, "the task does not run yet");
            left.start(|| true);
            tokio::task::yield_now().await;
            assert_eq!(left.leave(), Sends::Task);
        });
        other.block_on(async {
            assert_eq!(left.leave(), Sends::Caller, "the thread does not run the task now")
        });
        assert_eq!(left.leave(), Sends::Caller, "no runtime");
        home.block_on(async { assert_eq!(left.leave(), Sends::Task) });
    }

    #[test]
    fn the_task_sends_what_no_caller_sends_and_none_is_left_to_a_task_that_has_ended() {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_time().build().unwrap();
        let left = AbandonedRequests::default();
        let (sender, sent) = std::sync::mpsc::channel();
        let entered = runtime.enter();
        left.start(move || sender.send(()).is_ok());
        drop(entered);
        for _ in 0..3 {
            assert_eq!(left.leave(), Sends::Callers);
            sent.recv_timeout(Duration::from_secs(60)).unwrap();
            assert!(!left.take());
        }
        // A caller sends, or it was too late.
        left.leave();
        if !left.take() {
            sent.recv_timeout(Duration::from_secs(60)).unwrap();
        }
        drop(runtime);
        assert_eq!(left.leave(), Sends::Caller);
    }
}
