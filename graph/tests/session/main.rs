//! Sessions of parts on the software device: in one process, and in several.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout, reason = "tests")]

mod chain;
mod child;
mod ends;
mod modes;
mod queues;
