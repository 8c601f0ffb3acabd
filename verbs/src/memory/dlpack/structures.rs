//! The structures of DLPack, with the layout that they have in C.

use std::ffi::c_void;

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
    /// Kinds of memory that the processor can read: host memory, and host memory that CUDA or ROCm has pinned.
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
