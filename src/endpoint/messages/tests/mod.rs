//! Message connections over the software device, both sides in one process.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]

mod ends;
mod fetching;
mod negotiation;
mod order;
mod side;
mod waiting;
