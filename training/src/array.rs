//! Tensors of the training graphs: numbers that can cross, and tensors of candle that stay in their process.
//!
//! ```text
//!  Floats, Words   a shared vector               crosses without a copy
//!  Tensor          a tensor of candle            never crosses, because candle lends its memory under a lock only
//!  Tape            what a backward pass needs    never crosses
//! ```
//!
//! A kernel whose output crosses takes the vector out of candle's tensor ([`Array::take`]). This copies
//! nothing.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use bytemuck::Pod;
use bytes::Bytes;
use candle_core::{CpuStorage, Device, InplaceOp1, Layout, Tensor, WithDType};
use tonic_rdma_commands::Failure;
use tonic_rdma_graph::dataflow::Value;
use tonic_rdma_tensor::{Dtype, Shape, TensorSpec};

use crate::layer::Tape;

/// A tensor of a training graph.
#[derive(Clone, Debug)]
pub(crate) enum Array {
    Floats(Block<f32>),
    Words(Block<u32>),
    Tensor(Tensor),
    Tape(Arc<Tape>),
}

/// Numbers, row-major: a shared vector.
#[derive(Clone)]
pub(crate) struct Block<T> {
    dims: Vec<usize>,
    content: Arc<Vec<T>>,
}

impl<T: Pod + WithDType> Block<T> {
    /// Makes the block of a vector, whose length is the product of `dims`.
    pub(crate) fn new(dims: &[usize], content: Vec<T>) -> Result<Self, Error> {
        let length: usize = dims.iter().product();
        if content.len() != length {
            return Err(format!("{} numbers don't fill a tensor of shape {dims:?}", content.len()).into());
        }
        Ok(Self { dims: dims.to_vec(), content: Arc::new(content) })
    }

    pub(crate) fn dims(&self) -> &[usize] {
        &self.dims
    }

    pub(crate) fn values(&self) -> &[T] {
        &self.content
    }

    /// Returns the numbers, to be changed. They are copied if others have them too.
    pub(crate) fn values_mut(&mut self) -> &mut [T] {
        Arc::<Vec<T>>::make_mut(&mut self.content)
    }

    /// Returns the tensor of candle. The numbers are moved if this is their only owner, and copied otherwise.
    pub(crate) fn into_tensor(self) -> Result<Tensor, Error> {
        Ok(Tensor::from_vec(Arc::unwrap_or_clone(self.content), self.dims, &Device::Cpu)?)
    }

    fn share(&self, dtype: Dtype) -> Result<tonic_rdma_tensor::Tensor, Error> {
        let dims: Vec<u64> = self.dims.iter().map(|length| *length as u64).collect();
        let spec = TensorSpec::new(dtype, Shape::new(&dims)?)?;
        Ok(tonic_rdma_tensor::Tensor::from_bytes(spec, Bytes::from_owner(BlockBytes(self.clone())))?)
    }

    fn filled(
        spec: &TensorSpec,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<(), Error>,
    ) -> Result<Self, Error> {
        let dims: Vec<usize> =
            spec.shape().dims().iter().map(|length| usize::try_from(*length)).collect::<Result<_, _>>()?;
        let mut values = vec![<T as bytemuck::Zeroable>::zeroed(); dims.iter().product()];
        fill(bytemuck::cast_slice_mut(&mut values))?;
        Self::new(&dims, values)
    }
}

impl<T> fmt::Debug for Block<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Block").field("dims", &self.dims).finish_non_exhaustive()
    }
}

/// The bytes of a block, which keep its memory.
struct BlockBytes<T>(Block<T>);

impl<T: Pod + WithDType> AsRef<[u8]> for BlockBytes<T> {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(self.0.values())
    }
}

/// An operation that moves the vector out of a tensor.
struct Take(Mutex<Option<Vec<f32>>>);

impl InplaceOp1 for Take {
    fn name(&self) -> &'static str {
        "take"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        if let CpuStorage::F32(values) = storage
            && layout.contiguous_offsets() == Some((0, values.len()))
        {
            *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(std::mem::take(values));
        }
        Ok(())
    }
}

impl Array {
    /// Makes an array of a vector.
    pub(crate) fn floats(dims: &[usize], values: Vec<f32>) -> Result<Self, Error> {
        Block::new(dims, values).map(Self::Floats)
    }

    /// Moves the vector out of a tensor of candle if its elements fill it, row-major: the tensor and all its
    /// clones are empty afterwards. Otherwise copies. So the caller gives a tensor that it has just computed.
    pub(crate) fn take(tensor: Tensor) -> Result<Self, Error> {
        let taken = Take(Mutex::new(None));
        tensor.inplace_op1(&taken)?;
        let values = match taken.0.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some(values) => values,
            None => tensor.flatten_all()?.to_vec1()?,
        };
        Self::floats(tensor.dims(), values)
    }

    /// Makes an array of the elements of a tensor of candle, each within ±`bound`, in memory that is
    /// allocated here.
    pub(crate) fn clipped(tensor: &Tensor, bound: f32) -> Result<Self, Error> {
        let mut values = tensor.flatten_all()?.to_vec1::<f32>()?;
        values.iter_mut().for_each(|value| *value = value.clamp(-bound, bound));
        Self::floats(tensor.dims(), values)
    }

    /// Returns the tensor of candle.
    pub(crate) fn into_tensor(self) -> Result<Tensor, Error> {
        match self {
            Self::Floats(block) => block.into_tensor(),
            Self::Words(block) => block.into_tensor(),
            Self::Tensor(tensor) => Ok(tensor),
            Self::Tape(_) => Err("what a forward pass keeps is no tensor".into()),
        }
    }

    /// Returns the numbers of an array that crosses or has crossed.
    pub(crate) fn as_floats(&self) -> Result<&Block<f32>, Error> {
        match self {
            Self::Floats(block) => Ok(block),
            other => Err(format!("float32 numbers are expected, found {other:?}").into()),
        }
    }

    /// Returns the whole numbers of an array that crosses or has crossed.
    pub(crate) fn as_words(&self) -> Result<&Block<u32>, Error> {
        match self {
            Self::Words(block) => Ok(block),
            other => Err(format!("uint32 numbers are expected, found {other:?}").into()),
        }
    }
}

impl Value for Array {
    fn share(&self) -> Result<tonic_rdma_tensor::Tensor, Error> {
        match self {
            Self::Floats(block) => block.share(Dtype::F32),
            Self::Words(block) => block.share(Dtype::U32),
            other => Err(format!("only numbers cross, found {other:?}").into()),
        }
    }

    fn filled(
        spec: &TensorSpec,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<(), Error>,
    ) -> Result<Self, Error> {
        match spec.dtype() {
            Dtype::F32 => Block::filled(spec, fill).map(Self::Floats),
            Dtype::U32 => Block::filled(spec, fill).map(Self::Words),
            other => Err(format!("the training has no tensors of type {other}").into()),
        }
    }
}

/// An error of any type.
pub(crate) type Error = Box<dyn std::error::Error + Send + Sync>;

/// Returns the failure that an error is, or makes one of it.
pub(crate) fn failure(error: Error) -> Failure {
    match error.downcast::<Failure>() {
        Ok(failure) => *failure,
        Err(other) => Failure::run(other.to_string()).because(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(array: &Array) -> Vec<f32> {
        array.as_floats().unwrap().values().to_vec()
    }

    #[test]
    fn a_shared_array_has_the_memory_of_the_array() {
        let array = Array::floats(&[2, 3], vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).unwrap();
        let pointer = array.as_floats().unwrap().values().as_ptr();
        let shared = array.share().unwrap();
        assert_eq!(shared.as_slice::<f32>().unwrap().as_ptr(), pointer);
        drop(array);
        assert_eq!(shared.as_slice::<f32>().unwrap(), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    }

    #[test]
    fn a_vector_is_taken_out_of_a_tensor_without_a_copy() {
        let vector = vec![1.0_f32, 2.0, 3.0, 4.0];
        let pointer = vector.as_ptr();
        let tensor = Tensor::from_vec(vector, (2, 2), &Device::Cpu).unwrap();
        let array = Array::take(tensor).unwrap();
        assert_eq!(array.as_floats().unwrap().values().as_ptr(), pointer);
        assert_eq!(array.into_tensor().unwrap().dims(), [2, 2]);
    }

    #[test]
    fn elements_that_are_not_row_major_are_put_in_order() {
        let tensor = Tensor::from_vec(vec![1.0_f32, 2.0, 3.0, 4.0], (2, 2), &Device::Cpu).unwrap();
        assert_eq!(values(&Array::take(tensor.t().unwrap()).unwrap()), [1.0, 3.0, 2.0, 4.0]);
        let tensor = Tensor::from_vec(vec![1.0_f32, 2.0, 3.0, 4.0], (2, 2), &Device::Cpu).unwrap();
        assert_eq!(values(&Array::take(tensor.narrow(0, 1, 1).unwrap()).unwrap()), [3.0, 4.0]);
    }

    #[test]
    fn an_array_that_is_used_elsewhere_is_copied_and_not_emptied() {
        let array = Array::floats(&[2], vec![1.0, 2.0]).unwrap();
        let tensor = array.clone().into_tensor().unwrap();
        assert_eq!(values(&array), [1.0, 2.0]);
        assert_eq!(tensor.to_vec1::<f32>().unwrap(), [1.0, 2.0]);
    }

    #[test]
    fn a_value_is_filled_or_the_type_is_named() {
        let spec = |dtype| TensorSpec::new(dtype, Shape::new(&[2]).unwrap()).unwrap();
        let bytes: Vec<u8> = [7_u32, 9].iter().flat_map(|word| word.to_ne_bytes()).collect();
        let filled = Array::filled(&spec(Dtype::U32), &mut |target| {
            target.copy_from_slice(&bytes);
            Ok(())
        });
        assert_eq!(filled.unwrap().as_words().unwrap().values(), [7, 9]);
        assert!(
            Array::filled(&spec(Dtype::F64), &mut |_| Ok(())).unwrap_err().to_string().contains("float64")
        );
    }
}
