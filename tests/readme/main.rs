//! Every block of Rust in README (and in `docs/book`, where there is one) stands in this crate, line by line, in a function that
//! runs; `verbatim` compares them. What repeats is run a thousand times, in the runtime that the page names or else in that of
//! `#[tokio::main]`, with checked content, and no wait in it may have ended by a timer.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod addresses;
mod balance;
mod gather;
mod greeter;
mod put;
mod running;
mod sites;
mod tensors;
mod tls;
mod two_lines;
mod verbatim;
