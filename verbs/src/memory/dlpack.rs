//! DLPack: exchange of tensors between the libraries of one process, without a copy
//! (<https://dmlc.github.io/dlpack>, version 0.8).
//!
//! ```text
//!  import:  DlManagedTensor ── Imported::from_raw ──▶ Imported: &[u8] + Layout    dropping it calls the other library's deleter
//!  export:  Bytes + Layout ─── Exported::new ───────▶ Exported ── into_raw ──▶ DlManagedTensor, with a deleter of this crate
//! ```
//!
//! This module does not read elements, and does not know the use of a tensor.

use crate::{VerbsError, VerbsErrorKind};
use std::borrow::Cow;
use std::ffi::c_void;
use std::fmt;
use std::ptr::NonNull;

use bytes::Bytes;

/// `DLManagedTensor`: a tensor, and the function that returns it to its owner.
#[repr(C)]
#[derive(Debug)]
pub struct DlManagedTensor {
    /// The tensor.
    pub dl_tensor: DlTensor,
    /// Data of the owner.
    pub manager_ctx: *mut c_void,
    /// Function that the consumer calls once, with this structure, when it does not need the tensor any more.
    pub deleter: Option<unsafe extern "C" fn(*mut Self)>,
}

/// `DLTensor`.
#[repr(C)]
#[derive(Debug)]
pub struct DlTensor {
    /// Start of the memory. The first element lies `byte_offset` bytes after the start.
    pub data: *mut c_void,
    /// Kind of the memory.
    pub device: DlDevice,
    /// Number of dimensions.
    pub ndim: i32,
    /// Type of the elements.
    pub dtype: DlDataType,
    /// Lengths of the dimensions.
    pub shape: *mut i64,
    /// Steps of the dimensions in elements, or null if the tensor is row-major without gaps.
    pub strides: *mut i64,
    /// Offset of the first element in bytes.
    pub byte_offset: u64,
}

/// `DLDevice`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DlDevice {
    /// Kind of the device: 1 for the processor.
    pub device_type: i32,
    /// Number of the device.
    pub device_id: i32,
}

impl DlDevice {
    /// Memory of the processor.
    pub const CPU: Self = Self { device_type: 1, device_id: 0 };
    /// Kinds of memory that the processor can read: host memory, and host memory that CUDA or ROCm has
    /// pinned.
    pub(crate) const HOST: [i32; 3] = [1, 3, 11];
}

/// `DLDataType`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DlDataType {
    /// Kind of the values: integer, floating point and so on.
    pub code: u8,
    /// Bits of a value.
    pub bits: u8,
    /// Number of values in an element.
    pub lanes: u16,
}

impl DlDataType {
    /// Returns the size of an element in bytes, or `None` if the size is 0 or not a whole number of bytes.
    pub(crate) fn size(self) -> Option<usize> {
        let bits = usize::from(self.bits) * usize::from(self.lanes);
        (bits != 0 && bits.is_multiple_of(8)).then_some(bits / 8)
    }
}

/// The layout of elements in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Type of the elements.
    pub dtype: DlDataType,
    /// Length of each dimension.
    pub shape: Vec<u64>,
    /// Step along each dimension, in elements.
    pub strides: Vec<u64>,
}

impl Layout {
    /// Returns the bytes from the first element to the end of the last.
    pub(crate) fn bytes(&self) -> Result<usize, VerbsError> {
        let DlDataType { bits, lanes, .. } = self.dtype;
        let fractional = || fault(format!("elements of {bits} bits in {lanes} lanes"));
        let size = self.dtype.size().ok_or_else(fractional)?;
        if self.shape.len() != self.strides.len() {
            return Err(null());
        }
        if self.shape.contains(&0) {
            return Ok(0);
        }
        let mut last = Some(0_u64);
        for (length, stride) in self.shape.iter().zip(&self.strides) {
            last = last.and_then(|last| last.checked_add(stride.checked_mul(length - 1)?));
        }
        let bytes = last.and_then(|last| last.checked_add(1)?.checked_mul(size as u64));
        bytes.filter(|&bytes| bytes <= isize::MAX as u64).map(|bytes| bytes as usize).ok_or_else(overflow)
    }
}

/// Returns the strides of a row-major tensor without gaps.
pub(crate) fn row_major(shape: &[u64]) -> Result<Vec<u64>, VerbsError> {
    let mut strides = vec![0; shape.len()];
    let mut step = 1_u64;
    for (stride, &length) in strides.iter_mut().zip(shape).rev() {
        *stride = step;
        step = step.checked_mul(length.max(1)).ok_or_else(overflow)?;
    }
    Ok(strides)
}

/// A tensor of this process for another library. [`into_raw`](Self::into_raw) passes the tensor to that
/// library. Dropping this value frees the tensor.
pub struct Exported {
    managed: NonNull<DlManagedTensor>,
}

/// The data that an exported tensor points to.
struct ExportContext {
    managed: DlManagedTensor,
    shape: Vec<i64>,
    strides: Vec<i64>,
    _bytes: Bytes,
}

impl Exported {
    /// Makes a tensor of `layout` in `bytes`, with the first element at the beginning. The consumer must not
    /// write to the tensor, because the memory is shared. This version of DLPack has no read-only flag.
    ///
    /// ```
    /// use tonic_rdma_verbs::memory::dlpack::{DlDataType, Exported, Layout};
    ///
    /// let dtype = DlDataType { code: 1, bits: 8, lanes: 1 }; // u8
    /// let layout = Layout { dtype, shape: vec![2, 2], strides: vec![2, 1] };
    /// let exported = Exported::new(bytes::Bytes::from_static(&[1, 2, 3, 4]), &layout)?;
    /// # drop(exported);
    /// # Ok::<(), tonic_rdma_verbs::VerbsError>(())
    /// ```
    ///
    /// # Errors
    /// The layout goes beyond the bytes, or DLPack can't express it.
    pub fn new(bytes: Bytes, layout: &Layout) -> Result<Self, VerbsError> {
        let (needed, available) = (layout.bytes()?, bytes.len());
        if needed > available {
            return Err(fault(format!("a tensor of {needed} bytes in memory of {available}")));
        }
        let shape = signed(&layout.shape)?;
        let strides = signed(&layout.strides)?;
        let dl_tensor = DlTensor {
            data: bytes.as_ptr().cast_mut().cast(),
            device: DlDevice::CPU,
            ndim: i32::try_from(shape.len()).map_err(|_| overflow())?,
            dtype: layout.dtype,
            shape: std::ptr::null_mut(),
            strides: std::ptr::null_mut(),
            byte_offset: 0,
        };
        let managed = DlManagedTensor { dl_tensor, manager_ctx: std::ptr::null_mut(), deleter: Some(delete) };
        let context = Box::leak(Box::new(ExportContext { managed, shape, strides, _bytes: bytes }));
        context.managed.dl_tensor.shape = context.shape.as_mut_ptr();
        context.managed.dl_tensor.strides = context.strides.as_mut_ptr();
        let context = NonNull::from(context);
        // SAFETY: the context has just been made, and there is no other reference to the context.
        let managed = unsafe {
            (*context.as_ptr()).managed.manager_ctx = context.as_ptr().cast();
            NonNull::new_unchecked(&raw mut (*context.as_ptr()).managed)
        };
        Ok(Self { managed })
    }

    /// Passes the tensor to a consumer, which calls the deleter at the end, from any thread.
    pub fn into_raw(self) -> NonNull<DlManagedTensor> {
        std::mem::ManuallyDrop::new(self).managed
    }
}

// SAFETY: the data behind the pointer is `Send` (numbers and `Bytes`), and only this value accesses it.
unsafe impl Send for Exported {}

impl Drop for Exported {
    fn drop(&mut self) {
        // SAFETY: `new` made the tensor, and `into_raw` did not pass it on, so no other code deletes it.
        unsafe { delete(self.managed.as_ptr()) };
    }
}

impl fmt::Debug for Exported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Exported({:p})", self.managed)
    }
}

/// Frees an exported tensor. This is the deleter of such tensors.
///
/// # Safety
/// `managed` must come from [`Exported::new`] and must not be deleted yet.
unsafe extern "C" fn delete(managed: *mut DlManagedTensor) {
    // SAFETY:
    // - `manager_ctx` is the box that `new` leaked. The structure lies in that box.
    // - The caller calls this function once for a tensor.
    drop(unsafe { Box::from_raw((*managed).manager_ctx.cast::<ExportContext>()) });
}

/// Converts `numbers` to signed ones.
fn signed(numbers: &[u64]) -> Result<Vec<i64>, VerbsError> {
    numbers.iter().map(|&number| i64::try_from(number).map_err(|_| overflow())).collect()
}

/// Maximum number of dimensions. No library uses more.
const MAX_RANK: usize = 64;

/// A tensor of another library. Its memory can be read until this value is dropped.
pub struct Imported {
    managed: NonNull<DlManagedTensor>,
    layout: Layout,
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: the caller of `from_raw` promises that
// - every thread may read the memory and call the deleter, and
// - nothing writes to the memory meanwhile.
unsafe impl Send for Imported {}
// SAFETY: the reasons for `Send` hold for `Sync`; shared references only read.
unsafe impl Sync for Imported {}

impl Imported {
    /// Takes over a tensor. Its deleter is called once: when this value is dropped, or before this function
    /// returns an error.
    ///
    /// ```
    /// use tonic_rdma_verbs::memory::dlpack::{DlDataType, Exported, Imported, Layout};
    ///
    /// let dtype = DlDataType { code: 1, bits: 8, lanes: 1 }; // u8
    /// let layout = Layout { dtype, shape: vec![3], strides: vec![1] };
    /// // Stands for a pointer from another library.
    /// let managed = Exported::new(bytes::Bytes::from_static(&[1, 2, 3]), &layout)?.into_raw();
    ///
    /// // SAFETY: `managed` is valid and owned by this code, and nothing writes to its memory.
    /// let imported = unsafe { Imported::from_raw(managed)? };
    /// assert_eq!(imported.as_ref(), [1, 2, 3]);
    /// # Ok::<(), tonic_rdma_verbs::VerbsError>(())
    /// ```
    ///
    /// # Errors
    /// The memory is not host memory, or the tensor has another fault that the error names.
    ///
    /// # Safety
    /// - `managed` must be a valid `DLManagedTensor` that the caller owns. Its shape, and its strides unless
    ///   null, must be valid for `ndim` numbers. Until the deleter is called, its memory must be valid for
    ///   reads and initialised, and nothing may write to it.
    /// - Every thread may read the memory and call the deleter.
    pub unsafe fn from_raw(managed: NonNull<DlManagedTensor>) -> Result<Self, VerbsError> {
        // From here on, every error return drops this value, which calls the deleter.
        let mut imported = Self {
            managed,
            layout: Layout {
                dtype: DlDataType { code: 0, bits: 0, lanes: 0 },
                shape: Vec::new(),
                strides: Vec::new(),
            },
            start: NonNull::dangling(),
            length: 0,
        };
        // SAFETY: `managed` is valid, as the caller promises.
        let tensor = unsafe { &managed.as_ref().dl_tensor };
        if !DlDevice::HOST.contains(&tensor.device.device_type) {
            let kind = tensor.device.device_type;
            return Err(fault(format!("memory of DLPack device type {kind}, which is no host memory")));
        }
        // SAFETY: shape and strides are valid for `ndim` numbers, as the caller promises.
        imported.layout = unsafe { read_layout(tensor) }?;
        imported.length = imported.layout.bytes()?;
        if imported.length > 0 {
            let data = NonNull::new(tensor.data.cast::<u8>()).ok_or_else(null)?;
            let offset = usize::try_from(tensor.byte_offset).map_err(|_| overflow())?;
            let end = data.addr().checked_add(offset).and_then(|start| start.checked_add(imported.length));
            end.ok_or_else(overflow)?;
            imported.start = NonNull::new(data.as_ptr().wrapping_add(offset)).ok_or_else(overflow)?;
        }
        Ok(imported)
    }

    /// Returns the layout of the elements. The first element is at the beginning of the bytes.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }
}

impl AsRef<[u8]> for Imported {
    fn as_ref(&self) -> &[u8] {
        // SAFETY:
        // - The layout has `length` bytes from the first element to the end of the last. The caller of
        //   `from_raw` promises that this memory is valid and initialised, and that nothing writes to it.
        //   DLPack requires one allocation, so the bytes between the elements are valid too.
        // - Without elements the pointer is dangling, and the length is 0.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.length) }
    }
}

impl Drop for Imported {
    fn drop(&mut self) {
        let managed = self.managed.as_ptr();
        // SAFETY:
        // - The structure is valid until its deleter is called, and only this value calls the deleter.
        // - No slice of the memory exists, because slices borrow this value.
        unsafe {
            if let Some(deleter) = (*managed).deleter {
                deleter(managed);
            }
        }
    }
}

impl fmt::Debug for Imported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Imported({:?}, {} bytes)", self.layout, self.length)
    }
}

/// Returns the layout of `tensor`. All numbers are checked; the pointers are trusted.
///
/// # Safety
/// Shape, and strides unless null, must be valid for `ndim` numbers.
unsafe fn read_layout(tensor: &DlTensor) -> Result<Layout, VerbsError> {
    let rank = usize::try_from(tensor.ndim).ok().filter(|&rank| rank <= MAX_RANK);
    let rank = rank.ok_or_else(|| fault(format!("{} dimensions", tensor.ndim)))?;
    // SAFETY: the shape is valid for `ndim` numbers, as the caller promises.
    let lengths = unsafe { numbers(tensor.shape, rank) }.ok_or_else(null)?;
    let shape = unsigned(lengths, "of length")?;
    // SAFETY: the strides are null or valid for `ndim` numbers, as the caller promises.
    let strides = match unsafe { numbers(tensor.strides, rank) } {
        Some(steps) => unsigned(steps, "with stride")?,
        None => row_major(&shape)?,
    };
    Ok(Layout { dtype: tensor.dtype, shape, strides })
}

/// Returns the numbers of the dimensions, none of which may be negative. The error says `what` they are.
fn unsigned(numbers: Vec<i64>, what: &str) -> Result<Vec<u64>, VerbsError> {
    let numbers = numbers.into_iter().enumerate().map(|(dimension, number)| {
        u64::try_from(number).map_err(|_| fault(format!("dimension {dimension} {what} {number}")))
    });
    numbers.collect()
}

/// Returns the `count` numbers at `start`, or `None` if `start` is null and `count` is not 0.
///
/// # Safety
/// `start`, unless null, must be valid for `count` numbers.
unsafe fn numbers(start: *const i64, count: usize) -> Option<Vec<i64>> {
    if count == 0 {
        return Some(Vec::new());
    }
    // SAFETY: `start` is not null, and so valid for `count` numbers, as the caller promises.
    (!start.is_null()).then(|| unsafe { std::slice::from_raw_parts(start, count) }.to_vec())
}

/// A tensor that can't be imported or exported.
fn fault(reason: impl Into<Cow<'static, str>>) -> VerbsError {
    VerbsError::new(VerbsErrorKind::InvalidArgument, reason)
}

fn overflow() -> VerbsError {
    fault("a tensor of more bytes than memory can have")
}

/// A pointer is null although there are elements, or there is not one stride for each dimension.
fn null() -> VerbsError {
    fault("a null pointer to data, shape or strides")
}
