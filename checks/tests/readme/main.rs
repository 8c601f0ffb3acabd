//! Runs the code of README and the book.
//!
//! A function here runs every block of Rust in README and the book. `tests/source/pages/verbatim.rs` compares the lines. If a program
//! would repeat a block, the test runs it a thousand times and checks the content, in the runtime that the page names or else in the
//! runtime of `#[tokio::main]`. No wait in a test may end by a timer. The process's recorder of metrics counts such waits, so these
//! tests are a program of their own.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod addresses;
mod balance;
mod collectives;
mod configured;
mod gather;
mod greeter;
mod landed;
mod native;
mod put;
mod running;
mod sites;
mod tensors;
mod tls;
mod two_lines;
