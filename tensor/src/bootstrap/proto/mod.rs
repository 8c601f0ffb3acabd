//! The generated code of `proto/bootstrap.proto`.
#![allow(
    missing_docs,
    missing_debug_implementations,
    unreachable_pub,
    clippy::all,
    reason = "generated code"
)]

include!("tonic_rdma.bootstrap.v1.rs");
