//! A tensor of another library, taken over by this process.

use std::fmt;
use std::ptr::NonNull;

use super::error::DlpackError;
use super::layout::{Layout, row_major};
use super::structures::{DlDataType, DlDevice, DlManagedTensor, DlTensor};

/// Dimensions at most: more than any library has.
const MAX_RANK: usize = 64;

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
