//! Python's memory: the one file of this member with unsafe code.

#![allow(unsafe_code, reason = "memory of the interpreter and of other libraries is known by its address")]

use std::ffi::{CStr, c_int, c_void};
use std::ptr::NonNull;
use std::sync::Arc;

use bytes::Bytes;
use pyo3::exceptions::{PyBufferError, PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyBytes, PyCapsule, PyMemoryView};
use tonic_rdma_tensor::{Dtype, Shape, Strides, Tensor, TensorMut, TensorSpec};
use tonic_rdma_verbs::memory::RegisteredBuf;
use tonic_rdma_verbs::memory::dlpack::{DlDataType, DlDevice, DlManagedTensor, DlTensor};
use tonic_rdma_verbs::unstable::{RegionMapping, find_sendable};

use crate::array::{self, Array};
use crate::error::to_py;
use crate::runtime::{runtime, unless_forked};

/// Makes a `bytes` object of `length` bytes, which `chunks` have, and copies them without the interpreter's
/// lock.
///
/// # Errors
/// There is no memory for it.
pub(crate) fn bytes_of<'py>(
    py: Python<'py>,
    chunks: &[Bytes],
    length: usize,
) -> PyResult<Bound<'py, PyBytes>> {
    assert_eq!(chunks.iter().map(Bytes::len).sum::<usize>(), length, "the chunks fill the object");
    // SAFETY: a null pointer asks for an object whose content is not initialised. The object is new, so
    // nothing else has it until this function returns it: Python permits its owner to write its content until
    // then, with or without the lock.
    unsafe {
        let object = ffi::PyBytes_FromStringAndSize(std::ptr::null(), length as ffi::Py_ssize_t);
        let object: Bound<'py, PyBytes> = Bound::from_owned_ptr_or_err(py, object)?.cast_into_unchecked();
        let start = ffi::PyBytes_AsString(object.as_ptr()) as usize;
        py.detach(|| {
            let mut at = start;
            for chunk in chunks {
                std::ptr::copy_nonoverlapping(chunk.as_ptr(), at as *mut u8, chunk.len());
                at += chunk.len();
            }
        });
        Ok(object)
    }
}

/// Kinds of memory that the processor can read, by DLPack: its own, and what CUDA or ROCm has pinned.
const HOST: [i32; 3] = [1, 3, 11];
/// The version of DLPack that this file knows.
const VERSION: [u32; 2] = [1, 0];
const UNVERSIONED: &CStr = c"dltensor";
const VERSIONED: &CStr = c"dltensor_versioned";
/// Flags of a tensor with a version.
const READ_ONLY: u64 = 1;
const COPIED: u64 = 2;

/// `DLManagedTensorVersioned`.
#[repr(C)]
struct DlManagedTensorVersioned {
    version: [u32; 2],
    manager_ctx: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
    flags: u64,
    dl_tensor: DlTensor,
}

/// A tensor of another library, which goes back to it when this is dropped. Libraries may take the
/// interpreter's lock for that, so a capsule has this.
enum Consumed {
    Unversioned(*mut DlManagedTensor),
    Versioned(*mut DlManagedTensorVersioned),
}

// SAFETY: the pointer is used with the interpreter's lock alone, which DLPack asks for in Python.
unsafe impl Send for Consumed {}

impl Drop for Consumed {
    fn drop(&mut self) {
        // SAFETY: the tensor is valid until its deleter is called, and only this calls it.
        unsafe {
            match *self {
                Self::Unversioned(tensor) => (*tensor).deleter.map(|delete| delete(tensor)),
                Self::Versioned(tensor) => (*tensor).deleter.map(|delete| delete(tensor)),
            };
        }
    }
}

/// Where elements lie in memory of this process, how, and what keeps them there: an [`Array`], an object with
/// the buffer protocol, or one with `__dlpack__`. Clones share them.
///
/// Who gives memory to an operation neither writes to it nor resizes it until the operation has ended.
/// Otherwise its content is torn.
#[derive(Clone, Debug)]
pub(crate) struct Elements {
    spec: TensorSpec,
    /// Bytes from element to element along each dimension; as in row-major order for dimensions of at most one element.
    steps: Vec<isize>,
    /// Whether the steps are row-major.
    contiguous: bool,
    first: *mut u8,
    writable: bool,
    owner: Owner,
}

// SAFETY: the pointer is to memory that the owner keeps, and any thread may use and drop that. Shared
// references only read. That nothing writes meanwhile is the contract with the user, above.
unsafe impl Send for Elements {}
// SAFETY: as for `Send`.
unsafe impl Sync for Elements {}

/// What keeps elements where they are.
#[derive(Clone, Debug)]
enum Owner {
    /// A memoryview, or a capsule with another library's tensor. A thread without the interpreter's lock leaves
    /// the last reference to the next thread that has the lock.
    Object {
        _kept: Arc<Py<PyAny>>,
    },
    Tensor(Arc<Kept>),
}

/// A tensor, which a fork of the process does not free.
#[derive(Debug)]
struct Kept(Option<Tensor>);

impl Drop for Kept {
    fn drop(&mut self) {
        if let Some(tensor) = unless_forked(self.0.take()) {
            drop(tensor);
            array::trim();
        }
    }
}

impl Elements {
    /// Finds the elements of an object in host memory.
    ///
    /// # Errors
    /// TypeError, BufferError: the object has no elements, or elements of a type or in a place that can't be
    /// used. ValueError: too many dimensions. And what the object's own methods raise.
    pub(crate) fn of(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        if let Ok(array) = object.cast::<Array>() {
            return Ok(array.get().elements().clone());
        }
        if object.is_instance_of::<PyCapsule>() {
            return Self::of_capsule(object, true);
        }
        // SAFETY: it is an object.
        let has_buffer = unsafe { ffi::PyObject_CheckBuffer(object.as_ptr()) } == 1;
        let refused = match has_buffer.then(|| PyMemoryView::from(object)) {
            Some(Ok(view)) => return Self::of_view(object, &view, None),
            Some(Err(error)) => Some(error),
            None => None,
        };
        if let Some(device) = object.getattr_opt("__dlpack_device__")? {
            match (Self::of_dlpack(object, &device), &refused) {
                // numpy passes on no type of ml_dtypes: see below.
                (Err(error), Some(_)) if array::is_refusal(&error, object.py()) => {}
                (found, _) => return found,
            }
        }
        let Some(refused) = refused else {
            return Err(PyTypeError::new_err(format!(
                "expected a tonic_rdma.Array, an object with the buffer protocol (numpy's arrays, bytes, array.array) or \
                 one with __dlpack__ (tensors of torch, arrays of jax), not {}",
                type_name(object)
            )));
        };
        let named = object.getattr_opt("dtype")?.and_then(|dtype| dtype.str().ok()?.extract::<String>().ok());
        let dtype = named.as_deref().and_then(|name| name.parse::<Dtype>().ok());
        if let Some(dtype) = dtype.filter(|&dtype| format_of(dtype).is_none()) {
            let integers = if dtype.size() == Some(1) { "uint8" } else { "uint16" };
            let integers = PyMemoryView::from(&object.call_method1("view", (integers,))?)?;
            return Self::of_view(object, &integers, Some(dtype));
        }
        let error =
            unknown(object, &named.map_or_else(|| refused.to_string(), |name| format!("dtype {name}")));
        error.set_cause(object.py(), Some(refused));
        Err(error)
    }

    /// Finds the elements of a view of `object`. They have `dtype`, if the buffer protocol has no name for it.
    fn of_view(
        object: &Bound<'_, PyAny>,
        view: &Bound<'_, PyMemoryView>,
        dtype: Option<Dtype>,
    ) -> PyResult<Self> {
        let mut buffer = ffi::Py_buffer::new();
        // SAFETY: the view is an object, and the structure may be filled.
        if unsafe { ffi::PyObject_GetBuffer(view.as_ptr(), &raw mut buffer, ffi::PyBUF_FULL_RO) } != 0 {
            return Err(PyErr::fetch(view.py()));
        }
        let rank = usize::try_from(buffer.ndim).unwrap_or(0);
        // SAFETY: the structure is filled. Until the release, shape, strides and suboffsets are null or have
        // `ndim` numbers, and the format is null or a string. After it the view keeps the memory by a buffer of
        // its own, because nothing else has the view.
        let (shape, steps, behind, format) = unsafe {
            let behind = numbers(buffer.suboffsets, rank).iter().any(|&offset| offset >= 0);
            let format = if buffer.format.is_null() { c"B" } else { CStr::from_ptr(buffer.format) };
            let format = format.to_string_lossy().into_owned();
            let found = (numbers(buffer.shape, rank), numbers(buffer.strides, rank), behind, format);
            ffi::PyBuffer_Release(&raw mut buffer);
            found
        };
        let dtype = match dtype {
            // What the object says of its elements may be wrong.
            Some(dtype) => Some(dtype).filter(|it| it.size() == usize::try_from(buffer.itemsize).ok()),
            None => dtype_of(&format, buffer.itemsize),
        };
        let dtype = dtype.filter(|_| !behind);
        let dtype = dtype.ok_or_else(|| match object.getattr("dtype").and_then(|dtype| dtype.str()) {
            Ok(dtype) => unknown(object, &format!("dtype {dtype}")),
            Err(_) if behind => unknown(object, "elements behind pointers"),
            Err(_) => unknown(object, &format!("format {format:?}")),
        })?;
        let owner = Owner::Object { _kept: Arc::new(view.clone().into_any().unbind()) };
        Self::new(dtype, &shape, steps, buffer.buf.cast(), buffer.readonly == 0, owner)
    }

    /// Finds the elements of an object with `__dlpack__`.
    fn of_dlpack(object: &Bound<'_, PyAny>, device: &Bound<'_, PyAny>) -> PyResult<Self> {
        if !device.is_callable() {
            let object = type_name(object);
            return Err(PyTypeError::new_err(format!("__dlpack_device__ of {object} is no method")));
        }
        let (kind, _) = device.call0()?.extract::<(i32, i32)>()?;
        check_host(kind)?;
        let arguments = [("max_version", (VERSION[0], VERSION[1]))].into_py_dict(object.py())?;
        match object.call_method("__dlpack__", (), Some(&arguments)) {
            // The protocol's first version has no versions.
            Err(error) if error.is_instance_of::<PyTypeError>(object.py()) => {
                Self::of_capsule(&object.call_method0("__dlpack__")?, true)
            }
            // Who knows versions and gives none, such as jax, can't say that its elements never change.
            capsule => Self::of_capsule(&capsule?, false),
        }
    }

    /// Takes another library's tensor out of its capsule. `writable` is what a capsule without a version means.
    fn of_capsule(capsule: &Bound<'_, PyAny>, writable: bool) -> PyResult<Self> {
        let take = |name: &'static CStr, used: &'static CStr| {
            // SAFETY: it is an object, and the names live for ever. By DLPack a capsule of such a name has a
            // tensor, which belongs to the one who changes the name.
            unsafe {
                let tensor = ffi::PyCapsule_IsValid(capsule.as_ptr(), name.as_ptr()) == 1;
                let tensor = tensor.then(|| ffi::PyCapsule_GetPointer(capsule.as_ptr(), name.as_ptr()))?;
                (ffi::PyCapsule_SetName(capsule.as_ptr(), used.as_ptr()) == 0).then_some(tensor)
            }
        };
        let consumed = take(VERSIONED, c"used_dltensor_versioned")
            .map(|tensor| Consumed::Versioned(tensor.cast()))
            .or_else(|| {
                take(UNVERSIONED, c"used_dltensor").map(|tensor| Consumed::Unversioned(tensor.cast()))
            });
        let consumed = consumed.ok_or_else(|| {
            let expected =
                "a capsule of DLPack that nothing has used, \"dltensor\" or \"dltensor_versioned\"";
            PyTypeError::new_err(format!("expected {expected}, not {capsule}"))
        })?;
        // SAFETY: the tensor is valid until `consumed` is dropped. The place of the version never changes, and
        // that of the others only with the first number of it.
        let (tensor, writable) = unsafe {
            match consumed {
                Consumed::Unversioned(tensor) => (&(*tensor).dl_tensor, writable),
                Consumed::Versioned(tensor) if (*tensor).version[0] == VERSION[0] => {
                    (&(*tensor).dl_tensor, (*tensor).flags & READ_ONLY == 0)
                }
                Consumed::Versioned(tensor) => {
                    let [major, minor] = (*tensor).version;
                    return Err(PyBufferError::new_err(format!("a tensor of DLPack {major}.{minor}")));
                }
            }
        };
        check_host(tensor.device.device_type)?;
        let DlDataType { code, bits, lanes } = tensor.dtype;
        let dtype = Dtype::all().find(|&dtype| dl_type(dtype) == Some(tensor.dtype));
        let dtype =
            dtype.ok_or_else(|| unknown(capsule, &format!("code {code}, {bits} bits, {lanes} lanes")))?;
        let rank = usize::try_from(tensor.ndim).ok().filter(|&rank| rank <= ffi::PyBUF_MAX_NDIM);
        let rank = rank.ok_or_else(|| PyValueError::new_err(format!("{} dimensions", tensor.ndim)))?;
        let size = dtype.size().unwrap_or(1) as isize;
        // SAFETY: the shape has `ndim` numbers, and so have the strides unless they are null.
        let (shape, strides) = unsafe { (numbers(tensor.shape, rank), numbers(tensor.strides, rank)) };
        // An isize has the numbers of an i64 here.
        let shape: Vec<_> = shape.into_iter().map(|length| length as isize).collect();
        let steps = strides.into_iter().map(|step| (step as isize).saturating_mul(size)).collect();
        let first = tensor.data.cast::<u8>().wrapping_add(tensor.byte_offset as usize);
        let owner = PyCapsule::new_with_value(capsule.py(), consumed, c"tonic_rdma.tensor")?;
        Self::new(
            dtype,
            &shape,
            steps,
            first,
            writable,
            Owner::Object { _kept: Arc::new(owner.into_any().unbind()) },
        )
    }

    /// Returns the elements of a buffer of a pool, which Python may write.
    pub(crate) fn of_buffer(spec: TensorSpec, mut buffer: RegisteredBuf) -> PyResult<Self> {
        let first = buffer.as_mut_ptr();
        Self::of_tensor(&Tensor::from_buffer(spec, buffer).map_err(to_py)?, first, true)
    }

    /// Returns the elements at the beginning of a region's memory, which Python may write. `keep` is dropped
    /// with the last of them.
    pub(crate) fn of_mapping(
        spec: TensorSpec,
        mapping: RegionMapping,
        keep: impl Send + Sync + 'static,
    ) -> PyResult<Self> {
        struct Mapped<T>(RegionMapping, T);
        impl<T> AsRef<[u8]> for Mapped<T> {
            fn as_ref(&self) -> &[u8] {
                // SAFETY: the mapping keeps this memory, which the kernel has initialised. That nothing writes
                // to it during an operation is the contract with the user.
                unsafe { std::slice::from_raw_parts(self.0.as_ptr(), self.0.len()) }
            }
        }
        let (first, length) = (mapping.as_ptr(), mapping.len());
        let needed = spec.bytes().map_or(length, |bytes| length.min(bytes as usize));
        let bytes = Bytes::from_owner(Mapped(mapping, keep)).slice(..needed);
        Self::of_tensor(&Tensor::from_bytes(spec, bytes).map_err(to_py)?, first, true)
    }

    /// Returns the elements of a tensor that has arrived.
    pub(crate) fn of_arrived(tensor: &Tensor) -> PyResult<Self> {
        let tensor = tensor.to_contiguous().map_err(to_py)?;
        let first = tensor.bytes().map_err(to_py)?.as_ptr().cast_mut();
        Self::of_tensor(&tensor, first, false)
    }

    fn of_tensor(tensor: &Tensor, first: *mut u8, writable: bool) -> PyResult<Self> {
        let shape: Vec<_> = tensor.shape().dims().iter().map(|&length| length as isize).collect();
        let owner = Owner::Tensor(Arc::new(Kept(Some(tensor.clone()))));
        Self::new(tensor.dtype(), &shape, Vec::new(), first, writable, owner)
    }

    /// Without steps the elements are row-major.
    fn new(
        dtype: Dtype,
        shape: &[isize],
        mut steps: Vec<isize>,
        first: *mut u8,
        writable: bool,
        owner: Owner,
    ) -> PyResult<Self> {
        let dims = shape.iter().map(|&length| u64::try_from(length)).collect::<Result<Vec<_>, _>>();
        let dims =
            dims.map_err(|_| PyValueError::new_err(format!("the shape {shape:?} has a length below 0")))?;
        let spec = TensorSpec::new(dtype, Shape::new(&dims).map_err(to_py)?).map_err(to_py)?;
        let row_major = row_major(&spec);
        if steps.is_empty() || dims.contains(&0) {
            steps.clone_from(&row_major);
        }
        for ((step, length), &usual) in steps.iter_mut().zip(dims).zip(&row_major) {
            *step = if length == 1 { usual } else { *step };
        }
        let contiguous = steps == row_major;
        let first = if spec.bytes() == Some(0) { NonNull::<u128>::dangling().as_ptr().cast() } else { first };
        match first.is_null() {
            true => Err(PyBufferError::new_err(format!("{spec} at address 0"))),
            false => Ok(Self { spec, steps, contiguous, first, writable, owner }),
        }
    }

    pub(crate) fn spec(&self) -> &TensorSpec {
        &self.spec
    }

    /// Returns the number of bytes of all elements.
    pub(crate) fn length(&self) -> usize {
        self.spec.bytes().unwrap_or(0) as usize
    }

    /// Returns whether the elements lie one after the other, row-major.
    pub(crate) fn is_contiguous(&self) -> bool {
        self.contiguous
    }

    pub(crate) fn is_writable(&self) -> bool {
        self.writable
    }

    /// Returns the bytes of the elements.
    ///
    /// # Panics
    /// If they are not contiguous.
    pub(crate) fn bytes(&self) -> &[u8] {
        assert!(self.is_contiguous(), "the caller has checked it");
        // SAFETY: the owner keeps so many bytes from the first element on. Nothing writes meanwhile, by the
        // contract.
        unsafe { std::slice::from_raw_parts(self.first, self.length()) }
    }

    /// Returns the bytes of the elements, to write to.
    ///
    /// # Errors
    /// ValueError: they can't be written, or are not contiguous.
    pub(crate) fn writable(&mut self) -> PyResult<&mut [u8]> {
        if !self.writable {
            return Err(PyValueError::new_err(format!(
                "the {} can't be written: it is read-only",
                self.spec
            )));
        }
        self.check_contiguous()?;
        // SAFETY: as in `bytes`. Nothing else reads or writes meanwhile, by the contract.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.first, self.length()) })
    }

    /// # Errors
    /// ValueError: the elements are not contiguous.
    pub(crate) fn check_contiguous(&self) -> PyResult<()> {
        match self.is_contiguous() {
            true => Ok(()),
            false => Err(PyValueError::new_err(format!(
                "the {} does not lie in one piece, row-major: make it contiguous first, such as by numpy.ascontiguousarray \
                 or torch's contiguous()",
                self.spec
            ))),
        }
    }

    /// Copies the elements to `destination`, row-major, however they lie.
    ///
    /// # Panics
    /// If they don't fill it.
    pub(crate) fn copy_to(&self, destination: &mut [u8]) {
        assert_eq!(destination.len(), self.length(), "the elements fill it");
        // Without elements the lengths may be any, and their product may overflow.
        if destination.is_empty() {
            return;
        }
        let (mut size, mut rank) = (self.spec.dtype().size().unwrap_or(1), self.steps.len());
        let dims = self.spec.shape().dims();
        // The innermost dimensions whose elements lie one after the other are copied at once.
        while rank > 0 && self.steps[rank - 1] == size as isize {
            rank -= 1;
            size *= dims[rank] as usize;
        }
        // SAFETY: the owner keeps all elements, and the destination has room for them.
        unsafe { pack(self.first, &dims[..rank], &self.steps[..rank], size, destination) };
    }

    /// Returns a tensor in the same memory: registered, if the memory is. Elements that go backwards, or lie at
    /// addresses that are no multiples of what their type needs, are copied, which is counted.
    ///
    /// # Errors
    /// MemoryError: there is no memory for a copy.
    pub(crate) fn into_tensor(self, py: Python<'_>) -> PyResult<Tensor> {
        let elements = match self.in_place()? {
            Ok(tensor) => return Ok(tensor),
            Err(elements) => elements,
        };
        let mut copy = TensorMut::zeroed(elements.spec).map_err(to_py)?;
        array::released_if(py, elements.length(), || elements.copy_to(copy.bytes_mut()));
        array::count_copied(elements.length());
        Ok(copy.freeze())
    }

    /// Returns a tensor in the same memory, or the elements if none can have them as they lie.
    fn in_place(self) -> PyResult<Result<Tensor, Self>> {
        if let Owner::Tensor(kept) = &self.owner
            && let Some(tensor) = &kept.0
        {
            return Ok(Ok(tensor.clone()));
        }
        // In a fork, a lock of the registered memory may never be free.
        runtime()?;
        let (spec, size) = (self.spec, self.spec.dtype().size().unwrap_or(1) as isize);
        let strides: Option<Vec<u64>> =
            self.steps.iter().map(|step| u64::try_from(step / size).ok()).collect();
        let strides = strides.and_then(|steps| Strides::new(&steps));
        let uneven = self.steps.iter().any(|step| step % size != 0)
            || !self.first.addr().is_multiple_of(spec.dtype().align());
        let Some(strides) = strides.filter(|_| !uneven) else { return Ok(Err(self)) };
        let bytes = Span(self, strides.extent(spec.shape()).unwrap_or(0) as usize * size as usize);
        let bytes = match find_sendable(bytes.as_ref()) {
            Some(lease) => lease.into_bytes(),
            None => Bytes::from_owner(bytes),
        };
        Tensor::from_strided(spec, strides, bytes).map(Ok).map_err(to_py)
    }

    /// Returns the tensor of elements that lie in one piece in registered memory.
    pub(crate) fn registered(&self) -> PyResult<Option<Tensor>> {
        let tensor = self.clone().in_place()?.ok();
        Ok(tensor.filter(|tensor| tensor.is_contiguous() && tensor.registered().is_some()))
    }

    /// Returns the same elements without their object, if they lie in one piece in registered memory.
    pub(crate) fn without_object(&self) -> PyResult<Option<Self>> {
        let tensor = self.registered()?;
        tensor.map(|tensor| Self::of_tensor(&tensor, self.first, self.writable)).transpose()
    }

    /// Passes the elements on as a capsule of DLPack, which keeps them without the interpreter. The elements
    /// come from [`of_buffer`](Self::of_buffer), [`of_mapping`](Self::of_mapping) or
    /// [`of_arrived`](Self::of_arrived), and can be written if the capsule has no version.
    pub(crate) fn to_capsule<'py>(
        &self,
        py: Python<'py>,
        is_versioned: bool,
        is_copied: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        let dtype =
            dl_type(self.spec.dtype()).ok_or_else(|| PyBufferError::new_err("a type of no fixed size"))?;
        let strides = Strides::row_major(self.spec.shape());
        let mut context = Context {
            shape: self.spec.shape().dims().iter().map(|&length| length as i64).collect(),
            strides: strides.steps().iter().map(|&step| step as i64).collect(),
            _elements: self.clone(),
        };
        let dl_tensor = DlTensor {
            data: self.first.cast(),
            device: DlDevice::CPU,
            ndim: context.shape.len() as i32,
            dtype,
            shape: context.shape.as_mut_ptr(),
            strides: context.strides.as_mut_ptr(),
            byte_offset: 0,
        };
        let manager_ctx = std::ptr::null_mut();
        let (tensor, name) = if is_versioned {
            let (version, deleter) = (VERSION, Some(delete as unsafe extern "C" fn(_)));
            let flags = if self.writable { 0 } else { READ_ONLY } | if is_copied { COPIED } else { 0 };
            let tensor = DlManagedTensorVersioned { version, manager_ctx, deleter, flags, dl_tensor };
            (Passed::pass(tensor, context), VERSIONED)
        } else {
            let tensor = DlManagedTensor { dl_tensor, manager_ctx, deleter: Some(delete) };
            (Passed::pass(tensor, context), UNVERSIONED)
        };
        // SAFETY: the pointer is not null, the name lives for ever, and `drop_capsule` frees what nothing
        // takes.
        let capsule = unsafe { ffi::PyCapsule_New(tensor, name.as_ptr(), Some(drop_capsule)) };
        // SAFETY: it is null or a new object.
        unsafe { Bound::from_owned_ptr_or_err(py, capsule) }
    }
}

/// Elements of an object of Python, and the bytes from the first to the end of the last.
struct Span(Elements, usize);

impl AsRef<[u8]> for Span {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: no step goes backwards, so the bytes lie in the object's memory, which the owner keeps.
        // Nothing writes meanwhile, by the contract.
        unsafe { std::slice::from_raw_parts(self.0.first, self.1) }
    }
}

/// What a tensor that was passed on points to.
struct Context {
    shape: Vec<i64>,
    strides: Vec<i64>,
    _elements: Elements,
}

/// A tensor that was passed on, with or without a version. It comes first.
#[repr(C)]
struct Passed<T> {
    tensor: T,
    _context: Context,
}

impl<T> Passed<T> {
    fn pass(tensor: T, context: Context) -> *mut c_void {
        Box::into_raw(Box::new(Self { tensor, _context: context })).cast()
    }
}

/// The deleter of [`Elements::to_capsule`].
///
/// # Safety
/// The tensor is such a one, and is not deleted yet.
unsafe extern "C" fn delete<T>(tensor: *mut T) {
    // SAFETY: it was made as a box, and the caller deletes it once.
    unsafe { drop(Box::from_raw(tensor.cast::<Passed<T>>())) }
}

/// Frees the tensor of a capsule that nothing has taken: who takes it changes the name.
///
/// # Safety
/// It is a capsule of [`Elements::to_capsule`].
unsafe extern "C" fn drop_capsule(capsule: *mut ffi::PyObject) {
    // SAFETY: with this name the tensor is still the capsule's.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, VERSIONED.as_ptr()) == 1 {
            delete::<DlManagedTensorVersioned>(ffi::PyCapsule_GetPointer(capsule, VERSIONED.as_ptr()).cast());
        } else if ffi::PyCapsule_IsValid(capsule, UNVERSIONED.as_ptr()) == 1 {
            delete::<DlManagedTensor>(ffi::PyCapsule_GetPointer(capsule, UNVERSIONED.as_ptr()).cast());
        }
    }
}

#[pymethods]
impl Array {
    /// # Safety
    /// The interpreter calls it with a structure to fill.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let (elements, shape) = (slf.get().elements(), slf.get().shape_numbers());
        let refuse = |why: &str| Err(PyBufferError::new_err(format!("the {} {why}", elements.spec)));
        let format = format_of(elements.spec.dtype());
        // SAFETY: it is null or the caller's structure. An error leaves no object in it.
        let Some(view) = (unsafe { view.as_mut() }) else { return refuse("has no place for a buffer") };
        view.obj = std::ptr::null_mut();
        if flags & ffi::PyBUF_WRITABLE != 0 && !elements.writable {
            return refuse("is read-only");
        }
        if flags & ffi::PyBUF_FORMAT != 0 && format.is_none() {
            return refuse("has elements that the buffer protocol can't name: use numpy() or DLPack");
        }
        // What is row-major is column-major as well if at most one dimension has a step that is used.
        let is_column_major =
            elements.length() == 0 || shape.iter().filter(|&&length| length != 1).count() < 2;
        if flags & ffi::PyBUF_F_CONTIGUOUS == ffi::PyBUF_F_CONTIGUOUS && !is_column_major {
            return refuse("is row-major");
        }
        // Without dimensions there are no numbers, which the protocol wants as null.
        let asked = |flag, numbers: &[isize]| match flags & flag == flag && !numbers.is_empty() {
            true => numbers.as_ptr().cast_mut(),
            false => std::ptr::null_mut(),
        };
        view.buf = elements.first.cast();
        view.len = elements.length() as isize;
        view.itemsize = elements.spec.dtype().size().unwrap_or(1) as isize;
        view.readonly = c_int::from(!elements.writable);
        // Without a shape they are bytes one after the other, as memoryview has it.
        view.ndim = if flags & ffi::PyBUF_ND == 0 { 1 } else { shape.len() as c_int };
        // Nothing writes to the strings and numbers of a buffer.
        let named = format.filter(|_| flags & ffi::PyBUF_FORMAT != 0);
        view.format = named.map_or(std::ptr::null_mut(), |format| format.as_ptr().cast_mut());
        view.shape = asked(ffi::PyBUF_ND, shape);
        view.strides = asked(ffi::PyBUF_STRIDES, &elements.steps);
        view.suboffsets = std::ptr::null_mut();
        view.internal = std::ptr::null_mut();
        // Pointers above are to memory of this object, which never changes and lives as long as this reference.
        view.obj = slf.into_ptr();
        Ok(())
    }
}

/// Copies elements of `size` bytes to `destination`, row-major.
///
/// # Safety
/// All elements of this shape, with these steps between them, can be read, and fill the destination.
unsafe fn pack(first: *const u8, shape: &[u64], steps: &[isize], size: usize, destination: &mut [u8]) {
    let (Some((&length, shape)), Some((&step, steps))) = (shape.split_first(), steps.split_first()) else {
        // SAFETY: it is one element, and the destination has room for one.
        return unsafe { std::ptr::copy_nonoverlapping(first, destination.as_mut_ptr(), size) };
    };
    let rows = destination.chunks_exact_mut((destination.len() / length.max(1) as usize).max(1));
    for (row, destination) in rows.enumerate() {
        // SAFETY: the row is one of the elements' rows.
        unsafe { pack(first.wrapping_offset(row as isize * step), shape, steps, size, destination) };
    }
}

/// Returns the `count` numbers at `start`, or none if it is null.
///
/// # Safety
/// `start` is null, or has so many numbers.
unsafe fn numbers<T: Copy>(start: *const T, count: usize) -> Vec<T> {
    match start.is_null() || count == 0 {
        true => Vec::new(),
        // SAFETY: as the caller promises.
        false => unsafe { std::slice::from_raw_parts(start, count) }.to_vec(),
    }
}

/// Returns the steps of elements that lie one after the other, in bytes.
fn row_major(spec: &TensorSpec) -> Vec<isize> {
    let size = spec.dtype().size().unwrap_or(1) as isize;
    // Without elements the lengths may be any, and nothing uses the steps.
    Strides::row_major(spec.shape()).steps().iter().map(|&step| (step as isize).wrapping_mul(size)).collect()
}

/// Returns DLPack's name of a type; `None` for strings.
fn dl_type(dtype: Dtype) -> Option<DlDataType> {
    use Dtype as D;
    let code = match dtype {
        D::I8 | D::I16 | D::I32 | D::I64 => 0,
        D::U8 | D::U16 | D::U32 | D::U64 => 1,
        D::F16 | D::F32 | D::F64 => 2,
        D::Bf16 => 4,
        D::Complex64 | D::Complex128 => 5,
        D::Bool => 6,
        D::F8E4M3 => 10,
        D::F8E5M2 => 12,
        _ => return None,
    };
    Some(DlDataType { code, bits: dtype.size()? as u8 * 8, lanes: 1 })
}

/// Returns the buffer protocol's name of a type, if it has one.
fn format_of(dtype: Dtype) -> Option<&'static CStr> {
    Some(match dtype {
        Dtype::F16 => c"e",
        Dtype::F32 => c"f",
        Dtype::F64 => c"d",
        Dtype::I8 => c"b",
        Dtype::I16 => c"h",
        Dtype::I32 => c"i",
        Dtype::I64 => c"l",
        Dtype::U8 => c"B",
        Dtype::U16 => c"H",
        Dtype::U32 => c"I",
        Dtype::U64 => c"L",
        Dtype::Bool => c"?",
        Dtype::Complex64 => c"Zf",
        Dtype::Complex128 => c"Zd",
        _ => return None,
    })
}

/// Returns the type of elements of `size` bytes that have this format in the buffer protocol.
fn dtype_of(format: &str, size: isize) -> Option<Dtype> {
    let format = match format.strip_prefix(['>', '!']) {
        Some(_) if size > 1 => return None,
        Some(format) => format,
        None => format.strip_prefix(['@', '=', '<']).unwrap_or(format),
    };
    let code = match format {
        "b" | "h" | "i" | "l" | "q" | "n" => 0,
        "B" | "H" | "I" | "L" | "Q" | "N" | "c" => 1,
        "e" | "f" | "d" => 2,
        "Zf" | "Zd" => 5,
        "?" => 6,
        _ => return None,
    };
    let found = DlDataType { code, bits: u8::try_from(size.checked_mul(8)?).ok()?, lanes: 1 };
    Dtype::all().find(|&dtype| dl_type(dtype) == Some(found))
}

/// # Errors
/// Memory of this kind of DLPack's can't be read.
fn check_host(kind: i32) -> PyResult<()> {
    match HOST.contains(&kind) {
        true => Ok(()),
        false => Err(PyBufferError::new_err(format!(
            "expected elements in host memory, not on a device of DLPack's type {kind}: copy them to the host first"
        ))),
    }
}

/// Returns the error of elements that tensors don't have.
fn unknown(object: &Bound<'_, PyAny>, what: &str) -> PyErr {
    PyTypeError::new_err(format!(
        "{} with {what}; elements can be {}",
        type_name(object),
        array::DTYPES.as_str()
    ))
}

fn type_name(object: &Bound<'_, PyAny>) -> String {
    object.get_type().fully_qualified_name().map_or_else(|_| "an object".to_owned(), |name| name.to_string())
}
