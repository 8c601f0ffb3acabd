//! The generated code of `graph/proto/parts.proto`.
#![allow(
    missing_docs,
    missing_debug_implementations,
    unreachable_pub,
    clippy::all,
    reason = "generated code"
)]

include!("tonic_rdma.graph.v1.rs");
