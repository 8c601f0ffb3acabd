//! `Array`: elements in registered memory, in memory that arrived, or in a region of a device.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{LazyLock, OnceLock};

use pyo3::exceptions::{
    PyBufferError, PyImportError, PyMemoryError, PyOverflowError, PyTypeError, PyValueError,
};
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyBytes, PyTuple};
use tonic_rdma_tensor::{Dtype, Shape, Tensor, TensorSpec};
use tonic_rdma_verbs::memory::{Pool, RegisteredBuf};
use tonic_rdma_verbs::unstable::RegionMapping;

use crate::error::to_py;
use crate::memory::{Elements, bytes_of};
use crate::runtime::runtime;

/// The memory of the process's arrays.
static POOL: OnceLock<Pool> = OnceLock::new();
/// Bytes that arrays and operations had to copy, because they did not lie in registered memory.
static COPIED: AtomicU64 = AtomicU64::new(0);
/// Bytes that no array uses, which the pool keeps for the next ones.
const SPARE: u64 = 256 << 20;
/// Bytes that no array uses, but that could not be given back, because some of their slab are in use.
static BETWEEN: AtomicU64 = AtomicU64::new(0);
/// Copies of fewer bytes take less time than to release the interpreter's lock.
const LARGE: usize = 64 << 10;

/// The names of the types that elements can have.
pub(crate) static DTYPES: LazyLock<String> = LazyLock::new(|| {
    let fixed = Dtype::all().filter(|dtype| dtype.size().is_some());
    fixed.map(Dtype::name).collect::<Vec<_>>().join(", ")
});

/// Elements in one piece, row-major. numpy, torch, jax and others view them without a copy, by the buffer
/// protocol and by DLPack. The memory stays as long as the array or any view of it.
///
/// `empty`, `zeros` and `asarray` make arrays in registered memory. What arrives from another process is an
/// array too, which is read-only.
#[pyclass(frozen, weakref, module = "tonic_rdma")]
#[derive(Debug)]
pub(crate) struct Array {
    elements: Elements,
    shape: Vec<isize>,
    registered: bool,
}

impl Array {
    fn new(elements: Elements, registered: bool) -> Self {
        let shape = elements.spec().shape().dims().iter().map(|&length| length as isize).collect();
        Self { elements, shape, registered }
    }

    /// Makes an array of what arrived. It can't be written.
    ///
    /// # Errors
    /// ValueError: the elements have a variable length.
    pub(crate) fn of_tensor(tensor: &Tensor) -> PyResult<Self> {
        Ok(Self::new(Elements::of_arrived(tensor)?, tensor.registered().is_some()))
    }

    /// Makes an array in a pool's memory.
    ///
    /// # Errors
    /// ValueError: the buffer does not have as many bytes as the elements.
    pub(crate) fn of_pool(spec: TensorSpec, buffer: RegisteredBuf) -> PyResult<Self> {
        Ok(Self::new(Elements::of_buffer(spec, buffer)?, true))
    }

    /// Makes an array at the beginning of a region's memory. `keep` is dropped with the last view of it.
    ///
    /// # Errors
    /// ValueError: the region is too small, or begins at an address that is not aligned for the elements.
    pub(crate) fn of_mapping(
        spec: TensorSpec,
        mapping: RegionMapping,
        keep: impl Send + Sync + 'static,
    ) -> PyResult<Self> {
        Ok(Self::new(Elements::of_mapping(spec, mapping, keep)?, true))
    }

    pub(crate) fn elements(&self) -> &Elements {
        &self.elements
    }

    /// Returns the shape in the numbers of the buffer protocol.
    pub(crate) fn shape_numbers(&self) -> &[isize] {
        &self.shape
    }
}

#[pymethods]
impl Array {
    /// The lengths of the dimensions.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.shape)
    }

    /// numpy's name of the type of the elements, such as "float32"; also "bfloat16", "float8_e4m3fn" and
    /// "float8_e5m2".
    #[getter]
    fn dtype(&self) -> &'static str {
        self.elements.spec().dtype().name()
    }

    /// The bytes of all elements.
    #[getter]
    fn nbytes(&self) -> usize {
        self.elements.length()
    }

    /// The number of dimensions.
    #[getter]
    fn ndim(&self) -> usize {
        self.shape.len()
    }

    /// Whether views can't write.
    #[getter]
    fn readonly(&self) -> bool {
        !self.elements.is_writable()
    }

    /// Whether devices read the memory in place.
    #[getter]
    fn registered(&self) -> bool {
        self.registered
    }

    fn __len__(&self) -> PyResult<usize> {
        match self.shape.first() {
            Some(length) => Ok(length.unsigned_abs()),
            None => Err(PyTypeError::new_err("an array without dimensions has no length")),
        }
    }

    /// Of an array, not of its elements.
    fn __bool__(&self) -> bool {
        true
    }

    fn __repr__(&self) -> String {
        let place = if self.registered { "registered" } else { "not registered" };
        let written = if self.elements.is_writable() { "" } else { ", read-only" };
        format!("<tonic_rdma.Array {}, {place}{written}>", self.elements.spec())
    }

    /// Returns a copy of the elements.
    fn tobytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let bytes = self.elements.clone().into_tensor(py)?.to_bytes().map_err(to_py)?;
        let length = bytes.len();
        bytes_of(py, &[bytes], length)
    }

    /// Returns the array for numpy, in the same memory. bfloat16 and float8 need the package ml_dtypes.
    fn numpy<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let (py, dtype) = (slf.py(), slf.get().dtype());
        let numpy = py.import("numpy")?;
        if !matches!(slf.get().elements.spec().dtype(), Dtype::Bf16 | Dtype::F8E4M3 | Dtype::F8E5M2) {
            return numpy.call_method1("asarray", (slf,));
        }
        let types = py.import("ml_dtypes").map_err(|error| {
            let missing =
                PyImportError::new_err(format!("numpy has no {dtype} without the package ml_dtypes"));
            missing.set_cause(py, Some(error));
            missing
        })?;
        // Its constructor does not ask the buffer for the type.
        numpy.call_method1("ndarray", (slf.get().shape(py)?, types.getattr(dtype)?, slf))
    }

    /// numpy asks for it where the buffer protocol has no name for the type.
    #[pyo3(signature = (dtype = None, copy = None))]
    fn __array__<'py>(
        slf: &Bound<'py, Self>,
        dtype: Option<Bound<'py, PyAny>>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let array = Self::numpy(slf)?;
        let own = array.getattr("dtype")?;
        let dtype = dtype.unwrap_or_else(|| own.clone());
        if copy == Some(false) && own.ne(&dtype)? {
            return Err(PyValueError::new_err(format!(
                "an array of {own} is one of {dtype} by a copy alone"
            )));
        }
        array.call_method("astype", (dtype,), Some(&[("copy", copy == Some(true))].into_py_dict(slf.py())?))
    }

    /// jax asks for it, because it takes the type for one of numpy's otherwise. `jax.dlpack` copies nothing.
    fn __jax_array__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("jax.numpy")?.call_method1("array", (Self::numpy(slf)?,))
    }

    #[pyo3(signature = (*, stream = None, max_version = None, dl_device = None, copy = None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        if let Some(stream) = stream {
            return Err(PyBufferError::new_err(format!("host memory has no streams, such as {stream}")));
        }
        if let Some(device) = dl_device.filter(|&device| device != self.__dlpack_device__()) {
            return Err(PyBufferError::new_err(format!(
                "the array lies in host memory, not on device {device:?}"
            )));
        }
        let is_versioned = max_version.is_some_and(|(major, _)| major >= 1);
        if copy == Some(true) {
            return copied(py, &self.elements)?.elements.to_capsule(py, is_versioned, true);
        }
        if !is_versioned && !self.elements.is_writable() {
            return Err(PyBufferError::new_err(
                "the array is read-only, which DLPack can say from version 1.0 on: pass copy=True or max_version=(1, 0)",
            ));
        }
        self.elements.to_capsule(py, is_versioned, false)
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        (1, 0)
    }
}

/// Returns the type and the shape that arguments name: `(2, 3)` or `6`, and `"float32"`, `numpy.float32`,
/// `numpy.dtype("float32")` or `torch.float32`.
///
/// # Errors
/// TypeError, ValueError: one of them is none.
pub(crate) fn spec(shape: &Bound<'_, PyAny>, dtype: &Bound<'_, PyAny>) -> PyResult<TensorSpec> {
    let numbers: PyResult<Vec<_>> = match shape.extract::<i64>() {
        Ok(length) => Ok(vec![length]),
        Err(_) => {
            shape.try_iter().and_then(|numbers| numbers.map(|number| number?.extract::<i64>()).collect())
        }
    };
    let numbers = numbers.map_err(|error| {
        if !is_refusal(&error, shape.py()) {
            return error;
        }
        let error = error.value(shape.py()).to_string();
        PyTypeError::new_err(format!(
            "shape: expected a number or a sequence of numbers, not {shape}: {error}"
        ))
    })?;
    let dims = numbers.iter().map(|&length| u64::try_from(length)).collect::<Result<Vec<_>, _>>();
    let dims = dims.map_err(|_| PyValueError::new_err(format!("shape: {shape} has a length below 0")))?;
    let shape = Shape::new(&dims).map_err(to_py)?;
    TensorSpec::new(self::dtype(dtype)?, shape).map_err(to_py)
}

/// Returns whether an error is about what an object is, not about what happened meanwhile.
pub(crate) fn is_refusal(error: &PyErr, py: Python<'_>) -> bool {
    error.is_instance_of::<PyTypeError>(py)
        || error.is_instance_of::<PyValueError>(py)
        || error.is_instance_of::<PyBufferError>(py)
        || error.is_instance_of::<PyOverflowError>(py)
}

/// Returns the type that an argument names.
fn dtype(named: &Bound<'_, PyAny>) -> PyResult<Dtype> {
    let text = |attribute: &str| named.getattr(attribute).ok()?.extract::<String>().ok();
    let name = named.extract::<String>().ok().or_else(|| text("name")).or_else(|| text("__name__"));
    let name =
        name.map_or_else(|| Ok(named.to_string().trim_start_matches("torch.").to_owned()), PyResult::Ok)?;
    let swapped = text("byteorder").is_some_and(|order| order == ">");
    // numpy 1 has `bool_`.
    let found = name.trim_end_matches('_').parse().ok().filter(|dtype: &Dtype| dtype.size().is_some());
    found.filter(|_| !swapped).ok_or_else(|| {
        let named = named.repr().map_or(name, |text| text.to_string());
        PyValueError::new_err(format!(
            "dtype: {named} is none of {}, in the machine's byte order",
            DTYPES.as_str()
        ))
    })
}

/// Allocates memory of the process's arrays, with any content. They may have as much as the machine has; what
/// devices register of it counts against `RDMA_PINNED_LIMIT`.
///
/// # Errors
/// MemoryError: there is none. RuntimeError: this is a fork of a process that used the package.
pub(crate) fn allocate(bytes: usize) -> PyResult<RegisteredBuf> {
    // A fork shares the memory with its parent, and neither knows what the other allocates.
    runtime()?;
    let pool = POOL.get_or_init(|| {
        let system = rustix::system::sysinfo();
        Pool::for_sending(system.totalram.saturating_mul(u64::from(system.mem_unit)))
    });
    pool.allocate(bytes)
        .map_err(|error| PyMemoryError::new_err(format!("{bytes} bytes for an array: {error}")))
}

/// Counts bytes that had to be copied.
pub(crate) fn count_copied(bytes: usize) {
    COPIED.fetch_add(bytes as u64, Ordering::Relaxed);
}

/// Gives memory back to the system, if there is much that no array uses.
pub(crate) fn trim() {
    let Some(pool) = POOL.get() else { return };
    let spare = || {
        let statistics = pool.statistics();
        statistics.registered.saturating_sub(statistics.leased_send)
    };
    let found = spare();
    let between = BETWEEN.fetch_min(found, Ordering::Relaxed);
    if found > between.saturating_add(SPARE) {
        pool.trim();
        BETWEEN.store(spare(), Ordering::Relaxed);
    }
}

/// Copies elements to registered memory, and counts it.
fn copied(py: Python<'_>, elements: &Elements) -> PyResult<Array> {
    let mut buffer = allocate(elements.length())?;
    released_if(py, elements.length(), || elements.copy_to(&mut buffer));
    count_copied(elements.length());
    Array::of_pool(*elements.spec(), buffer)
}

/// Returns a tensor that devices can read from where it lies, of a copy if need be.
///
/// # Errors
/// As [`allocate`].
pub(crate) fn in_registered_memory(py: Python<'_>, elements: &Elements) -> PyResult<Tensor> {
    match elements.registered()? {
        Some(tensor) => Ok(tensor),
        None => copied(py, elements)?.elements.into_tensor(py),
    }
}

/// Runs work on so many bytes, without the interpreter's lock if they are many.
pub(crate) fn released_if<T: Send>(py: Python<'_>, bytes: usize, work: impl FnOnce() -> T + Send) -> T {
    if bytes < LARGE { work() } else { py.detach(work) }
}

#[pyfunction]
pub(crate) fn empty(shape: &Bound<'_, PyAny>, dtype: &Bound<'_, PyAny>) -> PyResult<Array> {
    let spec = spec(shape, dtype)?;
    Array::of_pool(spec, allocate(spec.bytes().unwrap_or(0) as usize)?)
}

#[pyfunction]
pub(crate) fn zeros(shape: &Bound<'_, PyAny>, dtype: &Bound<'_, PyAny>) -> PyResult<Array> {
    let spec = spec(shape, dtype)?;
    let mut buffer = allocate(spec.bytes().unwrap_or(0) as usize)?;
    let length = buffer.len();
    released_if(shape.py(), length, || buffer.fill(0));
    Array::of_pool(spec, buffer)
}

#[pyfunction]
pub(crate) fn asarray(object: &Bound<'_, PyAny>) -> PyResult<Py<Array>> {
    let py = object.py();
    if let Ok(array) = object.cast::<Array>()
        && array.get().registered
    {
        return Ok(array.clone().unbind());
    }
    let elements = Elements::of(object)?;
    let array = match elements.without_object()? {
        Some(elements) => Array::new(elements, true),
        None => copied(py, &elements)?,
    };
    Py::new(py, array)
}

/// Returns the arrays in the pool, their bytes, the bytes that the pool has of the system, and the bytes
/// copied.
#[pyfunction]
pub(crate) fn memory_statistics() -> (usize, u64, u64, u64) {
    let copied = COPIED.load(Ordering::Relaxed);
    let Some(pool) = POOL.get() else { return (0, 0, 0, copied) };
    let pool = pool.statistics();
    (pool.frozen, pool.leased_send, pool.registered, copied)
}
