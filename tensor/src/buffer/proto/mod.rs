//! The generated code of `tensor/proto/tonic_rdma/buffer.proto`.
#![allow(
    missing_docs,
    missing_debug_implementations,
    unreachable_pub,
    clippy::all,
    reason = "generated code"
)]

include!("tonic_rdma.buffer.v1.rs");
