//! The layout of a tensor's elements.

use super::error::DlpackError;
use super::structures::DlDataType;

/// The layout of elements in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Type of the elements.
    pub dtype: DlDataType,
    /// Length of each dimension.
    pub shape: Vec<u64>,
    /// Step along each dimension, in elements.
    pub strides: Vec<u64>,
}

impl Layout {
    /// Returns the bytes from the first element to the end of the last.
    pub(crate) fn bytes(&self) -> Result<usize, DlpackError> {
        let size = self.dtype.size().ok_or(DlpackError::DataType(self.dtype))?;
        if self.shape.len() != self.strides.len() {
            return Err(DlpackError::Null);
        }
        if self.shape.contains(&0) {
            return Ok(0);
        }
        let mut last = Some(0_u64);
        for (length, stride) in self.shape.iter().zip(&self.strides) {
            last = last.and_then(|last| last.checked_add(stride.checked_mul(length - 1)?));
        }
        let bytes = last.and_then(|last| last.checked_add(1)?.checked_mul(size as u64));
        bytes
            .filter(|&bytes| bytes <= isize::MAX as u64)
            .map(|bytes| bytes as usize)
            .ok_or(DlpackError::Overflow)
    }
}

/// Returns the strides of a row-major tensor without gaps.
pub(crate) fn row_major(shape: &[u64]) -> Result<Vec<u64>, DlpackError> {
    let mut strides = vec![0; shape.len()];
    let mut step = 1_u64;
    for (stride, &length) in strides.iter_mut().zip(shape).rev() {
        *stride = step;
        step = step.checked_mul(length.max(1)).ok_or(DlpackError::Overflow)?;
    }
    Ok(strides)
}
