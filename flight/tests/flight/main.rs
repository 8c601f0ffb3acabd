//! Tests of Flight over tonic-rdma: batches of many types, there and back, with stock peers, with errors and
//! limits.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs, reason = "tests")]

mod batches;
mod calls;
mod errors;
mod malformed;
mod peers;
mod service;
mod stubs;
