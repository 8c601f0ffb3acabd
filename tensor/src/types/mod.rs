//! Tensors: element types, shapes, and memory with elements in it.
//!
//! ```text
//!  Dtype, Shape ──▶ TensorSpec ──▶ Metadata        what there is, and what a peer has to know of it
//!                       │
//!      TensorMut ───────┴── freeze ──▶ Tensor      one owner: &mut [T]; then many: &[T], slices, permutations
//!                                        │ serialize, deserialize
//!                                        ▼
//!                                      Bytes       elements of variable length, or not one after the other
//! ```
//!
//! Every tensor that exists is in order: its spec, its strides and its memory were checked against one another when it was
//! made. Only whether the bytes of a `bool` are 0 or 1 is looked at later, when its elements are read.

mod checks;
mod copy;
mod dtype;
mod element;
mod error;
mod metadata;
mod serialize;
mod shape;
mod spec;
mod storage;
mod strides;
mod tensor;
mod tensor_mut;
#[cfg(test)]
mod tests;
mod view;

pub use dtype::{Dtype, UnknownDtype};
pub use element::Element;
pub use error::TensorError;
pub use metadata::{Metadata, MetadataLayout};
pub use serialize::{deserialize, serialize};
pub use shape::{Shape, ShapeError};
pub use spec::TensorSpec;
pub use strides::Strides;
pub use tensor::Tensor;
pub use tensor_mut::{AllocateError, TensorMut};
