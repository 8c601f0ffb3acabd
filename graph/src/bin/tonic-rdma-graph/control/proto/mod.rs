//! The generated code of `graph/proto/part.proto`.
#![allow(
    missing_docs,
    missing_debug_implementations,
    unreachable_pub,
    clippy::all,
    reason = "generated code"
)]

include!("tonic_rdma.graph.part.v1.rs");
