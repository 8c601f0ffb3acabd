//! Communicators of ranks in one process, over real links. Tests that count or read what the whole process does
//! start a process of their own.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests and their helpers")]

mod child;
mod fusion;
mod operations;
mod order_and_memory;
mod plans;
mod queues;
mod spans;
