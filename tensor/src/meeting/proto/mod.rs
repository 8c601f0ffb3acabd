//! The generated code of `proto/meeting.proto`.
#![allow(
    missing_docs,
    missing_debug_implementations,
    unreachable_pub,
    clippy::all,
    reason = "generated code"
)]

include!("tonic_rdma.meeting.v1.rs");
