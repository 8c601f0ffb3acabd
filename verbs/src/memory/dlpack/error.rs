//! The error of DLPack tensors.

use super::structures::DlDataType;

/// The reason why a tensor of DLPack can't be imported or exported.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DlpackError {
    /// The processor can't read the memory.
    #[error("memory of DLPack device type {0}, which is no host memory")]
    Device(i32),
    /// The number of dimensions is negative or too large.
    #[error("{0} dimensions")]
    Rank(i32),
    /// A dimension has a negative length.
    #[error("dimension {dimension} of length {length}")]
    Dimension {
        /// Number of the dimension, from 0.
        dimension: usize,
        /// Length of the dimension.
        length: i64,
    },
    /// The elements of a dimension are in descending order, which is not supported.
    #[error("dimension {dimension} with stride {stride}")]
    Stride {
        /// Number of the dimension, from 0.
        dimension: usize,
        /// Step of the dimension.
        stride: i64,
    },
    /// The size of an element is not a whole number of bytes.
    #[error("elements of {bits} bits in {lanes} lanes", bits = .0.bits, lanes = .0.lanes)]
    DataType(DlDataType),
    /// The length of the tensor overflows.
    #[error("a tensor of more bytes than memory can have")]
    Overflow,
    /// A pointer is null although there are elements, or there is not one stride for each dimension.
    #[error("a null pointer to data, shape or strides")]
    Null,
    /// Elements lie beyond the end of the memory.
    #[error("a tensor of {needed} bytes in memory of {available}")]
    OutOfBounds {
        /// Bytes from the first element to the end of the last.
        needed: usize,
        /// Bytes of the memory.
        available: usize,
    },
}
