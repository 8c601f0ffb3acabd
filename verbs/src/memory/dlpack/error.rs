//! The error of DLPack tensors.

use super::structures::DlDataType;

/// Why a tensor of DLPack can't be taken over or made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DlpackError {
    /// Memory that the processor does not read.
    #[error("memory of DLPack device type {0}, which is no host memory")]
    Device(i32),
    /// An impossible number of dimensions.
    #[error("{0} dimensions")]
    Rank(i32),
    /// A dimension of negative length.
    #[error("dimension {dimension} of length {length}")]
    Dimension {
        /// Which one, from 0.
        dimension: usize,
        /// Its length.
        length: i64,
    },
    /// Elements in descending order, which are not supported.
    #[error("dimension {dimension} with stride {stride}")]
    Stride {
        /// Which one, from 0.
        dimension: usize,
        /// Its step.
        stride: i64,
    },
    /// Elements of no whole number of bytes.
    #[error("elements of {bits} bits in {lanes} lanes", bits = .0.bits, lanes = .0.lanes)]
    DataType(DlDataType),
    /// A length that can't be counted.
    #[error("a tensor of more bytes than memory can have")]
    Overflow,
    /// No memory, where there are elements.
    #[error("a null pointer to data, shape or strides")]
    Null,
    /// Elements beyond the end of the memory.
    #[error("a tensor of {needed} bytes in memory of {available}")]
    OutOfBounds {
        /// From the first element to the end of the last.
        needed: usize,
        /// Bytes that there are.
        available: usize,
    },
}
