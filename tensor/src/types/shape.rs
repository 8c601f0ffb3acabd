//! Shapes of tensors: the lengths of the dimensions, the distances between elements, and shape and type
//! together.

use std::fmt;

use crate::error::TensorError;
use crate::types::{Dtype, ValueError};
use crate::wire::tensor_metadata::{MAX_RANK, WireShape};

/// Maximum number of elements of a tensor. An `isize` can count them, as for any memory in Rust.
pub(super) const MAX_ELEMENTS: u64 = isize::MAX as u64;

/// Lengths of the dimensions of a tensor, the slowest first.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Shape(pub(super) WireShape);

impl Shape {
    /// Maximum number of dimensions of a shape.
    pub const MAX_RANK: usize = MAX_RANK;

    /// Makes the shape with dimensions of these lengths, the slowest first. A scalar has no dimensions.
    ///
    /// ```
    /// use tonic_rdma_tensor::Shape;
    ///
    /// let matrix = Shape::new(&[2, 3])?;
    /// assert_eq!((matrix.rank(), matrix.elements()), (2, 6));
    /// # Ok::<(), tonic_rdma_tensor::TensorError>(())
    /// ```
    ///
    /// # Errors
    /// There are more dimensions than [`MAX_RANK`](Self::MAX_RANK), or the product of the lengths that are
    /// not 0 does not fit into `isize`.
    pub fn new(dims: &[u64]) -> Result<Self, TensorError> {
        let dims = WireShape::new(dims).map_err(|_| ValueError::Rank(dims.len()))?;
        Self::try_from(dims)
    }

    /// Returns the lengths of the dimensions, the slowest first.
    pub fn dims(&self) -> &[u64] {
        self.0.as_slice()
    }

    /// Returns the number of dimensions.
    pub fn rank(&self) -> usize {
        self.0.rank()
    }

    /// Returns the number of elements.
    pub fn elements(&self) -> u64 {
        // This can't overflow, because the product of the lengths that are not 0 does not.
        if self.dims().contains(&0) { 0 } else { self.dims().iter().product() }
    }

    /// Returns the number of bytes of all elements, if each has `size` bytes.
    ///
    /// # Errors
    /// That does not fit into `isize`.
    pub fn bytes(&self, size: usize) -> Result<u64, TensorError> {
        let elements = self.elements();
        match elements.checked_mul(size as u64) {
            Some(bytes) if bytes <= MAX_ELEMENTS => Ok(bytes),
            _ => Err(ValueError::Bytes { elements, size }.into()),
        }
    }
}

impl TryFrom<WireShape> for Shape {
    type Error = TensorError;

    fn try_from(dims: WireShape) -> Result<Self, TensorError> {
        let mut lengths = dims.as_slice().iter().filter(|&&length| length != 0);
        let product = lengths.try_fold(1_u64, |product, &length| product.checked_mul(length));
        match product {
            Some(product) if product <= MAX_ELEMENTS => Ok(Self(dims)),
            _ => Err(ValueError::Elements.into()),
        }
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.dims(), f)
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Shape({self})")
    }
}

/// Distance between neighbouring elements along each dimension, in elements. It is 0 where one element is
/// repeated, and never negative.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Strides {
    rank: usize,
    steps: [u64; Shape::MAX_RANK],
}

impl Strides {
    /// Makes the strides of contiguous elements, the last dimension fastest.
    ///
    /// ```
    /// use tonic_rdma_tensor::{Shape, Strides};
    ///
    /// assert_eq!(Strides::row_major(&Shape::new(&[2, 3, 4])?).steps(), [12, 4, 1]);
    /// # Ok::<(), tonic_rdma_tensor::TensorError>(())
    /// ```
    pub fn row_major(shape: &Shape) -> Self {
        let mut strides = Self { rank: shape.rank(), steps: [0; Shape::MAX_RANK] };
        let mut step = 1;
        for (stride, &length) in strides.steps[..shape.rank()].iter_mut().zip(shape.dims()).rev() {
            *stride = step;
            // This can't overflow, because `Shape::new` has checked the product.
            step *= length.max(1);
        }
        strides
    }

    /// Makes strides with these steps, in elements, one for each dimension. Returns `None` if there are more
    /// than [`Shape::MAX_RANK`].
    ///
    /// ```
    /// use tonic_rdma_tensor::{Shape, Strides};
    ///
    /// // A transposed matrix of 2 × 3: its shape is 3 × 2.
    /// let transposed = Strides::new(&[1, 3]).expect("two steps");
    /// assert!(!transposed.is_contiguous(&Shape::new(&[3, 2])?));
    /// # Ok::<(), tonic_rdma_tensor::TensorError>(())
    /// ```
    pub fn new(steps: &[u64]) -> Option<Self> {
        let mut strides = Self { rank: steps.len(), steps: [0; Shape::MAX_RANK] };
        strides.steps.get_mut(..steps.len())?.copy_from_slice(steps);
        Some(strides)
    }

    /// Returns the steps, one for each dimension.
    pub fn steps(&self) -> &[u64] {
        &self.steps[..self.rank]
    }

    /// Returns whether the elements of `shape` are contiguous, the last dimension fastest.
    pub fn is_contiguous(&self, shape: &Shape) -> bool {
        if shape.elements() == 0 {
            return true;
        }
        let mut expected = 1;
        for (&step, &length) in self.steps().iter().zip(shape.dims()).rev() {
            // The step of a dimension of length 1 is never used.
            if length != 1 && step != expected {
                return false;
            }
            expected *= length;
        }
        true
    }

    /// Returns the number of elements from the first to the last, both included, or `None` if that does not
    /// fit into `u64`.
    pub fn extent(&self, shape: &Shape) -> Option<u64> {
        if shape.elements() == 0 {
            return Some(0);
        }
        let mut last = 0_u64;
        for (&step, &length) in self.steps().iter().zip(shape.dims()) {
            last = last.checked_add(step.checked_mul(length - 1)?)?;
        }
        last.checked_add(1)
    }
}

impl fmt::Debug for Strides {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.steps().fmt(f)
    }
}

/// Type and shape of a tensor.
///
/// ```
/// use tonic_rdma_tensor::{Dtype, Shape, TensorSpec};
///
/// let spec = TensorSpec::new(Dtype::F32, Shape::new(&[2, 3])?)?;
/// assert_eq!((spec.to_string().as_str(), spec.bytes()), ("float32[2, 3]", Some(24)));
/// # Ok::<(), tonic_rdma_tensor::TensorError>(())
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
    /// # Ok::<(), tonic_rdma_tensor::TensorError>(())
    /// ```
    ///
    /// # Errors
    /// The length in bytes does not fit into `isize`.
    pub fn new(dtype: Dtype, shape: Shape) -> Result<Self, TensorError> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shape_that_overflows_is_an_error() {
        assert_eq!(Shape::new(&[u64::MAX, 2]), Err(ValueError::Elements.into()));
        assert_eq!(
            Shape::new(&[0, u64::MAX]),
            Err(ValueError::Elements.into()),
            "no stride of it could be counted"
        );
        assert_eq!(Shape::new(&[1 << 32, 1 << 31]), Err(ValueError::Elements.into()));
        assert_eq!(Shape::new(&[1; 17]), Err(ValueError::Rank(17).into()));
        let large = Shape::new(&[1 << 31, 1 << 31]).unwrap();
        assert_eq!(large.bytes(1), Ok(1 << 62));
        assert_eq!(large.bytes(2), Err(ValueError::Bytes { elements: 1 << 62, size: 2 }.into()));
    }

    #[test]
    fn elements_are_counted() {
        let count = |dims: &[u64]| Shape::new(dims).unwrap().elements();
        assert_eq!((count(&[]), count(&[2, 3]), count(&[2, 0, 3]), count(&[1; 16])), (1, 6, 0, 1));
        assert_eq!(Shape::new(&[2, 3]).unwrap().to_string(), "[2, 3]");
    }
}

#[cfg(test)]
mod strides_tests {
    use super::*;

    fn shape(dims: &[u64]) -> Shape {
        Shape::new(dims).unwrap()
    }

    #[test]
    fn row_major_is_contiguous() {
        for dims in [&[][..], &[5], &[2, 3, 4], &[2, 0, 4], &[1, 1], &[0, 1 << 40]] {
            let shape = shape(dims);
            let strides = Strides::row_major(&shape);
            assert!(strides.is_contiguous(&shape), "{dims:?}");
            assert_eq!(strides.extent(&shape), Some(shape.elements()));
        }
        assert_eq!(Strides::row_major(&shape(&[2, 3, 4])).steps(), [12, 4, 1]);
    }

    #[test]
    fn other_orders_are_not_contiguous() {
        let square = shape(&[2, 3]);
        for steps in [[1, 2], [4, 1], [0, 1], [3, 0]] {
            assert!(!Strides::new(&steps).unwrap().is_contiguous(&square), "{steps:?}");
        }
        assert!(Strides::new(&[77, 1]).unwrap().is_contiguous(&shape(&[1, 3])), "one row has no next");
    }

    #[test]
    fn an_extent_that_overflows_is_none() {
        let strides = Strides::new(&[u64::MAX, 1]).unwrap();
        assert_eq!(strides.extent(&shape(&[3, 1])), None);
        assert_eq!(strides.extent(&shape(&[2, 2])), None);
        assert_eq!(Strides::new(&[4, 1]).unwrap().extent(&shape(&[2, 3])), Some(7));
    }
}
