//! The transfer of variables and gradients: by gRPC calls and by static slots, with the check of what arrives.

pub(crate) mod check;
pub(crate) mod grpc;
pub(crate) mod shard;
pub(crate) mod slots;
pub(crate) mod variables;
