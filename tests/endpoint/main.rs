//! The endpoint and the transport as their users see them: real sockets, the software device, two ends in one process
//! or in two.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "tests"
)]

mod blocking;
mod isolation;
mod logs;
mod negotiation;
mod observability;
mod send_in_place;
mod shared_receive;
mod stream;
mod tonic_over_rdma;
mod tuning;

#[allow(dead_code, reason = "each test crate uses its part")]
#[path = "../support/child.rs"]
mod child;
#[allow(dead_code, reason = "each test crate uses its part")]
#[path = "../support/support.rs"]
mod support;
