//! The threads of a session.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use tokio::runtime::{Handle, Runtime};

use crate::error::GraphError;
use crate::session::state::Hall;

/// How long the threads go on after the end of a session, so that the other parts learn of the end.
pub(super) const FAREWELL: Duration = Duration::from_secs(1);

/// How long they go on if this part has failed, and another part has not called yet to hear why.
const REASON: Duration = Duration::from_secs(3);

/// How long the answer to a call may take to leave this process.
const LAST_ANSWER: Duration = Duration::from_millis(50);

/// A runtime that belongs to the session. When it is dropped, the other parts are told that this part has left, unless it has failed.
#[derive(Debug)]
pub(super) struct Threads {
    /// `None` only while it is dropped.
    runtime: Option<Runtime>,
    handle: Handle,
    hall: Arc<Hall>,
    watchers: Arc<AtomicUsize>,
}

impl Threads {
    pub(super) fn new(runtime: Runtime, hall: Arc<Hall>, watchers: Arc<AtomicUsize>) -> Self {
        let handle = runtime.handle().clone();
        Self { runtime: Some(runtime), handle, hall, watchers }
    }

    pub(super) fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Carries out `future`, and waits for its result. The future ends by itself, because it has a time limit.
    ///
    /// # Errors
    /// The future's, or its task has panicked.
    pub(super) fn run<T: Send + 'static>(
        &self,
        future: impl Future<Output = Result<T, GraphError>> + Send + 'static,
    ) -> Result<T, GraphError> {
        let (send, receive) = mpsc::sync_channel(1);
        // A failed send means that the caller is gone, which can't be, because it waits.
        self.handle.spawn(async move { _ = send.send(future.await) });
        let ended = || GraphError::Setting {
            setting: "threads",
            reason: "a task of the session has ended without a result".to_owned(),
        };
        receive.recv().map_err(|_| ended())?
    }

    /// Tells the other parts that this part has left in good order, unless it has failed.
    fn leave(&self) {
        if let Some(state) = self.hall.state() {
            state.standing.send_if_modified(|standing| {
                let leaves = standing.failure.is_none() && !standing.left;
                standing.left |= leaves;
                leaves
            });
        }
    }

    /// Waits until no other part follows this one any more.
    fn farewell(watchers: &AtomicUsize, limit: Duration) {
        let until = Instant::now() + limit;
        while watchers.load(Ordering::SeqCst) > 0 && Instant::now() < until {
            thread::sleep(Duration::from_millis(2));
        }
    }

    /// Waits until the other parts have heard why this one has failed, at most for `limit`.
    fn say_why(hall: &Hall, limit: Duration) {
        let until = Instant::now() + limit;
        let has_to_say_why = || hall.state().is_some_and(|state| state.has_to_say_why());
        if !has_to_say_why() {
            return;
        }
        while has_to_say_why() && Instant::now() < until {
            thread::sleep(Duration::from_millis(2));
        }
        thread::sleep(LAST_ANSWER);
    }

    /// Waits for a moment until the other parts have heard why this one can't connect, because a program may end after such an error.
    pub(super) fn fail_within(&self, limit: Duration) {
        Self::say_why(&self.hall, limit);
    }

    /// Leaves, and waits until the other parts know, at most for `limit`.
    pub(super) fn leave_within(&self, limit: Duration) {
        self.leave();
        Self::farewell(&self.watchers, limit);
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        let Some(runtime) = self.runtime.take() else { return };
        self.leave();
        let (watchers, hall) = (Arc::clone(&self.watchers), Arc::clone(&self.hall));
        let has_to_say_why = hall.state().is_some_and(|state| state.has_to_say_why());
        let stays = self.watchers.load(Ordering::SeqCst) > 0 || has_to_say_why;
        // The ordinary drop waits for the threads, which is not allowed on a runtime's thread.
        let rest = move || {
            Self::say_why(&hall, REASON);
            Self::farewell(&watchers, FAREWELL);
            runtime.shutdown_background();
        };
        // If the system gives no thread, the closure is dropped with the runtime in it; its threads end then.
        if stays {
            drop(thread::Builder::new().name("graph-farewell".to_owned()).spawn(rest));
        } else {
            rest();
        }
    }
}
