//! The structures of DLPack, as C has them.

use std::ffi::c_void;

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
    pub(crate) const HOST: [i32; 3] = [1, 3, 11];
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
    pub(crate) fn size(self) -> Option<usize> {
        let bits = usize::from(self.bits) * usize::from(self.lanes);
        (bits != 0 && bits.is_multiple_of(8)).then_some(bits / 8)
    }
}
