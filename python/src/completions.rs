//! Results on their way from the runtime to the thread of Python that takes them.

use std::fmt::Debug;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use http::HeaderMap;
use pyo3::exceptions::{PyException, PyRuntimeError};
use pyo3::prelude::*;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::{read, write};

use crate::error::Failure;
use crate::framing::Message;
use crate::metadata;

/// What a callback gets. It becomes an object of Python on the thread of the callback, because threads of the
/// runtime never take the interpreter's lock.
pub(crate) trait Value: Debug + Send {
    fn into_python(self: Box<Self>, py: Python<'_>) -> PyResult<Py<PyAny>>;
}

impl<T: Value, E: Failure> Value for Result<T, E> {
    /// The callback gets the value, or an instance of an exception.
    fn into_python(self: Box<Self>, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let value = self.map_err(Failure::into_exception).and_then(|value| Box::new(value).into_python(py));
        Ok(value.unwrap_or_else(|error| error.into_value(py).into_any()))
    }
}

impl Value for () {
    fn into_python(self: Box<Self>, py: Python<'_>) -> PyResult<Py<PyAny>> {
        Ok(py.None())
    }
}

impl Value for bool {
    fn into_python(self: Box<Self>, py: Python<'_>) -> PyResult<Py<PyAny>> {
        Ok(self.into_pyobject(py)?.to_owned().into_any().unbind())
    }
}

impl Value for i32 {
    fn into_python(self: Box<Self>, py: Python<'_>) -> PyResult<Py<PyAny>> {
        Ok(self.into_pyobject(py)?.into_any().unbind())
    }
}

impl Value for Py<PyAny> {
    fn into_python(self: Box<Self>, _: Python<'_>) -> PyResult<Py<PyAny>> {
        Ok(*self)
    }
}

impl Value for Option<Message> {
    fn into_python(self: Box<Self>, py: Python<'_>) -> PyResult<Py<PyAny>> {
        Ok(match *self {
            Some(message) => message.to_python(py)?.into_any().unbind(),
            None => py.None(),
        })
    }
}

impl Value for HeaderMap {
    fn into_python(self: Box<Self>, py: Python<'_>) -> PyResult<Py<PyAny>> {
        Ok(metadata::to_python(py, &self)?.into_any().unbind())
    }
}

/// A callback and what it gets.
type Completed = (Arc<Py<PyAny>>, Box<dyn Value>);

#[derive(Debug, Default)]
struct Queue {
    results: Vec<Completed>,
    closed: bool,
}

/// The queue that threads of the runtime write to.
#[derive(Debug)]
pub(crate) struct Results {
    queue: Mutex<Queue>,
    /// Readable while the queue has results, or is closed.
    event: OwnedFd,
}

impl Results {
    pub(crate) fn push(&self, callback: Arc<Py<PyAny>>, value: Box<dyn Value>) {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        if queue.closed {
            drop(queue);
            // These may be the last references: no lock is held when they are dropped.
            drop((callback, value));
            return;
        }
        let first = queue.results.is_empty();
        queue.results.push((callback, value));
        drop(queue);
        if first {
            self.signal();
        }
    }

    fn signal(&self) {
        // The counter can't overflow: it is set to 0 before results are taken.
        let _ = write(&self.event, &1u64.to_ne_bytes());
    }
}

/// Results that wait for the thread that takes them.
#[pyclass(frozen, module = "tonic_rdma._native")]
#[derive(Clone, Debug)]
pub(crate) struct Completions {
    results: Arc<Results>,
}

impl Completions {
    pub(crate) fn results(&self) -> Arc<Results> {
        Arc::clone(&self.results)
    }
}

#[pymethods]
impl Completions {
    #[new]
    fn new() -> PyResult<Self> {
        let event =
            eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(std::io::Error::from)?;
        Ok(Self { results: Arc::new(Results { queue: Mutex::default(), event }) })
    }

    fn fileno(&self) -> i32 {
        self.results.event.as_raw_fd()
    }

    /// Runs the callbacks of all results that are there. Returns how many.
    fn run_ready(&self, py: Python<'_>) -> PyResult<usize> {
        let _ = read(&self.results.event, &mut [0; 8]);
        let results = {
            let mut queue = self.results.queue.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::take(&mut queue.results)
        };
        let count = results.len();
        let mut interrupted = None;
        for (callback, value) in results {
            match value.into_python(py).and_then(|value| callback.call1(py, (value,))) {
                Ok(_) => {}
                // Ctrl-C ends the program, not a callback of a call.
                Err(error) if !error.is_instance_of::<PyException>(py) => interrupted = Some(error),
                Err(error) => error.write_unraisable(py, Some(callback.bind(py))),
            }
        }
        interrupted.map_or(Ok(count), Err)
    }

    /// Waits for results and runs their callbacks, until `close`.
    fn run_until_closed(&self, py: Python<'_>) -> PyResult<()> {
        loop {
            let waited = py.detach(|| poll(&mut [PollFd::new(&self.results.event, PollFlags::IN)], None));
            match waited {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(std::io::Error::from(error).into()),
            }
            // A callback that ends its program, as it thinks, ends no thread that other callbacks need.
            if let Err(error) = self.run_ready(py) {
                error.write_unraisable(py, None);
            }
            py.check_signals()?;
            let queue = self.results.queue.lock().unwrap_or_else(PoisonError::into_inner);
            if queue.closed && queue.results.is_empty() {
                return Ok(());
            }
        }
    }

    fn push(&self, callback: Py<PyAny>, value: Py<PyAny>) {
        self.results.push(Arc::new(callback), Box::new(value));
    }

    /// Closes the queue, and drops what is in it.
    fn discard(&self) {
        self.close();
        let results =
            std::mem::take(&mut self.results.queue.lock().unwrap_or_else(PoisonError::into_inner).results);
        drop(results);
    }

    /// Takes no more results. Those that are there can still be taken.
    fn close(&self) {
        self.results.queue.lock().unwrap_or_else(PoisonError::into_inner).closed = true;
        self.results.signal();
    }
}

/// A callback with the queue that it is to be run from. It gets an error if what it waits for panics.
#[derive(Debug)]
pub(crate) struct Callback {
    results: Arc<Results>,
    callback: Arc<Py<PyAny>>,
}

impl Callback {
    pub(crate) fn new(completions: &Completions, callback: Py<PyAny>) -> Self {
        Self { results: completions.results(), callback: Arc::new(callback) }
    }

    pub(crate) fn complete(self, value: impl Value + 'static) {
        self.results.push(Arc::clone(&self.callback), Box::new(value));
    }

    /// Completes with the result of `future`, on the runtime.
    pub(crate) fn complete_with(
        self,
        future: impl Future<Output: Value + 'static> + Send + 'static,
    ) -> PyResult<()> {
        crate::runtime::runtime()?.spawn(async move { self.complete(future.await) });
        Ok(())
    }
}

impl Drop for Callback {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let error = PyRuntimeError::new_err("a bug in tonic_rdma: the operation panicked");
            self.results.push(Arc::clone(&self.callback), Box::new(Err::<(), PyErr>(error)));
        }
    }
}
