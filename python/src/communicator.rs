//! `Communicator`: a group of ranks, and operations on arrays of Python.
//!
//! An operation has its arrays as [`Owned`] memory, so it goes on without Python, and without the interpreter's
//! lock. One at a time waits for its end: a thread in `wait`, or a task of the runtime if there are callbacks.

use std::fmt;
use std::future::poll_fn;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use half::{bf16, f16};
use pyo3::exceptions::{PyRuntimeError, PyTimeoutError, PyValueError};
use pyo3::prelude::*;
use tonic_rdma_collective as collective;
use tonic_rdma_collective::{CollectiveError, Launch, Number, Operand, Owned, Reduction};
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

/// Elements of one type. They are contiguous and aligned, and writable if the operation writes to them:
/// `Communicator::operation` has checked this.
struct Typed<T>(Elements, PhantomData<fn() -> T>);

impl<T: Number> Typed<T> {
    fn new(elements: Elements) -> Owned<Self> {
        Owned(Self(elements, PhantomData))
    }
}

impl<T: Number> Deref for Typed<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        bytemuck::cast_slice(self.0.bytes())
    }
}

impl<T: Number> DerefMut for Typed<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        bytemuck::cast_slice_mut(self.0.writable().unwrap_or_default())
    }
}

/// An operation, and what it needs besides memory.
#[derive(Clone, Copy, Debug)]
enum Verb {
    AllReduce(Reduction),
    ReduceScatter(Reduction),
    AllGather,
    Broadcast(usize),
    Send(usize),
    Receive(usize),
}

impl fmt::Display for Verb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::AllReduce(_) => "all_reduce",
            Self::ReduceScatter(_) => "reduce_scatter",
            Self::AllGather => "all_gather",
            Self::Broadcast(_) => "broadcast",
            Self::Send(_) => "send",
            Self::Receive(_) => "recv",
        })
    }
}

impl Verb {
    /// Returns the type as which elements of `dtype` are reduced, or moved.
    fn carrier(self, dtype: Dtype) -> Option<Dtype> {
        let reduction = match self {
            Self::AllReduce(reduction) | Self::ReduceScatter(reduction) => Some(reduction),
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

    /// Starts the operation.
    fn start<T: Number>(
        self,
        communicator: &collective::Communicator,
        array: Elements,
        out: Option<Elements>,
        limit: Option<Duration>,
    ) -> Box<dyn Running> {
        let array = Typed::<T>::new(array);
        match (self, out) {
            (Self::Send(to), None) => started(communicator.send(to, (array, Owned(Vec::new()))), limit),
            (_, None) => self.begin(communicator, array, limit),
            (_, Some(out)) => self.begin(communicator, (array, Typed::<T>::new(out)), limit),
        }
    }

    fn begin<X: Operand + Unpin + Send + 'static>(
        self,
        communicator: &collective::Communicator,
        operand: X,
        limit: Option<Duration>,
    ) -> Box<dyn Running>
    where
        collective::Operation<X>: Send,
    {
        let operation = match self {
            Self::AllReduce(reduction) => communicator.all_reduce(operand, reduction),
            Self::ReduceScatter(reduction) => communicator.reduce_scatter(operand, reduction),
            Self::AllGather => communicator.all_gather(operand),
            Self::Broadcast(root) => communicator.broadcast(operand, root),
            Self::Send(to) => communicator.send(to, operand),
            Self::Receive(from) => communicator.recv(from, operand),
        };
        started(operation, limit)
    }
}

fn started<X: Operand + Unpin + 'static>(
    mut operation: collective::Operation<X>,
    limit: Option<Duration>,
) -> Box<dyn Running>
where
    collective::Operation<X>: Send,
{
    if let Some(limit) = limit {
        operation = operation.deadline(limit);
    }
    Box::new(operation.start())
}

type Ended = Result<(), CollectiveError>;

/// An operation that has started, on operands of any type.
trait Running: Send {
    /// Waits on this thread. Returns `None` after `limit`.
    fn wait(&mut self, limit: Duration) -> Option<Ended>;

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Ended>;
}

impl<X: Operand + Unpin> Running for collective::Operation<X>
where
    Self: Send,
{
    fn wait(&mut self, limit: Duration) -> Option<Ended> {
        Some(self.wait_timeout(limit)?.map(drop).map_err(CollectiveError::from))
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Ended> {
        Future::poll(Pin::new(self), context).map(|ended| ended.map(drop).map_err(CollectiveError::from))
    }
}

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
    Idle(Box<dyn Running>),
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
                    let ended = poll_fn(|context| running.poll(context)).await;
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
                if let Some(ended) = running.wait(limit) {
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
    fn new(running: Box<dyn Running>, result: Py<PyAny>) -> Self {
        let state = Mutex::new(State { phase: Phase::Idle(running), callbacks: Vec::new(), waiters: 0 });
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
                Phase::Idle(running) => running.poll(&mut Context::from_waker(Waker::noop())),
            };
            if let Poll::Ready(ended) = &ended {
                // The lock is still held: no other thread may poll what has returned its result.
                self.shared.end(state, ended);
            }
            ended.is_ready()
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
        let Some((carrier, size)) = verb.carrier(dtype).and_then(|dtype| Some((dtype, dtype.size()?))) else {
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
        for memory in [Some(&elements), target.as_ref()].into_iter().flatten() {
            if !memory.bytes().as_ptr().addr().is_multiple_of(carrier.align()) {
                let text = format!(
                    "{verb}: the {} lies at an address that is no multiple of {}",
                    memory.spec(),
                    carrier.align()
                );
                return Err(PyValueError::new_err(text));
            }
        }
        let whole = elements.length().max(target.as_ref().map_or(0, Elements::length)) / size;
        let parts = matches!(verb, Verb::ReduceScatter(_) | Verb::AllGather);
        let width = dtype.size().unwrap_or(size) / size;
        if parts && width > 1 && !(whole / width).is_multiple_of(self.size) {
            let text =
                format!("{verb}: the number of elements of type {dtype} must be a multiple of {}", self.size);
            return Err(PyValueError::new_err(text));
        }
        if let Some(out) = target.take() {
            match together(verb, &elements, &out, communicator.part(whole, self.rank).start * size) {
                // In place, the operand is the whole.
                Some(true) => {
                    if elements.length() <= out.length() {
                        elements = out;
                    }
                    elements.writable()?;
                }
                Some(false) => target = Some(out),
                None => return Err(PyValueError::new_err(format!("{verb}: the array and out overlap"))),
            }
        }
        let start = || match carrier {
            Dtype::F16 => verb.start::<f16>(&communicator, elements, target, limit),
            Dtype::Bf16 => verb.start::<bf16>(&communicator, elements, target, limit),
            Dtype::F32 => verb.start::<f32>(&communicator, elements, target, limit),
            Dtype::F64 => verb.start::<f64>(&communicator, elements, target, limit),
            Dtype::I8 => verb.start::<i8>(&communicator, elements, target, limit),
            Dtype::I16 => verb.start::<i16>(&communicator, elements, target, limit),
            Dtype::I32 => verb.start::<i32>(&communicator, elements, target, limit),
            Dtype::I64 => verb.start::<i64>(&communicator, elements, target, limit),
            Dtype::U16 => verb.start::<u16>(&communicator, elements, target, limit),
            Dtype::U32 => verb.start::<u32>(&communicator, elements, target, limit),
            Dtype::U64 => verb.start::<u64>(&communicator, elements, target, limit),
            _ => verb.start::<u8>(&communicator, elements, target, limit),
        };
        // A start copies nothing. It may wait for the thread that carries on others, which never takes this lock.
        let running = if whole * size <= SMALL { start() } else { py.detach(start) };
        Ok(Operation::new(running, out.unwrap_or(array).clone().unbind()))
    }
}

/// Returns whether the array and the output lie where the operation in place has them: the part of this rank begins
/// `part` bytes after the whole. `None` if they overlap otherwise.
fn together(verb: Verb, array: &Elements, out: &Elements, part: usize) -> Option<bool> {
    let (first, second) = (array.bytes().as_ptr_range(), out.bytes().as_ptr_range());
    if first.is_empty() || second.is_empty() || first.end <= second.start || second.end <= first.start {
        return Some(false);
    }
    let (first, second) = (first.start.addr(), second.start.addr());
    let fits = match verb {
        Verb::AllGather => first == second + part,
        Verb::ReduceScatter(_) => second == first + part,
        _ => first == second && array.length() == out.length(),
    };
    fits.then_some(true)
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
        Ok(Operation::new(py.detach(|| started(communicator.barrier(), limit)), py.None()))
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
