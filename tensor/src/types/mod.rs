//! Tensors: element types, shapes, and memory with elements in it.
//!
//! ```text
//!  Dtype, Shape ──▶ TensorSpec ──▶ Metadata        type and shape, and the description that a peer needs
//!                       │
//!      TensorMut ───────┴── freeze ──▶ Tensor      one owner: &mut [T]; then many: &[T], slices
//!                                        │ serialize, deserialize
//!                                        ▼
//!                                      Bytes       for elements of variable length, or not contiguous
//! ```
//!
//! Every tensor is valid: its constructor checks spec, strides and memory against each other. One check comes
//! later: reading the elements of a `bool` tensor checks that its bytes are 0 or 1.

mod dtype;
mod metadata;
mod shape;
mod tensor;
mod tensor_mut;
#[cfg(test)]
mod tests;

pub use dtype::{Dtype, Element};
pub use metadata::{Metadata, MetadataLayout};
pub use shape::{Shape, Strides, TensorSpec};
pub use tensor::Tensor;
pub use tensor_mut::TensorMut;

use crate::error::{TensorError, TensorErrorKind};
use shape::MAX_ELEMENTS;

/// A fault of a type, a shape or a tensor, or of an operation on a tensor. Specs are boxed because a shape is
/// large and an error is rare.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ValueError {
    #[error("unknown tensor type with code {0}")]
    UnknownCode(u16),
    #[error("unknown tensor type `{0}`")]
    UnknownName(String),
    #[error("a tensor of {0} dimensions, more than {max}", max = Shape::MAX_RANK)]
    Rank(usize),
    #[error("a tensor of more than {MAX_ELEMENTS} elements")]
    Elements,
    #[error("a tensor of {elements} elements of {size} bytes each, which is more than {MAX_ELEMENTS} bytes")]
    Bytes { elements: u64, size: usize },
    #[error("{spec} has {expected} bytes, not {bytes}")]
    Length { spec: Box<TensorSpec>, expected: u64, bytes: u64 },
    #[error("elements of {dtype} at address {address:#x}, which is no multiple of {align}", align = dtype.align())]
    Misaligned { dtype: Dtype, address: usize },
    #[error("{spec} with strides {strides:?} does not fit into memory of {available} elements")]
    Strides { spec: Box<TensorSpec>, strides: Box<Strides>, available: u64 },
    #[error("the elements of the tensor are {actual}, not {asked}")]
    WrongDtype { actual: Dtype, asked: Dtype },
    #[error("{0} does not lie in one piece: copy it with `to_contiguous`")]
    NotContiguous(Box<TensorSpec>),
    #[error("{0} where {expected} was needed", expected = if matches!(.0, Dtype::String) { "a type of fixed size" } else { "a type of variable length" })]
    Variable(Dtype),
    #[error("element {index} of {dtype} has no valid value")]
    Value { dtype: Dtype, index: usize },
    #[error("{spec} has no rows {start}..{end}")]
    Slice { spec: Box<TensorSpec>, start: u64, end: u64 },
    #[error("axes {axes:?} do not name each dimension of {spec} once")]
    Axes { spec: Box<TensorSpec>, axes: Vec<usize> },
    #[error("the {layout} form of {spec} does not have {bytes} bytes")]
    Metadata { spec: Box<TensorSpec>, layout: &'static str, bytes: u64 },
    #[error("serialised {spec}: {fault} at element {element}")]
    Serialized { spec: Box<TensorSpec>, element: u64, fault: &'static str },
    #[error("the system has no memory for {0} bytes")]
    Memory(u64),
}

impl From<ValueError> for TensorError {
    fn from(error: ValueError) -> Self {
        let kind = match error {
            ValueError::Misaligned { .. } | ValueError::NotContiguous(_) => TensorErrorKind::Layout,
            ValueError::Memory(_) => TensorErrorKind::NoMemory,
            _ => TensorErrorKind::InvalidArgument,
        };
        Self::new(kind, error.to_string())
    }
}
