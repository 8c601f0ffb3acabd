//! A tensor of this process, handed to another library.

use std::fmt;
use std::ptr::NonNull;

use bytes::Bytes;

use super::error::DlpackError;
use super::layout::Layout;
use super::structures::{DlDevice, DlManagedTensor, DlTensor};

/// A tensor of this process for another library. [`into_raw`](Self::into_raw) passes the tensor to that library. Dropping
/// this value frees the tensor.
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
    /// Makes a tensor of `layout` in `bytes`, with the first element at the beginning. The consumer must not write to the
    /// tensor, because the memory is shared. This version of DLPack has no read-only flag.
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
    /// The layout goes beyond the bytes, or DLPack can't express it.
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
fn signed(numbers: &[u64]) -> Result<Vec<i64>, DlpackError> {
    numbers.iter().map(|&number| i64::try_from(number).map_err(|_| DlpackError::Overflow)).collect()
}
