//! The threads of a session.

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use tokio::runtime::{Handle, Runtime};

use crate::error::GraphError;
use crate::session::farewell::Farewell;
use crate::session::state::Hall;

/// How long the threads go on after the end of a session, so that the other parts learn of the end.
pub(super) const FAREWELL: Duration = Duration::from_secs(1);

/// How long they go on if this part has failed, and another part has not called yet to hear why.
const REASON: Duration = Duration::from_secs(3);

/// How long the tasks of the threads may take to end.
const LAST_TASKS: Duration = Duration::from_secs(1);

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
    /// Where the threads listen.
    address: OnceLock<SocketAddr>,
}

impl Threads {
    pub(super) fn new(runtime: Runtime, hall: Arc<Hall>, watchers: Arc<AtomicUsize>) -> Self {
        let handle = runtime.handle().clone();
        Self { runtime: Some(runtime), handle, hall, watchers, address: OnceLock::new() }
    }

    /// Notes where the threads listen.
    pub(super) fn listen_at(&self, address: SocketAddr) {
        // A listener listens once.
        _ = self.address.set(address);
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
    fn farewell(watchers: &AtomicUsize, limit: Duration, hurries: impl Fn() -> bool) {
        let until = Instant::now() + limit;
        while watchers.load(Ordering::SeqCst) > 0 && Instant::now() < until && !hurries() {
            thread::sleep(Duration::from_millis(2));
        }
    }

    /// Waits until the other parts have heard why this one has failed, at most for `limit`.
    fn say_why(hall: &Hall, limit: Duration, hurries: impl Fn() -> bool) {
        let until = Instant::now() + limit;
        let has_to_say_why = || hall.state().is_some_and(|state| state.has_to_say_why());
        if !has_to_say_why() {
            return;
        }
        while has_to_say_why() && Instant::now() < until && !hurries() {
            thread::sleep(Duration::from_millis(2));
        }
        thread::sleep(LAST_ANSWER);
    }

    /// Waits for a moment until the other parts have heard why this one can't connect, because a program may end after such an error.
    pub(super) fn fail_within(&self, limit: Duration) {
        Self::say_why(&self.hall, limit, || false);
    }

    /// Leaves, and waits until the other parts know, at most for `limit`.
    pub(super) fn leave_within(&self, limit: Duration) {
        self.leave();
        Self::farewell(&self.watchers, limit, || false);
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        let Some(runtime) = self.runtime.take() else { return };
        self.leave();
        let (watchers, hall) = (Arc::clone(&self.watchers), Arc::clone(&self.hall));
        // Without a port, the program could not listen.
        let Some(address) = self.address.get() else { return runtime.shutdown_background() };
        let farewell = Farewell::begin(address.port());
        // The ordinary drop waits for the threads, which is not allowed on a runtime's thread.
        let rest = move || {
            Self::say_why(&hall, REASON, || farewell.hurries());
            Self::farewell(&watchers, FAREWELL, || farewell.hurries());
            runtime.shutdown_timeout(LAST_TASKS);
            drop(farewell);
        };
        // If the system gives no thread, the closure is dropped with the runtime in it; its threads end then.
        drop(thread::Builder::new().name("graph-farewell".to_owned()).spawn(rest));
    }
}
