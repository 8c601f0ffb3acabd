//! DLPack: borrowed memory of tensors, between libraries of one process (<https://dmlc.github.io/dlpack>, version 0.8).
//!
//! ```text
//!  theirs:  DlManagedTensor ── Imported::from_raw ──▶ Imported: &[u8] + Layout    its drop calls their deleter
//!  ours:    Bytes + Layout ─── Exported::new ───────▶ Exported ── into_raw ──▶ DlManagedTensor, with our deleter
//! ```
//!
//! Never: reads an element, or knows what a tensor is for.

use std::ffi::c_void;
use std::fmt;
use std::ptr::NonNull;

use bytes::Bytes;

/// Dimensions at most: more than any library has.
const MAX_RANK: usize = 64;

/// `DLManagedTensor`: a tensor, and how its owner learns that it is not needed any more.
#[repr(C)]
#[derive(Debug)]
pub struct DlManagedTensor {
    /// The tensor.
    pub dl_tensor: DlTensor,
    /// The owner's.
    pub manager_ctx: *mut c_void,
    /// Called once, with this structure.
    pub deleter: Option<unsafe extern "C" fn(*mut Self)>,
}

/// `DLTensor`.
#[repr(C)]
#[derive(Debug)]
pub struct DlTensor {
    /// Memory, which the first element is `byte_offset` behind.
    pub data: *mut c_void,
    /// What kind of memory.
    pub device: DlDevice,
    /// Number of dimensions.
    pub ndim: i32,
    /// Type of the elements.
    pub dtype: DlDataType,
    /// Their lengths.
    pub shape: *mut i64,
    /// Steps in elements, or null if row-major without gaps.
    pub strides: *mut i64,
    /// In bytes.
    pub byte_offset: u64,
}

/// `DLDevice`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DlDevice {
    /// Kind: 1 for the processor's memory.
    pub device_type: i32,
    /// Which one.
    pub device_id: i32,
}

impl DlDevice {
    /// Memory of the processor.
    pub const CPU: Self = Self { device_type: 1, device_id: 0 };
    /// Kinds that the processor reads as any other memory: its own, and what CUDA and ROCm have pinned of it.
    const HOST: [i32; 3] = [1, 3, 11];
}

/// `DLDataType`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DlDataType {
    /// Kind: integer, floating point and so on.
    pub code: u8,
    /// Bits of a value.
    pub bits: u8,
    /// Values of an element.
    pub lanes: u16,
}

impl DlDataType {
    /// Bytes of an element, if it has whole ones.
    fn size(self) -> Option<usize> {
        let bits = usize::from(self.bits) * usize::from(self.lanes);
        (bits != 0 && bits.is_multiple_of(8)).then_some(bits / 8)
    }
}

/// How elements lie in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Type of the elements.
    pub dtype: DlDataType,
    /// Length of each dimension.
    pub shape: Vec<u64>,
    /// Step along each dimension, in elements.
    pub strides: Vec<u64>,
}

/// Why a tensor of DLPack can't be taken over or made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DlpackError {
    /// Memory that the processor does not read.
    #[error("memory of DLPack device type {0}, which is no host memory")]
    Device(i32),
    /// An impossible number of dimensions.
    #[error("{0} dimensions")]
    Rank(i32),
    /// A dimension of negative length.
    #[error("dimension {dimension} of length {length}")]
    Dimension {
        /// Which one, from 0.
        dimension: usize,
        /// Its length.
        length: i64,
    },
    /// Elements in descending order, which are not supported.
    #[error("dimension {dimension} with stride {stride}")]
    Stride {
        /// Which one, from 0.
        dimension: usize,
        /// Its step.
        stride: i64,
    },
    /// Elements of no whole number of bytes.
    #[error("elements of {bits} bits in {lanes} lanes", bits = .0.bits, lanes = .0.lanes)]
    DataType(DlDataType),
    /// A length that can't be counted.
    #[error("a tensor of more bytes than memory can have")]
    Overflow,
    /// No memory, where there are elements.
    #[error("a null pointer to data, shape or strides")]
    Null,
    /// Elements beyond the end of the memory.
    #[error("a tensor of {needed} bytes in memory of {available}")]
    OutOfBounds {
        /// From the first element to the end of the last.
        needed: usize,
        /// Bytes that there are.
        available: usize,
    },
}

/// Another library's tensor, whose memory is here to be read until this is dropped.
pub struct Imported {
    managed: NonNull<DlManagedTensor>,
    layout: Layout,
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: whoever calls `from_raw` promises that
// - the memory may be read, and the deleter called, from any thread, and
// - nobody writes to the memory meanwhile.
unsafe impl Send for Imported {}
// SAFETY: as above; shared references only read.
unsafe impl Sync for Imported {}

impl Imported {
    /// Takes over a tensor. Its deleter is called once: when this value is dropped, or before this returns an error.
    ///
    /// ```
    /// use tonic_rdma_verbs::memory::dlpack::{DlDataType, Exported, Imported, Layout};
    ///
    /// let dtype = DlDataType { code: 1, bits: 8, lanes: 1 }; // u8
    /// let layout = Layout { dtype, shape: vec![3], strides: vec![1] };
    /// // Stands for a pointer that another library handed over.
    /// let managed = Exported::new(bytes::Bytes::from_static(&[1, 2, 3]), &layout)?.into_raw();
    ///
    /// // SAFETY: `managed` is valid, ours to give away, and nothing writes to its memory.
    /// let imported = unsafe { Imported::from_raw(managed)? };
    /// assert_eq!(imported.as_ref(), [1, 2, 3]);
    /// # Ok::<(), tonic_rdma_verbs::memory::dlpack::DlpackError>(())
    /// ```
    ///
    /// # Errors
    /// Memory that is not the host's, and whatever else [`DlpackError`] names.
    ///
    /// # Safety
    /// - `managed` must be a valid `DLManagedTensor` that is the caller's to give away, its shape (and its strides, unless
    ///   null) valid for `ndim` numbers, and the memory that it describes valid for reads, initialised, and written to by
    ///   nothing, until the deleter is called.
    /// - The memory may be read, and the deleter be called, from any thread.
    pub unsafe fn from_raw(managed: NonNull<DlManagedTensor>) -> Result<Self, DlpackError> {
        // From here on dropped, and so deleted, on every way out.
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
        // SAFETY: valid, says the caller.
        let tensor = unsafe { &managed.as_ref().dl_tensor };
        if !DlDevice::HOST.contains(&tensor.device.device_type) {
            return Err(DlpackError::Device(tensor.device.device_type));
        }
        // SAFETY: shape and strides are valid for `ndim` numbers, says the caller.
        imported.layout = unsafe { read_layout(tensor) }?;
        imported.length = imported.layout.bytes()?;
        if imported.length > 0 {
            let data = NonNull::new(tensor.data.cast::<u8>()).ok_or(DlpackError::Null)?;
            let offset = usize::try_from(tensor.byte_offset).map_err(|_| DlpackError::Overflow)?;
            let end = data.addr().checked_add(offset).and_then(|start| start.checked_add(imported.length));
            end.ok_or(DlpackError::Overflow)?;
            imported.start = NonNull::new(data.as_ptr().wrapping_add(offset)).ok_or(DlpackError::Overflow)?;
        }
        Ok(imported)
    }

    /// Returns how the elements lie in its bytes, the first of them at the beginning.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }
}

impl AsRef<[u8]> for Imported {
    fn as_ref(&self) -> &[u8] {
        // SAFETY:
        // - the layout says that from the first element to the end of the last there are `length` bytes, and the caller
        //   of `from_raw` that the memory which it describes is valid, initialised and written to by nobody; it is one
        //   allocation, as DLPack has it, so that what lies between the elements is valid too, and
        // - with no elements the pointer is dangling, and the length 0.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.length) }
    }
}

impl Drop for Imported {
    fn drop(&mut self) {
        let managed = self.managed.as_ptr();
        // SAFETY:
        // - the structure is valid until its deleter is called, which nobody but this value does, and
        // - no slice of the memory is left: they borrow this value.
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

/// A tensor of this library for another one. [`into_raw`](Self::into_raw) hands it over; dropping it frees it.
pub struct Exported {
    managed: NonNull<DlManagedTensor>,
}

/// What an exported tensor points to.
struct Context {
    managed: DlManagedTensor,
    shape: Vec<i64>,
    strides: Vec<i64>,
    _bytes: Bytes,
}

impl Exported {
    /// Makes the tensor of `layout` in `bytes`, the first element at the beginning. The consumer must not write to it, as the
    /// memory is shared; this version of DLPack has no way to say so.
    ///
    /// ```
    /// use tonic_rdma_verbs::memory::dlpack::{DlDataType, Exported, Layout};
    ///
    /// let dtype = DlDataType { code: 1, bits: 8, lanes: 1 }; // u8
    /// let layout = Layout { dtype, shape: vec![2, 2], strides: vec![2, 1] };
    /// let exported = Exported::new(bytes::Bytes::from_static(&[1, 2, 3, 4]), &layout)?;
    /// # drop(exported);
    /// # Ok::<(), tonic_rdma_verbs::memory::dlpack::DlpackError>(())
    /// ```
    ///
    /// # Errors
    /// The layout leads out of the bytes, or DLPack can't express it.
    pub fn new(bytes: Bytes, layout: &Layout) -> Result<Self, DlpackError> {
        let (needed, available) = (layout.bytes()?, bytes.len());
        if needed > available {
            return Err(DlpackError::OutOfBounds { needed, available });
        }
        let shape = signed(&layout.shape)?;
        let strides = signed(&layout.strides)?;
        let dl_tensor = DlTensor {
            data: bytes.as_ptr().cast_mut().cast(),
            device: DlDevice::CPU,
            ndim: i32::try_from(shape.len()).map_err(|_| DlpackError::Overflow)?,
            dtype: layout.dtype,
            shape: std::ptr::null_mut(),
            strides: std::ptr::null_mut(),
            byte_offset: 0,
        };
        let managed = DlManagedTensor { dl_tensor, manager_ctx: std::ptr::null_mut(), deleter: Some(delete) };
        let context = Box::leak(Box::new(Context { managed, shape, strides, _bytes: bytes }));
        context.managed.dl_tensor.shape = context.shape.as_mut_ptr();
        context.managed.dl_tensor.strides = context.strides.as_mut_ptr();
        let context = NonNull::from(context);
        // SAFETY: the context has just been made, and nobody else knows of it.
        let managed = unsafe {
            (*context.as_ptr()).managed.manager_ctx = context.as_ptr().cast();
            NonNull::new_unchecked(&raw mut (*context.as_ptr()).managed)
        };
        Ok(Self { managed })
    }

    /// Hands it over to a consumer, which calls the deleter when done with it, from any thread.
    pub fn into_raw(self) -> NonNull<DlManagedTensor> {
        std::mem::ManuallyDrop::new(self).managed
    }
}

// SAFETY: what it points to is `Send`: numbers and `Bytes`, reached through this value alone.
unsafe impl Send for Exported {}

impl Drop for Exported {
    fn drop(&mut self) {
        // SAFETY: made by `new`, and not handed over, so that nobody else calls this.
        unsafe { delete(self.managed.as_ptr()) };
    }
}

impl fmt::Debug for Exported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Exported({:p})", self.managed)
    }
}

/// The deleter of exported tensors.
///
/// # Safety
/// `managed` must come from [`Exported::new`], and not have been deleted.
unsafe extern "C" fn delete(managed: *mut DlManagedTensor) {
    // SAFETY:
    // - `manager_ctx` is the box that `new` leaked, which the structure lies in, and
    // - the caller does this once.
    drop(unsafe { Box::from_raw((*managed).manager_ctx.cast::<Context>()) });
}

impl Layout {
    /// Bytes from the first element to the end of the last.
    fn bytes(&self) -> Result<usize, DlpackError> {
        let size = self.dtype.size().ok_or(DlpackError::DataType(self.dtype))?;
        if self.shape.len() != self.strides.len() {
            return Err(DlpackError::Null);
        }
        if self.shape.contains(&0) {
            return Ok(0);
        }
        let mut last = Some(0_u64);
        for (length, stride) in self.shape.iter().zip(&self.strides) {
            last = last.and_then(|last| last.checked_add(stride.checked_mul(length - 1)?));
        }
        let bytes = last.and_then(|last| last.checked_add(1)?.checked_mul(size as u64));
        bytes
            .filter(|&bytes| bytes <= isize::MAX as u64)
            .map(|bytes| bytes as usize)
            .ok_or(DlpackError::Overflow)
    }
}

/// Layout of `tensor`, which may be any but for its pointers.
///
/// # Safety
/// Shape, and strides unless null, must be valid for `ndim` numbers.
unsafe fn read_layout(tensor: &DlTensor) -> Result<Layout, DlpackError> {
    let rank = usize::try_from(tensor.ndim).ok().filter(|&rank| rank <= MAX_RANK);
    let rank = rank.ok_or(DlpackError::Rank(tensor.ndim))?;
    // SAFETY: for `ndim` numbers, says the caller.
    let lengths = unsafe { numbers(tensor.shape, rank) }.ok_or(DlpackError::Null)?;
    let mut shape = Vec::with_capacity(rank);
    for (dimension, length) in lengths.into_iter().enumerate() {
        shape.push(u64::try_from(length).map_err(|_| DlpackError::Dimension { dimension, length })?);
    }
    // SAFETY: as above.
    let strides = match unsafe { numbers(tensor.strides, rank) } {
        Some(steps) => {
            let mut strides = Vec::with_capacity(rank);
            for (dimension, stride) in steps.into_iter().enumerate() {
                strides.push(u64::try_from(stride).map_err(|_| DlpackError::Stride { dimension, stride })?);
            }
            strides
        }
        None => row_major(&shape)?,
    };
    Ok(Layout { dtype: tensor.dtype, shape, strides })
}

/// `count` numbers at `start`, or nothing if there are some and that is null.
///
/// # Safety
/// `start`, unless null, must be valid for `count` numbers.
unsafe fn numbers(start: *const i64, count: usize) -> Option<Vec<i64>> {
    if count == 0 {
        return Some(Vec::new());
    }
    // SAFETY: not null, and else valid, says the caller.
    (!start.is_null()).then(|| unsafe { std::slice::from_raw_parts(start, count) }.to_vec())
}

fn row_major(shape: &[u64]) -> Result<Vec<u64>, DlpackError> {
    let mut strides = vec![0; shape.len()];
    let mut step = 1_u64;
    for (stride, &length) in strides.iter_mut().zip(shape).rev() {
        *stride = step;
        step = step.checked_mul(length.max(1)).ok_or(DlpackError::Overflow)?;
    }
    Ok(strides)
}

fn signed(numbers: &[u64]) -> Result<Vec<i64>, DlpackError> {
    numbers.iter().map(|&number| i64::try_from(number).map_err(|_| DlpackError::Overflow)).collect()
}
