//! The byte stream and the transport as their users see them: with real sockets and the software device, and
//! with both ends in one process or in two. Tests that need a process of their own are in `tests/alone` and
//! `tests/steady_state`.
#![forbid(unsafe_code)]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "tests"
)]

mod allocation_sites;
mod child;
mod endpoint;
mod features;
mod gather;
mod tls;
