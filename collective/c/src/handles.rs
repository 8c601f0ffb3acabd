//! Handles: numbers for communicators and for operations that C has begun.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tonic_rdma_collective::unstable::Arrays;
use tonic_rdma_collective::{CollectiveError, Communicator, Operation};

use crate::boundary::{Lent, TonicRdmaStatus, block_sigpipe};
use crate::failure::Failure;

/// An operation on arrays of C.
pub(crate) type Running = Operation<Arrays<Lent>>;

static COMMUNICATORS: Mutex<BTreeMap<u64, Arc<Communicator>>> = Mutex::new(BTreeMap::new());
/// `None` while a thread waits for the operation.
static OPERATIONS: Mutex<BTreeMap<u64, Option<Running>>> = Mutex::new(BTreeMap::new());

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns a number that was no handle yet.
fn fresh() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

fn unknown(what: &str, id: u64) -> Failure {
    let text = match id {
        0 => format!("the handle {{0}} is no {what}"),
        _ => format!("there is no {what} {id}: it was freed, has ended, or was never there"),
    };
    Failure::new(TonicRdmaStatus::UnknownHandle, text)
}

/// Carries out `future`, which makes a communicator, and returns its handle. It runs on a thread of its own, from
/// which all threads of the communicator inherit that SIGPIPE is blocked: writes to a peer that has died fail, and a
/// program in C would end by the signal.
pub(crate) fn opened(
    future: impl Future<Output = Result<Communicator, CollectiveError>> + Send,
) -> Result<u64, Failure> {
    let no_means = |error: std::io::Error| {
        Failure::new(TonicRdmaStatus::Setup, format!("the system gives no means to wait: {error}"))
    };
    let open = || -> Result<Communicator, Failure> {
        block_sigpipe();
        let runtime = tokio::runtime::Builder::new_current_thread().build().map_err(no_means)?;
        Ok(runtime.block_on(future)?)
    };
    let communicator = std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().spawn_scoped(scope, open).map_err(no_means)?;
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })?;
    let id = fresh();
    lock(&COMMUNICATORS).insert(id, Arc::new(communicator));
    Ok(id)
}

pub(crate) fn communicator(id: u64) -> Result<Arc<Communicator>, Failure> {
    lock(&COMMUNICATORS).get(&id).cloned().ok_or_else(|| unknown("communicator", id))
}

pub(crate) fn free_communicator(id: u64) -> Result<(), Failure> {
    let freed = lock(&COMMUNICATORS).remove(&id);
    freed.map(drop).ok_or_else(|| unknown("communicator", id))
}

/// Returns the handle of an operation that has started.
pub(crate) fn begun(running: Running) -> u64 {
    let id = fresh();
    lock(&OPERATIONS).insert(id, Some(running));
    id
}

/// An operation that this thread waits for. Dropping this gives the operation back, or its handle up. After a panic
/// it drops the operation, which gives its arrays back.
struct Taken {
    id: u64,
    running: Option<Running>,
}

impl Taken {
    fn new(id: u64) -> Result<Self, Failure> {
        let mut operations = lock(&OPERATIONS);
        let place = operations.get_mut(&id).ok_or_else(|| unknown("operation", id))?;
        let busy = || Failure::new(TonicRdmaStatus::Busy, format!("another thread waits for operation {id}"));
        Ok(Self { id, running: Some(place.take().ok_or_else(busy)?) })
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        // An operation is dropped before the lock is taken.
        let running = self.running.take().filter(|_| !std::thread::panicking());
        let mut operations = lock(&OPERATIONS);
        match running {
            Some(running) => operations.insert(self.id, Some(running)).map(drop),
            None => operations.remove(&self.id).map(drop),
        };
    }
}

/// Waits for an operation, for `limit` at most. Returns its result, and gives its handle up, if it has ended.
pub(crate) fn wait(id: u64, limit: Duration) -> Result<(), Failure> {
    let mut taken = Taken::new(id)?;
    let ended = taken.running.as_mut().map(|running| running.wait_timeout(limit));
    match ended.flatten() {
        Some(result) => {
            taken.running = None;
            Ok(result.map(drop)?)
        }
        None => {
            let text = format!("operation {id} did not end within {limit:?}; it goes on");
            Err(Failure::new(TonicRdmaStatus::Timeout, text))
        }
    }
}

/// Returns the result of an operation, and gives its handle up, if it has ended.
pub(crate) fn poll(id: u64) -> Result<Poll<Result<(), Failure>>, Failure> {
    let mut taken = Taken::new(id)?;
    let context = &mut Context::from_waker(Waker::noop());
    let ended = taken.running.as_mut().map_or(Poll::Pending, |running| Pin::new(running).poll(context));
    Ok(ended.map(|result| {
        taken.running = None;
        Ok(result.map(drop)?)
    }))
}

/// Drops an operation, which gives its arrays back at once.
pub(crate) fn free_operation(id: u64) -> Result<(), Failure> {
    Taken::new(id).map(|mut taken| drop(taken.running.take()))
}
