//! The threads of a session, and their farewell after its end.

use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use tokio::runtime::Handle;

use crate::error::GraphError;
use crate::transfer::proto::Details;
use tonic_rdma_tensor::unstable::bootstrap::{BootstrapCell, OwnRuntime};
use tonic_rdma_verbs::unstable::lock;

/// How long the threads go on after the end of a session, so that the other parts learn of the end.
pub(super) const FAREWELL: Duration = Duration::from_secs(1);

/// How long the threads go on if this part has failed, and another part has not called yet to hear why.
const FAREWELL_AFTER_FAILURE: Duration = Duration::from_secs(3);

/// How long the tasks of the threads may take to end.
const LAST_TASKS: Duration = Duration::from_secs(1);

/// How long the answer to a call may take to leave this process.
const LAST_ANSWER: Duration = Duration::from_millis(50);

/// A runtime that belongs to the session. When it is dropped, the other parts are told that this part has
/// left, unless it has failed.
#[derive(Debug)]
pub(super) struct Threads {
    /// `None` only while it is dropped.
    runtime: Option<OwnRuntime>,
    pub(super) handle: Handle,
    pub(super) cell: BootstrapCell<Details>,
    /// Where the threads listen.
    port: u16,
}

impl Threads {
    pub(super) fn new(runtime: OwnRuntime, cell: BootstrapCell<Details>, port: u16) -> Self {
        let handle = runtime.handle().clone();
        Self { runtime: Some(runtime), handle, cell, port }
    }
}

/// Carries out `future` on a runtime's threads, and waits for its result. The future ends by itself, because
/// it has a time limit.
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
    let ended =
        |_| GraphError::of_setting("threads", "a task of the session has ended without a result".to_owned());
    receive.recv().map_err(ended)?
}

/// Waits until the other parts have heard why this one has failed, if it has, at most for `limit`.
pub(super) fn say_why(cell: &BootstrapCell<Details>, limit: Duration, port_wanted: impl Fn() -> bool) {
    let Some(bootstrap) = cell.get().filter(|bootstrap| bootstrap.has_unread_failure()) else { return };
    wait_while(|| bootstrap.has_unread_failure() && !port_wanted(), limit);
    thread::sleep(LAST_ANSWER);
}

/// Tells the other parts that this part has left, unless it has failed, and waits until they know, at most
/// for `limit`.
pub(super) fn leave(cell: &BootstrapCell<Details>, limit: Duration, port_wanted: impl Fn() -> bool) {
    let Some(bootstrap) = cell.get() else { return };
    bootstrap.leave();
    wait_while(|| bootstrap.is_watched() && !port_wanted(), limit);
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
        // Here, and not only in the thread below, so that a process that ends at once has said so.
        if let Some(bootstrap) = self.cell.get() {
            bootstrap.leave();
        }
        let (cell, farewell) = (Arc::clone(&self.cell), Farewell::begin(self.port));
        // The ordinary drop waits for the threads, which is not allowed on a runtime's thread.
        let rest = move || {
            say_why(&cell, FAREWELL_AFTER_FAILURE, || farewell.port_wanted());
            leave(&cell, FAREWELL, || farewell.port_wanted());
            runtime.end_within(LAST_TASKS);
            drop(farewell);
        };
        // If the system gives no thread, the closure is dropped with the runtime in it; its threads end then.
        drop(thread::Builder::new().name("graph-farewell".to_owned()).spawn(rest));
    }
}

/// How long a listener waits for the end of a farewell. It takes some milliseconds.
const FAREWELL_END: Duration = Duration::from_secs(2);

/// The farewells of this process: the port, and whether a listener wants it.
static FAREWELLS: Mutex<Vec<(u16, Arc<AtomicBool>)>> = Mutex::new(Vec::new());
static FAREWELL_OVER: Condvar = Condvar::new();

/// A port at which this process still answers, although the session has ended. When this is dropped, nothing
/// listens there any more.
///
/// A part that has failed answers for a few seconds more, so that parts that call late hear the reason. A
/// program that wants to listen at the same port again need not wait for that: its listener ends the
/// farewell.
#[derive(Debug)]
struct Farewell(Arc<AtomicBool>);

impl Farewell {
    /// Begins a farewell.
    fn begin(port: u16) -> Self {
        let port_wanted = Arc::default();
        lock(&FAREWELLS).push((port, Arc::clone(&port_wanted)));
        Self(port_wanted)
    }

    /// Returns whether a listener wants the port.
    fn port_wanted(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl Drop for Farewell {
    fn drop(&mut self) {
        lock(&FAREWELLS).retain(|(_, port_wanted)| !Arc::ptr_eq(port_wanted, &self.0));
        FAREWELL_OVER.notify_all();
    }
}

/// Ends the farewells of this process at the port of `address`, `host:port`.
pub(super) fn make_room(address: &str) {
    let port = address.rsplit_once(':').and_then(|(_, port)| port.parse::<u16>().ok());
    let is_there = |open: &&(u16, Arc<AtomicBool>)| Some(open.0) == port;
    let open = lock(&FAREWELLS);
    open.iter().filter(is_there).for_each(|(_, port_wanted)| port_wanted.store(true, Ordering::Relaxed));
    // If the farewell does not end in time, the listener finds the port in use, and says so.
    drop(
        FAREWELL_OVER.wait_timeout_while(open, FAREWELL_END, |open| open.iter().any(|open| is_there(&open))),
    );
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use tonic_rdma_tensor::unstable::bootstrap::{Bootstrap, MemberInfo};

    use super::*;

    /// The process may end as soon as `drop` returns.
    #[test]
    fn a_part_that_is_dropped_has_said_that_it_leaves() {
        // Many, because a thread that says so later may be fast.
        for _ in 0..100 {
            let (noun, number, size) = ("part", 0, 2);
            let (common, address, about) = Default::default();
            let info = MemberInfo { noun, number, size, common, address, about };
            let (bootstrap, cell) = (Arc::new(Bootstrap::new(info, None).unwrap()), BootstrapCell::default());
            cell.set(Arc::clone(&bootstrap)).unwrap();
            drop(Threads::new(OwnRuntime::new("test", 1).unwrap(), cell, 0));
            assert!(bootstrap.standing.borrow().left);
        }
    }
}
