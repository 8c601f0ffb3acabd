//! gRPC calls between peers that need no HTTP/2, as their users see them: with generated code, real sockets
//! and the software device.
#![forbid(unsafe_code)]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "tests"
)]

mod child;
mod contexts;
mod foreign_code;
mod gather_both;
mod gather_limits;
mod gather_mixed;
mod gather_support;
mod in_process;
mod metrics;
mod server_acts;
mod server_end;
mod server_handlers;
mod server_port;
mod server_routes;
mod server_streams;
mod shares;
