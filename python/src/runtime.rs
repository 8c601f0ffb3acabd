//! The one runtime of the process, and waits of Python's threads.

use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use tokio::runtime::{Builder, Runtime};

static RUNTIME: OnceLock<Runtime> = OnceLock::new();
/// This process is a child of one that had the runtime. The child has none of its threads.
static FORKED: AtomicBool = AtomicBool::new(false);

/// How often a wait sees to signals, such as the one of Ctrl-C.
pub(crate) const SIGNALS: Duration = Duration::from_millis(100);

/// Notes that this process is the child of a fork.
#[pyfunction]
pub(crate) fn after_fork_in_child() {
    if RUNTIME.get().is_some() {
        FORKED.store(true, Ordering::Relaxed);
    }
}

/// Returns `value`, which is about to be dropped; `None` in a fork of a process that had a runtime. What its
/// parent's threads have can't be freed there: they may hold its locks, and its descriptors are the parent's.
pub(crate) fn unless_forked<T>(value: T) -> Option<T> {
    if FORKED.load(Ordering::Relaxed) {
        #[allow(clippy::disallowed_methods, reason = "the process that owns it is the parent")]
        std::mem::forget(value);
        return None;
    }
    Some(value)
}

/// Returns the runtime.
///
/// # Errors
/// This process is a fork of one that had a runtime, or the system gives no threads.
pub(crate) fn runtime() -> PyResult<&'static Runtime> {
    if FORKED.load(Ordering::Relaxed) {
        return Err(PyRuntimeError::new_err(
            "tonic_rdma was used before this process was forked, and a fork has none of its threads: make channels and servers \
             after the fork, or start processes by the method \"spawn\"",
        ));
    }
    if let Some(runtime) = RUNTIME.get() {
        return Ok(runtime);
    }
    let made = Builder::new_multi_thread().thread_name("tonic-rdma").enable_all().build()?;
    Ok(RUNTIME.get_or_init(|| made))
}

/// Wakes a thread of Python.
struct Parked(Thread);

impl Wake for Parked {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

thread_local! {
    static WAKER: Waker = Arc::new(Parked(std::thread::current())).into();
}

/// Polls `future` on this thread until it is ready, without the interpreter's lock.
///
/// # Errors
/// KeyboardInterrupt, or what another signal's handler raised, and the errors of [`runtime`].
pub(crate) fn wait<F>(py: Python<'_>, future: F) -> PyResult<F::Output>
where
    F: Future<Output: Send> + Send,
{
    let runtime = runtime()?;
    let waker = WAKER.with(Waker::clone);
    let mut future = pin!(Some(future));
    loop {
        let polled = py.detach(|| {
            let _inside = runtime.enter();
            let mut context = Context::from_waker(&waker);
            let mut until = None;
            loop {
                let polled = future.as_mut().as_pin_mut().map(|future| future.poll(&mut context));
                if let Some(Poll::Ready(output)) = polled {
                    return Some(output);
                }
                let now = Instant::now();
                let left = until.get_or_insert(now + SIGNALS).saturating_duration_since(now);
                if left.is_zero() {
                    return None;
                }
                std::thread::park_timeout(left);
            }
        });
        if let Some(output) = polled {
            return Ok(output);
        }
        if let Err(error) = py.check_signals() {
            // It may have locks. What Python runs when its last objects go must not need them.
            py.detach(|| {
                let _inside = runtime.enter();
                future.set(None);
            });
            return Err(error);
        }
    }
}

/// Returns the time that the argument `name` stands for, in seconds; `None` for no limit.
///
/// # Errors
/// ValueError: it is not a number.
pub(crate) fn duration(name: &str, seconds: Option<f64>) -> PyResult<Option<Duration>> {
    match seconds {
        Some(seconds) if seconds.is_nan() => {
            Err(PyValueError::new_err(format!("{name}: expected seconds, not {seconds}")))
        }
        // What is too long for the clock is no limit.
        Some(seconds) => Ok(Duration::try_from_secs_f64(seconds.max(0.0)).ok()),
        None => Ok(None),
    }
}

/// Returns the moment `timeout` from now; `None` for no limit.
pub(crate) fn after(timeout: Option<Duration>) -> Option<Instant> {
    timeout.and_then(|timeout| Instant::now().checked_add(timeout))
}

/// Waits until `deadline`, or forever.
pub(crate) async fn sleep_until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline.into()).await,
        None => std::future::pending().await,
    }
}
