//! A gRPC-compatible RDMA transport for tonic.

pub mod memory;
pub mod verbs;
