#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod failures;
mod order;
mod random;
mod support;
mod threads;
