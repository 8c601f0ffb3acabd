//! Tensors: what they are ([`types`]), how they come from and go to other libraries ([`convert`]), and what is computed
//! of them here ([`reduce_max_f32`]).
//!
//! Elements are in memory as the processor has them, and are sent like that.
//! Never: knows of RPC.
#![forbid(unsafe_code)]

pub mod convert;
mod reduce;
pub mod rendezvous;
pub mod types;

pub use reduce::{reduce_max, reduce_max_f32, reduce_max_f64};
pub use types::{
    AllocateError, Dtype, Element, Metadata, MetadataLayout, Shape, ShapeError, Strides, Tensor, TensorError,
    TensorMut, TensorSpec, UnknownDtype, deserialize, serialize,
};
