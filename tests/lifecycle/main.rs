//! Connections come and go, by the thousand, by death: nothing is left behind. These tests count what the whole
//! process holds, so they run one after the other.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "tests"
)]

mod churn;
mod cost;
mod death;
mod hang;
mod last_words;

#[allow(dead_code, reason = "each test crate uses its part")]
#[path = "../support/child.rs"]
mod child;
#[allow(dead_code, reason = "each test crate uses its part")]
#[path = "../support/support.rs"]
mod support;

use std::future::Future;
use std::sync::{Mutex, PoisonError};

/// Runs a test with the process to itself.
fn alone<T>(runtime: support::Runtime, test: impl Future<Output = T>) -> T {
    static PROCESS: Mutex<()> = Mutex::new(());
    let _process = PROCESS.lock().unwrap_or_else(PoisonError::into_inner);
    runtime.run(test)
}
