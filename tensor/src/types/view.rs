//! Views: slices and permutations, which share a tensor's memory.

use std::ops::Range;

use super::{Shape, Strides, Tensor, TensorError, TensorSpec};

impl Tensor {
    /// Returns the rows of `range`. The first dimension counts rows. The result shares the memory.
    ///
    /// # Errors
    /// The range goes beyond the first dimension or backwards, or the tensor is a scalar, which has no rows.
    pub fn slice(&self, range: Range<u64>) -> Result<Self, TensorError> {
        let Range { start, end } = range;
        let within = self.shape().dims().first().filter(|&&rows| start <= end && end <= rows);
        if within.is_none() {
            return Err(TensorError::Slice { spec: Box::new(self.spec), start, end });
        }
        let (mut dims, rank) = ([0; Shape::MAX_RANK], self.shape().rank());
        dims[..rank].copy_from_slice(self.shape().dims());
        dims[0] = end - start;
        let spec = TensorSpec::new(self.dtype(), Shape::new(&dims[..rank])?)?;
        // A slice without elements starts at the tensor's start, because its first row may lie beyond the end.
        let skipped = if spec.shape().elements() == 0 { 0 } else { start * self.strides.steps()[0] };
        let storage = self.storage.clone();
        Ok(Self { spec, strides: self.strides, offset: self.offset + skipped as usize, storage })
    }

    /// Returns the tensor with its dimensions in another order: dimension `i` of the result is dimension `axes[i]` of this tensor.
    /// The result shares the memory.
    ///
    /// # Errors
    /// [`TensorError::Axes`] if `axes` does not name each dimension once.
    pub fn permute(&self, axes: &[usize]) -> Result<Self, TensorError> {
        let rank = self.shape().rank();
        let mut seen = [false; Shape::MAX_RANK];
        let valid = axes.len() == rank
            && axes.iter().all(|&axis| axis < rank && !std::mem::replace(&mut seen[axis], true));
        if !valid {
            let axes = axes.iter().copied().take(Shape::MAX_RANK).collect();
            return Err(TensorError::Axes { spec: Box::new(self.spec), axes });
        }
        let (mut dims, mut steps) = ([0; Shape::MAX_RANK], [0; Shape::MAX_RANK]);
        for (place, &axis) in axes.iter().enumerate() {
            dims[place] = self.shape().dims()[axis];
            steps[place] = self.strides.steps()[axis];
        }
        let spec = TensorSpec::new(self.dtype(), Shape::new(&dims[..rank])?)?;
        let strides = Strides::new(&steps[..rank]).unwrap_or(self.strides);
        Ok(Self { spec, strides, offset: self.offset, storage: self.storage.clone() })
    }

    /// Returns the tensor with its dimensions in reverse order. The result shares the memory.
    pub fn transpose(&self) -> Self {
        let mut axes = [0; Shape::MAX_RANK];
        let axes = &mut axes[..self.shape().rank()];
        for (place, axis) in axes.iter_mut().rev().enumerate() {
            *axis = place;
        }
        // The axes name each dimension once, so this does not fail.
        self.permute(axes).unwrap_or_else(|_| self.clone())
    }
}
