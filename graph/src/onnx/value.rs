//! Tensors of the engine.

use std::rc::Rc;
use std::sync::Arc;

use bytes::Bytes;
use tonic_rdma_tensor::{Dtype, Shape, Tensor, TensorSpec};
use tract_onnx::prelude as tract;

use crate::dataflow::{KernelError, Value};

/// A tensor of the engine. Clones share its content.
#[derive(Clone, Debug)]
pub struct ModelValue(Arc<tract::Tensor>);

impl ModelValue {
    /// Returns type and shape.
    ///
    /// # Errors
    /// The type of the elements is private to the engine.
    pub fn spec(&self) -> Result<TensorSpec, KernelError> {
        let dtype = dtype(self.0.datum_type())
            .ok_or_else(|| format!("a tensor of {:?} can't cross", self.0.datum_type()))?;
        let dims: Vec<u64> = self.0.shape().iter().map(|length| *length as u64).collect();
        Ok(TensorSpec::new(dtype, Shape::new(&dims)?)?)
    }

    /// Returns the content, row-major.
    pub fn bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }

    pub(super) fn tensor(&self) -> &tract::Tensor {
        &self.0
    }

    /// Takes a result of the engine, without a copy unless the engine still uses it.
    pub(super) fn from_engine(value: tract::TValue) -> Self {
        Self(tract::IntoArcTensor::into_arc_tensor(value))
    }

    /// Gives the tensor to the engine, which may change it in place if it is used nowhere else.
    pub(super) fn into_engine(self) -> tract::TValue {
        match Arc::try_unwrap(self.0) {
            Ok(tensor) => tract::TValue::Var(Rc::new(tensor)),
            Err(shared) => tract::TValue::Const(shared),
        }
    }
}

impl Value for ModelValue {
    fn share(&self) -> Result<Tensor, KernelError> {
        Ok(Tensor::from_bytes(self.spec()?, Bytes::from_owner(Owner(Arc::clone(&self.0))))?)
    }

    fn filled(
        spec: &TensorSpec,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<(), KernelError>,
    ) -> Result<Self, KernelError> {
        let datum =
            datum(spec.dtype()).ok_or_else(|| format!("the engine has no tensors of {}", spec.dtype()))?;
        let dims: Vec<usize> = spec.shape().dims().iter().map(|length| *length as usize).collect();
        // The engine's only way to a tensor without zeros is unsafe.
        let mut tensor = tract::Tensor::zero_dt(datum, &dims)?;
        fill(tensor.as_bytes_mut())?;
        Ok(Self(Arc::new(tensor)))
    }
}

/// Keeps a tensor in memory, and keeps the engine from changing it in place.
struct Owner(Arc<tract::Tensor>);

impl AsRef<[u8]> for Owner {
    fn as_ref(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

/// The types of elements that both the engine and tensors have.
const TYPES: [(tract::DatumType, Dtype); 12] = [
    (tract::DatumType::Bool, Dtype::Bool),
    (tract::DatumType::U8, Dtype::U8),
    (tract::DatumType::U16, Dtype::U16),
    (tract::DatumType::U32, Dtype::U32),
    (tract::DatumType::U64, Dtype::U64),
    (tract::DatumType::I8, Dtype::I8),
    (tract::DatumType::I16, Dtype::I16),
    (tract::DatumType::I32, Dtype::I32),
    (tract::DatumType::I64, Dtype::I64),
    (tract::DatumType::F16, Dtype::F16),
    (tract::DatumType::F32, Dtype::F32),
    (tract::DatumType::F64, Dtype::F64),
];

/// Returns the type of elements that cross, or `None` if the engine's type is private to it.
pub(super) fn dtype(datum: tract::DatumType) -> Option<Dtype> {
    TYPES.iter().find(|(known, _)| *known == datum).map(|(_, dtype)| *dtype)
}

fn datum(dtype: Dtype) -> Option<tract::DatumType> {
    TYPES.iter().find(|(_, known)| *known == dtype).map(|(datum, _)| *datum)
}
