//! A gRPC-compatible RDMA transport for tonic.

pub mod verbs;
