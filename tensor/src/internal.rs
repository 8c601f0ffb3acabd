//! The formats and the generated code, for tests and benches.
//!
//! Nothing here is a promise: any release may change or remove it.

pub use crate::wire::{tensor_frame, tensor_metadata};

/// The generated code of `proto/tensor_device.proto`.
pub mod proto {
    pub use crate::proto::*;
}
