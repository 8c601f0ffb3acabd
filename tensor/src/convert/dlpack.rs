//! DLPack: the format in which numpy, PyTorch and other libraries share tensors' memory.

use bytes::Bytes;

use crate::types::ValueError;
use crate::{Dtype, Shape, Strides, Tensor, TensorError, TensorSpec};
use tonic_rdma_verbs::memory::dlpack::{DlDataType, Exported, Imported, Layout};

/// Code and number of bits of each type that both sides know.
#[rustfmt::skip]
const TYPES: [(Dtype, u8, u8); 17] = [
    (Dtype::I8, 0, 8), (Dtype::I16, 0, 16), (Dtype::I32, 0, 32), (Dtype::I64, 0, 64),
    (Dtype::U8, 1, 8), (Dtype::U16, 1, 16), (Dtype::U32, 1, 32), (Dtype::U64, 1, 64),
    (Dtype::F16, 2, 16), (Dtype::F32, 2, 32), (Dtype::F64, 2, 64),
    (Dtype::Bf16, 4, 16),
    (Dtype::Complex64, 5, 64), (Dtype::Complex128, 5, 128),
    (Dtype::Bool, 6, 8),
    (Dtype::F8E4M3, 10, 8), (Dtype::F8E5M2, 12, 8),
];

impl Tensor {
    /// Makes a tensor from another library's tensor, in that library's memory. The memory goes back to the
    /// library with the last reference to it.
    ///
    /// ```
    /// use tonic_rdma::memory::dlpack::Imported;
    /// use tonic_rdma_tensor::{Dtype, Shape, Tensor, TensorSpec};
    ///
    /// // Stands for a pointer from another library.
    /// let theirs = Tensor::copy_from(TensorSpec::new(Dtype::U8, Shape::new(&[2])?)?, &[1, 2])?;
    /// let managed = theirs.to_dlpack()?.into_raw();
    ///
    /// // SAFETY: `managed` is valid and owned here, and nothing writes to its memory.
    /// let imported = unsafe { Imported::from_raw(managed)? };
    /// assert_eq!(Tensor::from_dlpack(imported)?.as_slice::<u8>()?, [1, 2]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// The type is unknown, there are too many dimensions, or the memory is not aligned for its elements. On
    /// an error the memory goes back to the library.
    pub fn from_dlpack(imported: Imported) -> Result<Self, TensorError> {
        let Layout { dtype, shape, strides } = imported.layout().clone();
        let dtype = tensor_dtype(dtype)?;
        let spec = TensorSpec::new(dtype, Shape::new(&shape)?)?;
        let strides = Strides::new(&strides).ok_or_else(|| foreign("too many strides"))?;
        Self::from_strided(spec, strides, Bytes::from_owner(imported))
    }

    /// Makes a DLPack tensor for another library. The library must not write to it, because the memory is
    /// shared.
    ///
    /// ```
    /// use tonic_rdma_tensor::{Dtype, Shape, Tensor, TensorSpec};
    ///
    /// let ours = Tensor::copy_from(TensorSpec::new(Dtype::U8, Shape::new(&[2])?)?, &[1, 2])?;
    /// let exported = ours.to_dlpack()?; // `into_raw` makes the pointer that the other library takes
    /// # drop(exported);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// The elements have a variable length.
    pub fn to_dlpack(&self) -> Result<Exported, TensorError> {
        let row = TYPES.iter().find(|(dtype, ..)| *dtype == self.dtype());
        let &(_, code, bits) = row.ok_or(ValueError::Variable(self.dtype()))?;
        let layout = Layout {
            dtype: DlDataType { code, bits, lanes: 1 },
            shape: self.shape().dims().to_vec(),
            strides: self.strides().steps().to_vec(),
        };
        let exported = Exported::new(self.span_bytes()?, &layout);
        exported.map_err(|error| foreign(&format!("the tensor can't be exported: {error}")).because(error))
    }
}

fn tensor_dtype(found: DlDataType) -> Result<Dtype, TensorError> {
    let row = TYPES.iter().find(|&&(_, code, bits)| (code, bits, 1) == (found.code, found.bits, found.lanes));
    let DlDataType { code, bits, lanes } = found;
    row.map(|&(dtype, ..)| dtype)
        .ok_or_else(|| foreign(&format!("unknown type: code {code}, {bits} bits, {lanes} lanes")))
}

fn foreign(fault: &str) -> TensorError {
    TensorError::argument(format!("DLPack: {fault}"))
}
