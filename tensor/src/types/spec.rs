//! Type and shape of a tensor, without its content.

use std::fmt;

use super::{Dtype, Shape, ShapeError};

/// Type and shape of a tensor.
///
/// ```
/// use tonic_rdma_tensor::{Dtype, Shape, TensorSpec};
///
/// let spec = TensorSpec::new(Dtype::F32, Shape::new(&[2, 3])?)?;
/// assert_eq!((spec.to_string().as_str(), spec.bytes()), ("float32[2, 3]", Some(24)));
/// # Ok::<(), tonic_rdma_tensor::ShapeError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    dtype: Dtype,
    shape: Shape,
}

impl TensorSpec {
    /// Makes the spec of a tensor of `shape` with elements of `dtype`.
    ///
    /// ```
    /// use tonic_rdma_tensor::{Dtype, Shape, TensorSpec};
    ///
    /// let images = TensorSpec::new(Dtype::U8, Shape::new(&[32, 224, 224, 3])?)?;
    /// let a_number = TensorSpec::new(Dtype::F64, Shape::new(&[])?)?;
    /// # assert_eq!((images.bytes(), a_number.bytes()), (Some(32 * 224 * 224 * 3), Some(8)));
    /// # Ok::<(), tonic_rdma_tensor::ShapeError>(())
    /// ```
    ///
    /// # Errors
    /// [`ShapeError::Bytes`] if the length in bytes does not fit into `isize`.
    pub fn new(dtype: Dtype, shape: Shape) -> Result<Self, ShapeError> {
        shape.bytes(dtype.size().unwrap_or(1))?;
        Ok(Self { dtype, shape })
    }

    /// Returns the type of the elements.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Returns the lengths of the dimensions.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Returns the number of bytes of all elements, or `None` if elements have a variable length.
    pub fn bytes(&self) -> Option<u64> {
        // This can't overflow, because `new` has checked it.
        Some(self.shape.elements() * self.dtype.size()? as u64)
    }
}

impl fmt::Display for TensorSpec {
    /// Writes type and shape, such as `float32[2, 3]`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.dtype, self.shape)
    }
}
