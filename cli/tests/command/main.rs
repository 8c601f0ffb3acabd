//! Tests of the command as a process: its output and its exit status.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stderr, reason = "tests")]

mod about;
mod against;
mod bridge;
mod bridge_processes;
mod call;
mod compare;
mod conditions;
mod devices;
mod diff;
mod direction;
mod hosts;
mod input;
#[path = "../../../commands/tests/support/listening.rs"]
mod listening;
mod parameter_server;
mod probe;
mod process;
