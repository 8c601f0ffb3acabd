//! A tensor of another library, taken over by this process.

use std::fmt;
use std::ptr::NonNull;

use super::error::DlpackError;
use super::layout::{Layout, row_major};
use super::structures::{DlDataType, DlDevice, DlManagedTensor, DlTensor};

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
    /// Takes over a tensor. Its deleter is called once: when this value is dropped, or before this function returns an error.
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
    /// # Ok::<(), tonic_rdma_verbs::memory::dlpack::DlpackError>(())
    /// ```
    ///
    /// # Errors
    /// The memory is not host memory, or the tensor has another fault that [`DlpackError`] names.
    ///
    /// # Safety
    /// - `managed` must be a valid `DLManagedTensor` that the caller owns. Its shape, and its strides unless null, must be valid
    ///   for `ndim` numbers. Until the deleter is called, its memory must be valid for reads and initialised, and nothing may
    ///   write to it.
    /// - Every thread may read the memory and call the deleter.
    pub unsafe fn from_raw(managed: NonNull<DlManagedTensor>) -> Result<Self, DlpackError> {
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
            return Err(DlpackError::Device(tensor.device.device_type));
        }
        // SAFETY: shape and strides are valid for `ndim` numbers, as the caller promises.
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

    /// Returns the layout of the elements. The first element is at the beginning of the bytes.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }
}

impl AsRef<[u8]> for Imported {
    fn as_ref(&self) -> &[u8] {
        // SAFETY:
        // - The layout has `length` bytes from the first element to the end of the last. The caller of `from_raw` promises
        //   that this memory is valid and initialised, and that nothing writes to it. DLPack requires one allocation, so the
        //   bytes between the elements are valid too.
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
unsafe fn read_layout(tensor: &DlTensor) -> Result<Layout, DlpackError> {
    let rank = usize::try_from(tensor.ndim).ok().filter(|&rank| rank <= MAX_RANK);
    let rank = rank.ok_or(DlpackError::Rank(tensor.ndim))?;
    // SAFETY: the shape is valid for `ndim` numbers, as the caller promises.
    let lengths = unsafe { numbers(tensor.shape, rank) }.ok_or(DlpackError::Null)?;
    let mut shape = Vec::with_capacity(rank);
    for (dimension, length) in lengths.into_iter().enumerate() {
        shape.push(u64::try_from(length).map_err(|_| DlpackError::Dimension { dimension, length })?);
    }
    // SAFETY: the strides are null or valid for `ndim` numbers, as the caller promises.
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
