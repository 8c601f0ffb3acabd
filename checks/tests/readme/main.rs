//! Runs the code of README and the book.
//!
//! Every block of Rust in README and the book stands here, line by line, in a function that runs (`tests/source/pages/verbatim.rs`
//! compares them). A block that a program repeats is run a thousand times with checked content, in the runtime that the page names
//! or else in the runtime of `#[tokio::main]`. No wait in it may end by a timer; the process's recorder of metrics shows that,
//! so these tests are a program of their own.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod addresses;
mod balance;
mod configured;
mod gather;
mod greeter;
mod put;
mod running;
mod sites;
mod tensors;
mod tls;
mod two_lines;
