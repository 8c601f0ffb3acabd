//! Operations that Python waits for: on its own thread, or in an event loop.

use std::any::Any;
use std::future::Future;
use std::ops::Deref;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use pyo3::PyClass;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use tokio::sync::Mutex as AsyncMutex;
use tokio_util::sync::CancellationToken;

use crate::channel::Waiting;
use crate::completions::{Callback, Completions, Value};
use crate::error::classes;
use crate::runtime::{duration, runtime, unless_forked, wait};

fn timed_out(what: &str, limit: Duration) -> PyErr {
    let limit = Duration::from_millis(limit.as_micros().div_ceil(1000) as u64);
    classes::TensorTimeout::new_err((format!("{what} did not happen within {limit:?}"), "timeout"))
}

/// Returns the error of an operation on what was closed.
pub(crate) fn closed(kind: &str) -> PyErr {
    classes::TensorError::new_err((format!("the {kind} was closed here"), "closed"))
}

impl Value for Box<dyn Value> {
    fn into_python(self: Box<Self>, py: Python<'_>) -> PyResult<Py<PyAny>> {
        (*self).into_python(py)
    }
}

impl<T: Value> Value for Option<T> {
    fn into_python(self: Box<Self>, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.map_or_else(|| Ok(py.None()), |value| Box::new(value).into_python(py))
    }
}

/// A result that becomes an object of this class.
pub(crate) struct Made<T>(pub(crate) T);

impl<T> std::fmt::Debug for Made<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Made").finish_non_exhaustive()
    }
}

impl<T: PyClass + Into<PyClassInitializer<T>> + Send> Value for Made<T> {
    fn into_python(self: Box<Self>, py: Python<'_>) -> PyResult<Py<PyAny>> {
        Ok(Py::new(py, self.0)?.into_any())
    }
}

type Operation = Pin<Box<dyn Future<Output = PyResult<Box<dyn Value>>> + Send>>;

/// An operation that has not begun. It begins with the wait for it.
#[pyclass(frozen, module = "tonic_rdma._native")]
pub(crate) struct Pending {
    operation: Mutex<Option<Operation>>,
}

impl Pending {
    /// Makes an operation that fails after `timeout` seconds with an error that says `what` did not happen.
    ///
    /// # Errors
    /// The timeout is not a number.
    pub(crate) fn new<T: Value + 'static>(
        timeout: Option<f64>,
        what: &'static str,
        operation: impl Future<Output = PyResult<T>> + Send + 'static,
    ) -> PyResult<Self> {
        let limit = duration("timeout", timeout)?;
        let operation = async move {
            let ended = match limit {
                Some(limit) => tokio::time::timeout(limit, operation)
                    .await
                    .unwrap_or_else(|_| Err(timed_out(what, limit))),
                None => operation.await,
            };
            ended.map(|value| Box::new(value) as Box<dyn Value>)
        };
        Ok(Self { operation: Mutex::new(Some(Box::pin(operation))) })
    }

    fn take(&self) -> PyResult<Operation> {
        // An operation that is taken out in a fork would be dropped there.
        runtime()?;
        let operation = self.operation.lock().unwrap_or_else(PoisonError::into_inner).take();
        operation.ok_or_else(|| PyRuntimeError::new_err("the operation has begun already"))
    }
}

#[pymethods]
impl Pending {
    /// Carries the operation out, on this thread.
    fn wait(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        wait(py, self.take()?)??.into_python(py)
    }

    /// Begins the operation. The callback gets its value, or an exception.
    fn start(&self, completions: &Completions, callback: Py<PyAny>) -> PyResult<Waiting> {
        Waiting::begin(Callback::new(completions, callback), self.take()?)
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        drop_inside(self.operation.get_mut().unwrap_or_else(PoisonError::into_inner).take());
    }
}

/// Drops a value whose end may need the runtime; not in a fork: see [`unless_forked`].
pub(crate) fn drop_inside<T>(value: T) {
    if let Some(value) = unless_forked(value) {
        let _inside = runtime().map(tokio::runtime::Runtime::enter);
        drop(value);
    }
}

/// A value that [`drop_inside`] drops.
#[derive(Debug)]
pub(crate) struct Parents<T>(Option<T>);

impl<T> Parents<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(Some(value))
    }
}

impl<T> Deref for Parents<T> {
    type Target = T;

    fn deref(&self) -> &T {
        let Some(value) = &self.0 else { unreachable!("it is taken when it is dropped") };
        value
    }
}

impl<T> Drop for Parents<T> {
    fn drop(&mut self) {
        drop_inside(self.0.take());
    }
}

/// What operations use, by clones of it, until it is closed.
pub(crate) struct Closable<T> {
    /// What it is, for errors.
    kind: &'static str,
    value: Mutex<Option<Parents<T>>>,
}

impl<T: Clone> Closable<T> {
    pub(crate) fn new(kind: &'static str, value: T) -> Self {
        Self { kind, value: Mutex::new(Some(Parents::new(value))) }
    }

    /// Returns the value.
    ///
    /// # Errors
    /// It is closed, or this process is a fork.
    pub(crate) fn open(&self) -> PyResult<T> {
        self.get()?.ok_or_else(|| closed(self.kind))
    }

    /// Returns the value, or `None` if it is closed.
    ///
    /// # Errors
    /// This process is a fork.
    pub(crate) fn get(&self) -> PyResult<Option<T>> {
        runtime()?;
        Ok(self.value.lock().unwrap_or_else(PoisonError::into_inner).as_deref().cloned())
    }

    /// Lets the value go; not in a fork.
    pub(crate) fn close(&self) {
        if unless_forked(()).is_some() {
            let value = self.value.lock().unwrap_or_else(PoisonError::into_inner).take();
            drop(value);
        }
    }
}

/// The time until something is closed. It keeps its owner.
#[derive(Clone)]
pub(crate) struct Life {
    closed: CancellationToken,
    _owner: Arc<dyn Any + Send + Sync>,
}

impl Life {
    /// Begins the life of something of `owner`, which ends with `closed`.
    pub(crate) fn new(owner: Arc<dyn Any + Send + Sync>, closed: &CancellationToken) -> Self {
        Self { closed: closed.child_token(), _owner: owner }
    }

    /// Begins a life that ends with this one.
    pub(crate) fn part(&self) -> Self {
        Self { closed: self.closed.child_token(), _owner: Arc::clone(&self._owner) }
    }

    /// Ends it; not that of the parent of a fork.
    pub(crate) fn end(&self) {
        if unless_forked(()).is_some() {
            self.closed.cancel();
        }
    }

    /// Returns the result of `operation`, or an error if the life of this `kind` ends first.
    pub(crate) fn limit<V, F: Future<Output = PyResult<V>> + Send>(
        &self,
        kind: &'static str,
        operation: F,
    ) -> impl Future<Output = PyResult<V>> + Send + use<V, F> {
        let token = self.closed.clone();
        async move {
            if token.is_cancelled() {
                return Err(closed(kind));
            }
            tokio::select! {
                biased;
                ended = operation => ended,
                () = token.cancelled() => Err(closed(kind)),
            }
        }
    }
}

/// What one operation at a time uses, until it is closed.
pub(crate) struct Exclusive<T: Send + 'static> {
    /// What it is, for errors.
    kind: &'static str,
    inner: Parents<Arc<AsyncMutex<Option<T>>>>,
    life: Life,
}

impl<T: Send + 'static> Exclusive<T> {
    pub(crate) fn new(kind: &'static str, value: T, life: Life) -> Self {
        Self { kind, inner: Parents::new(Arc::new(AsyncMutex::new(Some(value)))), life }
    }

    /// Makes an operation. It waits for the operations before it.
    pub(crate) fn pending<V: Value + 'static>(
        &self,
        timeout: Option<f64>,
        what: &'static str,
        operation: impl for<'a> FnOnce(&'a mut T) -> Pin<Box<dyn Future<Output = PyResult<V>> + Send + 'a>>
        + Send
        + 'static,
    ) -> PyResult<Pending> {
        let (kind, inner) = (self.kind, Arc::clone(&self.inner));
        let operation = async move {
            let mut inner = inner.lock().await;
            operation(inner.as_mut().ok_or_else(|| closed(kind))?).await
        };
        Pending::new(timeout, what, self.life.limit(kind, operation))
    }

    /// Returns what `look` finds without waiting; `None` if an operation is under way.
    pub(crate) fn now<R: Send>(
        &self,
        py: Python<'_>,
        look: impl FnOnce(&mut T) -> PyResult<R> + Send,
    ) -> PyResult<Option<R>> {
        let runtime = runtime()?;
        py.detach(|| {
            let _inside = runtime.enter();
            if self.life.closed.is_cancelled() {
                return Err(closed(self.kind));
            }
            let Ok(mut inner) = self.inner.try_lock() else { return Ok(None) };
            Ok(Some(look(inner.as_mut().ok_or_else(|| closed(self.kind))?)?))
        })
    }

    /// Ends the operations under way, and lets the value go.
    pub(crate) fn close(&self, py: Python<'_>) {
        self.life.end();
        // In a fork of a process that used the package, there is none.
        let Ok(runtime) = runtime() else { return };
        // To free the memory of a slot takes long.
        py.detach(|| {
            let _inside = runtime.enter();
            match self.inner.try_lock() {
                Ok(mut inner) => drop(inner.take()),
                Err(_) => {
                    let inner = Arc::clone(&self.inner);
                    runtime.spawn(async move { drop(inner.lock().await.take()) });
                }
            }
        });
    }
}
