//! `RdmaChannel` as its users see it: to each kind of server, in each kind of runtime.
#![forbid(unsafe_code)]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "tests"
)]

mod calls;
mod child;
mod ends;
mod environment;
mod runtimes;
mod servers;
mod settings;
mod several;
