//! Checks README and the book.
//!
//! Every block of Rust in them stands in this crate, line by line, in a function that runs; `verbatim` compares them. What repeats
//! is run a thousand times, in the runtime that the page names or else in that of `#[tokio::main]`, with checked content, and no
//! wait in it may have ended by a timer.
//!
//! `links` follows every link. `metrics`, `variables` and `messages` compare lists with the code, `figures` README's tables with
//! the files that they are copied from. Command lines are checked where
//! their parser is, in the package of the command.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod addresses;
mod balance;
mod configured;
mod figures;
mod gather;
mod greeter;
mod links;
mod messages;
mod metrics;
mod pages;
mod put;
mod running;
mod sites;
mod tensors;
mod tls;
mod two_lines;
mod variables;
mod verbatim;
