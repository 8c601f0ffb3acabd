//! Strides: the distances between elements.

use std::fmt;

use super::Shape;

/// Distance between neighbouring elements along each dimension, in elements. It is 0 where one element is repeated, and never
/// negative.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Strides {
    rank: usize,
    steps: [u64; Shape::MAX_RANK],
}

impl Strides {
    /// Makes the strides of elements that lie one after the other, the last dimension fastest.
    ///
    /// ```
    /// use tonic_rdma_tensor::{Shape, Strides};
    ///
    /// assert_eq!(Strides::row_major(&Shape::new(&[2, 3, 4])?).steps(), [12, 4, 1]);
    /// # Ok::<(), tonic_rdma_tensor::ShapeError>(())
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

    /// Makes strides with these steps, in elements, one for each dimension. Returns `None` if there are more than
    /// [`Shape::MAX_RANK`].
    ///
    /// ```
    /// use tonic_rdma_tensor::{Shape, Strides};
    ///
    /// // A transposed matrix of 2 × 3: its shape is 3 × 2.
    /// let transposed = Strides::new(&[1, 3]).expect("two steps");
    /// assert!(!transposed.is_contiguous(&Shape::new(&[3, 2])?));
    /// # Ok::<(), tonic_rdma_tensor::ShapeError>(())
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

    /// Returns whether the elements of `shape` lie one after the other, the last dimension fastest.
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

    /// Returns the number of elements from the first to the last, both included, or `None` if that does not fit into `u64`.
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

#[cfg(test)]
mod tests {
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
