//! A tensor of this process, handed to another library.

use std::fmt;
use std::ptr::NonNull;

use bytes::Bytes;

use super::error::DlpackError;
use super::layout::Layout;
use super::structures::{DlDevice, DlManagedTensor, DlTensor};

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

fn signed(numbers: &[u64]) -> Result<Vec<i64>, DlpackError> {
    numbers.iter().map(|&number| i64::try_from(number).map_err(|_| DlpackError::Overflow)).collect()
}
