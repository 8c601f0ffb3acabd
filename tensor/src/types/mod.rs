//! Tensors: element types, shapes, and memory with elements in it.
//!
//! ```text
//!  Dtype, Shape ──▶ TensorSpec ──▶ Metadata        type and shape, and the description that a peer needs
//!                       │
//!      TensorMut ───────┴── freeze ──▶ Tensor      one owner: &mut [T]; then many: &[T], slices, permutations
//!                                        │ serialize, deserialize
//!                                        ▼
//!                                      Bytes       for elements of variable length, or not contiguous
//! ```
//!
//! Every tensor is valid: its constructor checks spec, strides and memory against each other. One check comes later: reading
//! the elements of a `bool` tensor checks that its bytes are 0 or 1.

mod dtype;
mod error;
mod metadata;
mod shape;
mod tensor;
mod tensor_mut;
#[cfg(test)]
mod tests;

pub use dtype::{Dtype, Element};
pub(crate) use error::ValueError;
pub use metadata::{Metadata, MetadataLayout};
pub use shape::{Shape, Strides, TensorSpec};
pub use tensor::Tensor;
pub use tensor_mut::TensorMut;
