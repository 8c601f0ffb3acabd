//! `Communicator`: a group of ranks, and operations on arrays of Python.
//!
//! An operation has its arrays to its end, so it goes on without Python, and without the interpreter's lock.
//! One at a time waits for its end: a thread in `wait`, or a task of the runtime if there are callbacks.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use pyo3::exceptions::{PyRuntimeError, PyTimeoutError, PyValueError};
use pyo3::prelude::*;
use tonic_rdma_collective as collective;
use tonic_rdma_collective::unstable::{Array, Arrays, Verb};
use tonic_rdma_collective::{CollectiveError, Launch, Reduction};
use tonic_rdma_tensor::Dtype;

use crate::completions::{Callback, Completions};
use crate::error::to_py;
use crate::memory::Elements;
use crate::runtime::{SIGNALS, after, duration, runtime};
use crate::waits::{Closable, Made, Pending, drop_inside};

/// Operations on fewer bytes start in less time than it takes to release the interpreter's lock.
const SMALL: usize = 64 << 10;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

// An operation has clones of the elements to its end.
impl Array for Elements {
    const IS_LENT: bool = false;

    fn bytes(&self) -> &[u8] {
        self.bytes()
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        self.writable().unwrap_or_default()
    }
}

/// Returns the type as which elements of `dtype` are reduced, or moved.
fn carrier(verb: Verb, dtype: Dtype) -> Option<Dtype> {
    let reduction = match verb {
        Verb::AllReduce(reduction) | Verb::ReduceScatter(reduction) => Some(reduction),
        _ => None,
    };
    match (dtype, reduction) {
        (Dtype::Complex64, Some(Reduction::Sum | Reduction::Mean)) => Some(Dtype::F32),
        (Dtype::Complex128, Some(Reduction::Sum | Reduction::Mean)) => Some(Dtype::F64),
        (Dtype::Bool, Some(Reduction::Min | Reduction::Max)) => Some(Dtype::U8),
        (Dtype::Bool | Dtype::F8E4M3 | Dtype::F8E5M2, None) => Some(Dtype::U8),
        (Dtype::Complex64, None) => Some(Dtype::U32),
        (Dtype::Complex128, None) => Some(Dtype::U64),
        (Dtype::Bool | Dtype::F8E4M3 | Dtype::F8E5M2 | Dtype::Complex64 | Dtype::Complex128, _) => None,
        (number, _) => Some(number),
    }
}

/// An operation that has started.
type Running = collective::Operation<Arrays<Elements>>;

fn started(operation: Running, limit: Option<Duration>) -> Running {
    match limit {
        Some(limit) => operation.deadline(limit),
        None => operation,
    }
    .start()
}

type Ended = Result<(), CollectiveError>;

/// An operation of a group. It has started, and goes on also when this object is dropped.
///
/// `wait` waits on this thread, and `await` in an event loop. Both return the array with the result.
#[pyclass(frozen, weakref, module = "tonic_rdma")]
pub(crate) struct Operation {
    shared: Arc<Shared>,
    result: Py<PyAny>,
}

struct Shared {
    state: Mutex<State>,
    /// Notified when the operation has ended, or when the thread that polled it has given up.
    changed: Condvar,
}

struct State {
    phase: Phase,
    /// The callbacks, and what they get if the operation ends well.
    callbacks: Vec<(Callback, Py<PyAny>)>,
    /// Threads that wait for another one, or for the task.
    waiters: usize,
}

enum Phase {
    Idle(Box<Running>),
    /// A thread, or a task of the runtime, has the operation and waits for its end.
    Awaited,
    Ended(Ended),
}

impl Shared {
    fn end(&self, mut state: MutexGuard<'_, State>, ended: &Ended) {
        let before = std::mem::replace(&mut state.phase, Phase::Ended(ended.clone()));
        // It is a system call also when no thread waits.
        if state.waiters > 0 {
            self.changed.notify_all();
        }
        let callbacks = std::mem::take(&mut state.callbacks);
        drop(state);
        drop(before);
        for (callback, result) in callbacks {
            callback.complete(ended.clone().map(|()| result));
        }
    }

    /// Has the runtime wait for the end if there are callbacks and no thread waits.
    fn attend(self: &Arc<Self>) -> PyResult<()> {
        let runtime = runtime()?;
        let mut state = lock(&self.state);
        if state.callbacks.is_empty() {
            return Ok(());
        }
        match std::mem::replace(&mut state.phase, Phase::Awaited) {
            Phase::Idle(mut running) => {
                let shared = Arc::clone(self);
                runtime.spawn(async move {
                    let ended = (&mut running).await.map(drop).map_err(CollectiveError::from);
                    drop(running);
                    shared.end(lock(&shared.state), &ended);
                });
            }
            other => state.phase = other,
        }
        Ok(())
    }

    /// Waits for `limit` at most.
    fn wait(self: &Arc<Self>, limit: Duration) -> PyResult<Option<Ended>> {
        let mut state = lock(&self.state);
        match std::mem::replace(&mut state.phase, Phase::Awaited) {
            Phase::Ended(ended) => {
                state.phase = Phase::Ended(ended.clone());
                Ok(Some(ended))
            }
            Phase::Idle(mut running) => {
                drop(state);
                if let Some(ended) = running.wait_timeout(limit) {
                    let ended = ended.map(drop).map_err(CollectiveError::from);
                    drop(running);
                    self.end(lock(&self.state), &ended);
                    return Ok(Some(ended));
                }
                lock(&self.state).phase = Phase::Idle(running);
                self.changed.notify_one();
                self.attend()?;
                Ok(None)
            }
            Phase::Awaited => {
                state.waiters += 1;
                let waited = self.changed.wait_timeout(state, limit);
                let mut state = waited.unwrap_or_else(PoisonError::into_inner).0;
                state.waiters -= 1;
                match &state.phase {
                    Phase::Ended(ended) => Ok(Some(ended.clone())),
                    _ => Ok(None),
                }
            }
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        drop_inside(std::mem::replace(&mut state.phase, Phase::Awaited));
    }
}

impl Operation {
    fn new(running: Running, result: Py<PyAny>) -> Self {
        let state =
            Mutex::new(State { phase: Phase::Idle(Box::new(running)), callbacks: Vec::new(), waiters: 0 });
        Self { shared: Arc::new(Shared { state, changed: Condvar::new() }), result }
    }

    fn ended(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Ended> {
        runtime()?;
        let until = after(duration("timeout", timeout)?);
        loop {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            let limit = left.map_or(SIGNALS, |left| left.min(SIGNALS));
            if let Some(ended) = py.detach(|| self.shared.wait(limit))? {
                return Ok(ended);
            }
            py.check_signals()?;
            if until.is_some_and(|until| until <= Instant::now()) {
                let seconds = timeout.unwrap_or_default();
                return Err(PyTimeoutError::new_err(format!(
                    "the operation did not end within {seconds} s; it goes on"
                )));
            }
        }
    }
}

#[pymethods]
impl Operation {
    /// Waits for the end on this thread, and polls meanwhile. Returns the array with the result; None of a barrier.
    ///
    /// TimeoutError: it did not end within `timeout` seconds. It goes on. CollectiveError: it failed.
    #[pyo3(signature = (timeout = None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Py<PyAny>> {
        self.ended(py, timeout)?.map_err(to_py)?;
        Ok(self.result.clone_ref(py))
    }

    /// Waits as `wait` does, and returns the exception that it would raise, or None.
    #[pyo3(signature = (timeout = None))]
    fn exception(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Option<Py<PyAny>>> {
        Ok(self.ended(py, timeout)?.err().map(|error| to_py(error).into_value(py).into_any()))
    }

    /// Returns whether it has ended.
    fn done(&self, py: Python<'_>) -> PyResult<bool> {
        runtime()?;
        Ok(py.detach(|| {
            let mut state = lock(&self.shared.state);
            let ended = match &mut state.phase {
                Phase::Ended(_) => return true,
                Phase::Awaited => return false,
                Phase::Idle(running) => Pin::new(running).poll(&mut Context::from_waker(Waker::noop())),
            };
            let Poll::Ready(ended) = ended else { return false };
            // The lock is still held: no other thread may poll what has returned its result.
            self.shared.end(state, &ended.map(drop).map_err(CollectiveError::from));
            true
        }))
    }

    /// Has `callback(result)` run when `completions` is drained after the end: with the array, or an exception.
    fn then(&self, py: Python<'_>, completions: &Completions, callback: Py<PyAny>) -> PyResult<()> {
        let callback = Callback::new(completions, callback);
        let result = self.result.clone_ref(py);
        let mut state = lock(&self.shared.state);
        if let Phase::Ended(ended) = &state.phase {
            let ended = ended.clone();
            drop(state);
            callback.complete(ended.map(|()| result));
            return Ok(());
        }
        state.callbacks.push((callback, result));
        drop(state);
        self.shared.attend()
    }

    /// Has `function(operation)` run on a thread of this package after the end.
    fn add_done_callback(slf: Bound<'_, Self>, function: Bound<'_, PyAny>) -> PyResult<()> {
        let module = slf.py().import("tonic_rdma._collective")?;
        module.call_method1("_call_when_done", (slf, function)).map(drop)
    }

    fn __await__(slf: Bound<'_, Self>) -> PyResult<Bound<'_, PyAny>> {
        let module = slf.py().import("tonic_rdma._collective")?;
        module.call_method1("_finish", (slf,))?.call_method0("__await__")
    }
}

/// A group of ranks.
#[pyclass(frozen, module = "tonic_rdma._native")]
pub(crate) struct Communicator {
    opened: Closable<Arc<collective::Communicator>>,
    #[pyo3(get)]
    rank: usize,
    #[pyo3(get)]
    size: usize,
}

impl Communicator {
    fn of(communicator: collective::Communicator) -> Made<Self> {
        let (rank, size) = (communicator.rank(), communicator.size());
        Made(Self { opened: Closable::new("communicator", Arc::new(communicator)), rank, size })
    }

    /// # Errors
    /// It is closed, or this process is a fork.
    fn opened(&self) -> PyResult<Arc<collective::Communicator>> {
        self.opened.get()?.ok_or_else(|| PyRuntimeError::new_err("the communicator was closed here"))
    }

    fn operation(
        &self,
        py: Python<'_>,
        verb: Verb,
        array: &Bound<'_, PyAny>,
        out: Option<&Bound<'_, PyAny>>,
        deadline: Option<f64>,
    ) -> PyResult<Operation> {
        let communicator = self.opened()?;
        let limit = duration("deadline", deadline)?;
        let mut elements = Elements::of(array)?;
        let mut target = out.map(Elements::of).transpose()?;
        let dtype = elements.spec().dtype();
        let written = match (&mut target, verb) {
            (None, Verb::Send(_)) => None,
            (None, _) => Some(&mut elements),
            (Some(target), _) => Some(target),
        };
        written.map(Elements::writable).transpose()?;
        elements.check_contiguous()?;
        let Some((carrier, size)) = carrier(verb, dtype).and_then(|dtype| Some((dtype, dtype.size()?)))
        else {
            return Err(match verb {
                Verb::AllReduce(reduction) | Verb::ReduceScatter(reduction) => {
                    PyValueError::new_err(format!("{verb}: elements of type {dtype} have no {reduction}"))
                }
                _ => PyValueError::new_err(format!("{verb}: elements of type {dtype} can't be moved")),
            });
        };
        if let Some(target) = &target
            && target.spec().dtype() != dtype
        {
            let other = target.spec().dtype();
            return Err(PyValueError::new_err(format!("{verb}: the array has {dtype}, and out has {other}")));
        }
        let whole = elements.length().max(target.as_ref().map_or(0, Elements::length)) / size;
        let parts = matches!(verb, Verb::ReduceScatter(_) | Verb::AllGather);
        let width = dtype.size().unwrap_or(size) / size;
        if parts && width > 1 && !(whole / width).is_multiple_of(self.size) {
            let text =
                format!("{verb}: the number of elements of type {dtype} must be a multiple of {}", self.size);
            return Err(PyValueError::new_err(text));
        }
        let (input, target) = match (verb, target) {
            (Verb::Send(_), None) => (Some(elements), None),
            (_, None) => (None, Some(elements)),
            (_, target) => (Some(elements), target),
        };
        let arrays = Arrays::new(carrier, input, target);
        let start = || started(verb.operation(&communicator, arrays), limit);
        // A start copies nothing. It may wait for the thread that carries on others, which never takes this lock.
        let running = if whole * size <= SMALL { start() } else { py.detach(start) };
        Ok(Operation::new(running, out.unwrap_or(array).clone().unbind()))
    }
}

fn reduction(name: &str) -> PyResult<Reduction> {
    let found = Reduction::all().find(|reduction| reduction.to_string() == name);
    found.ok_or_else(|| PyValueError::new_err(format!("op: {name:?} is none of sum, mean, min, max")))
}

#[pymethods]
impl Communicator {
    /// Meets the other ranks. Without rank, size and address they come from the launcher.
    #[staticmethod]
    #[pyo3(signature = (launch, job, deadline, bootstrap_timeout, answer_timeout, plans))]
    fn connect(
        launch: Option<(usize, usize, String)>,
        job: Option<String>,
        deadline: Option<f64>,
        bootstrap_timeout: Option<f64>,
        answer_timeout: Option<f64>,
        plans: Option<&str>,
    ) -> PyResult<Pending> {
        let mut builder = collective::Communicator::builder();
        builder = match launch {
            Some((rank, size, address)) => {
                let launch = Launch::new(rank, size, address);
                builder.launch(match job {
                    Some(job) => launch.job(job),
                    None => launch,
                })
            }
            None => builder.from_env().map_err(to_py)?,
        };
        if let Some(limit) = duration("deadline", deadline)? {
            builder = builder.deadline(limit);
        }
        if let Some(limit) = duration("bootstrap_timeout", bootstrap_timeout)? {
            builder = builder.bootstrap_timeout(limit);
        }
        if let Some(limit) = duration("answer_timeout", answer_timeout)? {
            builder = builder.answer_timeout(limit);
        }
        if let Some(plans) = plans {
            builder = builder.plans(plans.parse().map_err(to_py)?);
        }
        Pending::new(None, "the meeting of all ranks", async move {
            Ok(Self::of(builder.connect().await.map_err(to_py)?))
        })
    }

    /// Makes a communicator of the ranks that are left.
    fn shrink(&self) -> PyResult<Pending> {
        let communicator = self.opened()?;
        Pending::new(None, "the agreement of the ranks that are left", async move {
            Ok(Self::of(communicator.shrink().await.map_err(to_py)?))
        })
    }

    #[pyo3(signature = (array, op, out, deadline))]
    fn all_reduce(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        op: &str,
        out: Option<&Bound<'_, PyAny>>,
        deadline: Option<f64>,
    ) -> PyResult<Operation> {
        self.operation(py, Verb::AllReduce(reduction(op)?), array, out, deadline)
    }

    #[pyo3(signature = (array, op, out, deadline))]
    fn reduce_scatter(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        op: &str,
        out: Option<&Bound<'_, PyAny>>,
        deadline: Option<f64>,
    ) -> PyResult<Operation> {
        self.operation(py, Verb::ReduceScatter(reduction(op)?), array, out, deadline)
    }

    #[pyo3(signature = (array, out, deadline))]
    fn all_gather(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        out: Option<&Bound<'_, PyAny>>,
        deadline: Option<f64>,
    ) -> PyResult<Operation> {
        self.operation(py, Verb::AllGather, array, out, deadline)
    }

    #[pyo3(signature = (array, root, deadline))]
    fn broadcast(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        root: usize,
        deadline: Option<f64>,
    ) -> PyResult<Operation> {
        self.operation(py, Verb::Broadcast(root), array, None, deadline)
    }

    #[pyo3(signature = (to, array, deadline))]
    fn send(
        &self,
        py: Python<'_>,
        to: usize,
        array: &Bound<'_, PyAny>,
        deadline: Option<f64>,
    ) -> PyResult<Operation> {
        self.operation(py, Verb::Send(to), array, None, deadline)
    }

    #[pyo3(signature = (source, array, deadline))]
    fn recv(
        &self,
        py: Python<'_>,
        source: usize,
        array: &Bound<'_, PyAny>,
        deadline: Option<f64>,
    ) -> PyResult<Operation> {
        self.operation(py, Verb::Receive(source), array, None, deadline)
    }

    #[pyo3(signature = (deadline))]
    fn barrier(&self, py: Python<'_>, deadline: Option<f64>) -> PyResult<Operation> {
        let communicator = self.opened()?;
        let limit = duration("deadline", deadline)?;
        let start =
            || started(Verb::Barrier.operation(&communicator, Arrays::new(Dtype::U8, None, None)), limit);
        Ok(Operation::new(py.detach(start), py.None()))
    }

    /// The elements of a part: the first one, and the one after the last.
    fn part(&self, elements: usize, rank: usize) -> PyResult<(usize, usize)> {
        if rank >= self.size {
            return Err(PyValueError::new_err(format!("rank: there is no rank {rank} among {}", self.size)));
        }
        let part = self.opened()?.part(elements, rank);
        Ok((part.start, part.end))
    }

    fn plans(&self) -> PyResult<String> {
        Ok(self.opened()?.plans().to_string())
    }

    /// In the order of `Statistics`.
    fn statistics(&self) -> PyResult<[u64; 7]> {
        let found = self.opened()?.statistics();
        Ok([
            found.operations,
            found.short,
            found.messages,
            found.inline_bytes,
            found.referenced_bytes,
            found.read_bytes,
            found.copied_bytes,
        ])
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.opened.close());
    }
}
