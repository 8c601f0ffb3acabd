//! The threads of a session.

use std::future::Future;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use tokio::runtime::Handle;
use tonic_rdma_tensor::internal::meeting::{Hall, OwnRuntime};

use crate::error::GraphError;
use crate::session::farewell::Farewell;
use crate::session::settings::setting;
use crate::transfer::proto::Details;

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
    runtime: Option<OwnRuntime>,
    handle: Handle,
    hall: Hall<Details>,
    /// Where the threads listen.
    port: u16,
}

impl Threads {
    pub(super) fn new(runtime: OwnRuntime, hall: Hall<Details>, port: u16) -> Self {
        let handle = runtime.handle().clone();
        Self { runtime: Some(runtime), handle, hall, port }
    }

    pub(super) fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Waits for a moment until the other parts have heard why this one can't connect, because a program may end after such an error.
    pub(super) fn fail_within(&self, limit: Duration) {
        say_why(&self.hall, limit, || false);
    }

    /// Leaves, and waits until the other parts know, at most for `limit`.
    pub(super) fn leave_within(&self, limit: Duration) {
        leave(&self.hall, limit, || false);
    }
}

/// Carries out `future` on a runtime's threads, and waits for its result. The future ends by itself, because it has a time limit.
///
/// # Errors
/// The future's, or its task has panicked.
pub(super) fn run<T: Send + 'static>(
    handle: &Handle,
    future: impl Future<Output = Result<T, GraphError>> + Send + 'static,
) -> Result<T, GraphError> {
    let (send, receive) = mpsc::sync_channel(1);
    // A failed send means that the caller is gone, which can't be, because it waits.
    handle.spawn(async move { _ = send.send(future.await) });
    let ended = |_| setting("threads", "a task of the session has ended without a result".to_owned());
    receive.recv().map_err(ended)?
}

/// Waits until the other parts have heard why this one has failed, if it has, at most for `limit`.
fn say_why(hall: &Hall<Details>, limit: Duration, hurries: impl Fn() -> bool) {
    let Some(meeting) = hall.get().filter(|meeting| meeting.has_to_say_why()) else { return };
    wait_while(|| meeting.has_to_say_why() && !hurries(), limit);
    thread::sleep(LAST_ANSWER);
}

/// Tells the other parts that this part has left, unless it has failed, and waits until they know, at most for `limit`.
fn leave(hall: &Hall<Details>, limit: Duration, hurries: impl Fn() -> bool) {
    let Some(meeting) = hall.get() else { return };
    meeting.leave();
    wait_while(|| meeting.is_watched() && !hurries(), limit);
}

fn wait_while(waits: impl Fn() -> bool, limit: Duration) {
    let until = Instant::now() + limit;
    while waits() && Instant::now() < until {
        thread::sleep(Duration::from_millis(2));
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        let Some(runtime) = self.runtime.take() else { return };
        let (hall, farewell) = (Arc::clone(&self.hall), Farewell::begin(self.port));
        // The ordinary drop waits for the threads, which is not allowed on a runtime's thread.
        let rest = move || {
            say_why(&hall, REASON, || farewell.hurries());
            leave(&hall, FAREWELL, || farewell.hurries());
            runtime.end_within(LAST_TASKS);
            drop(farewell);
        };
        // If the system gives no thread, the closure is dropped with the runtime in it; its threads end then.
        drop(thread::Builder::new().name("graph-farewell".to_owned()).spawn(rest));
    }
}
