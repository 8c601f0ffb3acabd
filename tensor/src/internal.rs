//! The formats, the generated code, and the state machine of the rendezvous, for tests and benches.
//!
//! Nothing here is a promise: any release may change or remove it.

pub use crate::wire::{tensor_frame, tensor_metadata};

/// The state machine of the rendezvous.
pub mod rendezvous {
    pub use crate::rendezvous::*;
}

/// The generated code of `proto/tensor_device.proto`.
pub mod proto {
    pub use crate::control::proto::*;
}
