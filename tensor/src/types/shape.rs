//! Shapes of tensors.

use std::fmt;

use crate::wire::tensor_metadata::{MAX_RANK, WireShape};

/// Maximum number of elements of a tensor. An `isize` can count them, as for any memory in Rust.
const MAX_ELEMENTS: u64 = isize::MAX as u64;

/// Lengths of the dimensions of a tensor, the slowest first.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Shape(WireShape);

/// A shape that no tensor can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShapeError {
    /// There are too many dimensions.
    #[error("a tensor of {0} dimensions, more than {max}", max = Shape::MAX_RANK)]
    Rank(usize),
    /// There are too many elements.
    #[error("a tensor of more than {MAX_ELEMENTS} elements")]
    Elements,
    /// There are too many bytes.
    #[error("a tensor of {elements} elements of {size} bytes each, which is more than {MAX_ELEMENTS} bytes")]
    Bytes {
        /// Number of elements.
        elements: u64,
        /// Bytes of one element.
        size: usize,
    },
}

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
    /// # Ok::<(), tonic_rdma_tensor::ShapeError>(())
    /// ```
    ///
    /// # Errors
    /// There are more dimensions than [`MAX_RANK`](Self::MAX_RANK), or the product of the lengths that are not 0 does not fit
    /// into `isize`.
    pub fn new(dims: &[u64]) -> Result<Self, ShapeError> {
        let dims = WireShape::new(dims).map_err(|_| ShapeError::Rank(dims.len()))?;
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
    /// [`ShapeError::Bytes`] if that does not fit into `isize`.
    pub fn bytes(&self, size: usize) -> Result<u64, ShapeError> {
        let elements = self.elements();
        match elements.checked_mul(size as u64) {
            Some(bytes) if bytes <= MAX_ELEMENTS => Ok(bytes),
            _ => Err(ShapeError::Bytes { elements, size }),
        }
    }

    /// Returns the wire form.
    pub(super) fn to_wire(self) -> WireShape {
        self.0
    }
}

impl TryFrom<WireShape> for Shape {
    type Error = ShapeError;

    fn try_from(dims: WireShape) -> Result<Self, ShapeError> {
        let mut lengths = dims.as_slice().iter().filter(|&&length| length != 0);
        let product = lengths.try_fold(1_u64, |product, &length| product.checked_mul(length));
        match product {
            Some(product) if product <= MAX_ELEMENTS => Ok(Self(dims)),
            _ => Err(ShapeError::Elements),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shape_that_overflows_is_an_error() {
        assert_eq!(Shape::new(&[u64::MAX, 2]), Err(ShapeError::Elements));
        assert_eq!(Shape::new(&[0, u64::MAX]), Err(ShapeError::Elements), "no stride of it could be counted");
        assert_eq!(Shape::new(&[1 << 32, 1 << 31]), Err(ShapeError::Elements));
        assert_eq!(Shape::new(&[1; 17]), Err(ShapeError::Rank(17)));
        let large = Shape::new(&[1 << 31, 1 << 31]).unwrap();
        assert_eq!(large.bytes(1), Ok(1 << 62));
        assert_eq!(large.bytes(2), Err(ShapeError::Bytes { elements: 1 << 62, size: 2 }));
    }

    #[test]
    fn elements_are_counted() {
        let count = |dims: &[u64]| Shape::new(dims).unwrap().elements();
        assert_eq!((count(&[]), count(&[2, 3]), count(&[2, 0, 3]), count(&[1; 16])), (1, 6, 0, 1));
        assert_eq!(Shape::new(&[2, 3]).unwrap().to_string(), "[2, 3]");
    }
}
