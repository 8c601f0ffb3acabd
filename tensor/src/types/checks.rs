//! Checks of bytes against a type and a shape.

use bytemuck::checked::CheckedCastError;

use super::{Dtype, Element, TensorError, TensorSpec};

/// Returns the number of bytes of all elements, and of one element.
///
/// # Errors
/// [`TensorError::Variable`] if the elements have no fixed size.
pub(super) fn fixed_size(spec: &TensorSpec) -> Result<(usize, usize), TensorError> {
    let size = spec.dtype().size().ok_or(TensorError::Variable(spec.dtype()))?;
    Ok((spec.shape().elements() as usize * size, size))
}

/// Checks that elements of this type are asked for as what they are.
pub(super) fn check_dtype<T: Element>(actual: Dtype) -> Result<(), TensorError> {
    let asked = T::DTYPE;
    if actual == asked { Ok(()) } else { Err(TensorError::WrongDtype { actual, asked }) }
}

/// Returns the elements in `bytes`.
pub(super) fn cast<T: Element>(dtype: Dtype, bytes: &[u8]) -> Result<&[T], TensorError> {
    if bytes.is_empty() {
        // An empty slice may have any address, which a cast would refuse.
        return Ok(&[]);
    }
    bytemuck::checked::try_cast_slice(bytes).map_err(|error| cast_error(dtype, bytes, error))
}

/// Returns the error for a failed cast of `bytes`.
pub(super) fn cast_error(dtype: Dtype, bytes: &[u8], error: CheckedCastError) -> TensorError {
    match error {
        CheckedCastError::PodCastError(_) => {
            TensorError::Misaligned { dtype, address: bytes.as_ptr() as usize }
        }
        CheckedCastError::InvalidBitPattern => {
            // Only bool has invalid bit patterns.
            let index = bytes.iter().position(|&byte| byte > 1).unwrap_or(0);
            TensorError::Value { dtype, index }
        }
    }
}

pub(super) fn check_length(spec: &TensorSpec, bytes: &[u8]) -> Result<(), TensorError> {
    let (expected, _) = fixed_size(spec)?;
    if bytes.len() == expected {
        return Ok(());
    }
    Err(TensorError::Length { spec: Box::new(*spec), expected: expected as u64, bytes: bytes.len() as u64 })
}

pub(super) fn check_alignment(spec: &TensorSpec, bytes: &[u8]) -> Result<(), TensorError> {
    let (dtype, address) = (spec.dtype(), bytes.as_ptr() as usize);
    if bytes.is_empty() || address.is_multiple_of(dtype.align()) {
        return Ok(());
    }
    Err(TensorError::Misaligned { dtype, address })
}
