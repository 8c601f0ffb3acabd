//! Conversions from and to arrays of `ndarray`.

use bytes::Bytes;
use ndarray::{Array, ArrayViewD, Dimension, IxDyn, ShapeBuilder};

use crate::{Element, Shape, Strides, Tensor, TensorError, TensorSpec};

impl Tensor {
    /// Returns the elements as an array, in the tensor's memory, with any strides.
    ///
    /// ```
    /// use tonic_rdma_tensor::{Dtype, Shape, Tensor, TensorSpec};
    ///
    /// let spec = TensorSpec::new(Dtype::U8, Shape::new(&[2, 2])?)?;
    /// let tensor = Tensor::copy_from(spec, &[1, 2, 3, 4])?;
    /// assert_eq!(tensor.transpose().as_array::<u8>()?[[0, 1]], 3);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// The elements have another type, or values that their type does not have.
    pub fn as_array<T: Element>(&self) -> Result<ArrayViewD<'_, T>, TensorError> {
        let span = self.span::<T>()?;
        let dims: Vec<usize> = self.shape().dims().iter().map(|&length| length as usize).collect();
        let steps: Vec<usize> = self.strides().steps().iter().map(|&step| step as usize).collect();
        ArrayViewD::from_shape(IxDyn(&dims).strides(IxDyn(&steps)), span).map_err(foreign)
    }

    /// Makes a tensor that takes over the memory of `array`. It copies an array with elements in descending
    /// order (negative strides).
    ///
    /// ```
    /// use ndarray::array;
    /// use tonic_rdma_tensor::Tensor;
    ///
    /// let tensor = Tensor::from_array(array![[1.0_f32, 2.0], [3.0, 4.0]])?;
    /// assert_eq!(tensor.as_slice::<f32>()?, [1.0, 2.0, 3.0, 4.0]);
    /// # Ok::<(), tonic_rdma_tensor::TensorError>(())
    /// ```
    ///
    /// # Errors
    /// The array has more dimensions than [`Shape::MAX_RANK`].
    pub fn from_array<T: Element, D: Dimension>(array: Array<T, D>) -> Result<Self, TensorError> {
        let array = if array.strides().iter().any(|&step| step < 0) {
            // This copies the array into the standard layout.
            array.as_standard_layout().into_owned()
        } else {
            array
        };
        let dims: Vec<u64> = array.shape().iter().map(|&length| length as u64).collect();
        let steps: Vec<u64> = array.strides().iter().map(|&step| step.unsigned_abs() as u64).collect();
        let spec = TensorSpec::new(T::DTYPE, Shape::new(&dims)?)?;
        let strides = Strides::new(&steps).unwrap_or_else(|| Strides::row_major(spec.shape()));
        let (elements, first) = array.into_raw_vec_and_offset();
        let first = first.unwrap_or(0) * size_of::<T>();
        Self::from_strided(spec, strides, Bytes::from_owner(Elements(elements)).slice(first..))
    }
}

/// A vector that can own `Bytes`.
struct Elements<T>(Vec<T>);

impl<T: Element> AsRef<[u8]> for Elements<T> {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }
}

fn foreign(error: ndarray::ShapeError) -> TensorError {
    let reason = format!("ndarray: the tensor's strides are no strides of an array: {error}");
    TensorError::argument(reason).because(error)
}

#[cfg(test)]
mod tests {
    use ndarray::{Array2, Array3, Axis, Slice};

    use super::*;
    use crate::TensorErrorKind;

    fn numbers() -> Array3<f32> {
        Array3::from_shape_fn((2, 3, 4), |(a, b, c)| (100 * a + 10 * b + c) as f32)
    }

    #[test]
    fn conversions_in_both_directions_copy_nothing() {
        let array = numbers();
        let (address, expected) = (array.as_ptr(), array.clone());
        let tensor = Tensor::from_array(array).unwrap();
        assert_eq!(tensor.as_slice::<f32>().unwrap().as_ptr(), address);
        assert_eq!(tensor.as_array::<f32>().unwrap(), expected.view().into_dyn());
    }

    #[test]
    fn strides_are_kept_in_both_directions() {
        let tensor = Tensor::from_array(numbers().reversed_axes()).unwrap();
        assert_eq!(tensor.strides().steps(), [1, 4, 12]);
        assert_eq!(tensor.as_array::<f32>().unwrap(), numbers().reversed_axes().into_dyn());
        let permuted = tensor.permute(&[1, 2, 0]).unwrap().slice(1..3).unwrap();
        let mut expected = numbers().permuted_axes([1, 0, 2]);
        expected.slice_axis_inplace(Axis(0), Slice::from(1..3));
        assert_eq!(permuted.as_array::<f32>().unwrap(), expected.into_dyn());
    }

    #[test]
    fn sliced_and_descending_arrays_convert() {
        let mut part = numbers();
        for (axis, range) in [1..2, 0..2, 1..3].into_iter().enumerate() {
            part.slice_axis_inplace(Axis(axis), Slice::from(range));
        }
        assert_eq!(Tensor::from_array(part.clone()).unwrap().as_array::<f32>().unwrap(), part.into_dyn());
        let mut descending = numbers();
        descending.invert_axis(Axis(1));
        let tensor = Tensor::from_array(descending.clone()).unwrap();
        assert_eq!(tensor.as_array::<f32>().unwrap(), descending.into_dyn());
    }

    #[test]
    fn repeated_elements_and_empty_arrays_convert() {
        let one = Tensor::from_array(Array2::from_elem((1, 1), 7_i64)).unwrap();
        let spec = TensorSpec::new(one.dtype(), Shape::new(&[3, 2]).unwrap()).unwrap();
        let many =
            Tensor::from_strided(spec, Strides::new(&[0, 0]).unwrap(), one.to_bytes().unwrap()).unwrap();
        assert_eq!(many.as_array::<i64>().unwrap(), Array2::from_elem((3, 2), 7).into_dyn());
        let none = Tensor::from_array(Array3::<u8>::zeros((2, 0, 3))).unwrap();
        assert_eq!(none.as_array::<u8>().unwrap().shape(), [2, 0, 3]);
    }

    #[test]
    fn another_type_and_too_many_dimensions_are_errors() {
        let tensor = Tensor::from_array(numbers()).unwrap();
        assert!(
            tensor.as_array::<i32>().unwrap_err().reason().starts_with("the elements of the tensor are ")
        );
        let deep = Array::<u8, _>::zeros(IxDyn(&[1; 17]));
        assert_eq!(Tensor::from_array(deep).unwrap_err().kind(), TensorErrorKind::InvalidArgument);
    }
}
