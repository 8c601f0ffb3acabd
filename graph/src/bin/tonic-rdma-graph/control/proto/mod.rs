//! The generated code of `graph/proto/control.proto`.
#![allow(
    missing_docs,
    missing_debug_implementations,
    unreachable_pub,
    clippy::all,
    reason = "generated code"
)]

include!("tonic_rdma.graph.control.v1.rs");
