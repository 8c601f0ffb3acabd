//! Tests that count the descriptors, mappings, threads and memory of the whole process. They need a process
//! of their own, and run one after another.
#![forbid(unsafe_code)]
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
mod crowd;
mod death;
mod leaks;
mod shortage;
mod sizing;
mod starved;

use std::future::Future;
use std::sync::{Mutex, PoisonError};

use support::{Runtime, within};

/// Runs a test while no other test of this process runs.
fn alone<T>(runtime: Runtime, test: impl Future<Output = T>) -> T {
    alone_in_steps(runtime, within(test))
}

/// Runs a long test like [`alone`]. The test limits the time of each of its steps by [`within`].
fn alone_in_steps<T>(runtime: Runtime, test: impl Future<Output = T>) -> T {
    static PROCESS: Mutex<()> = Mutex::new(());
    let _process = PROCESS.lock().unwrap_or_else(PoisonError::into_inner);
    runtime.run_for_ever(test)
}

mod child {
    /// Does nothing when run as a test. In a child process, plays the role that the parent gave it.
    #[test]
    fn role() {
        let Ok(role) = std::env::var(support::ROLE) else { return };
        match &*role {
            "shortage" => super::shortage::play(),
            "sized" => super::sizing::play(),
            "half-open" => super::crowd::play_half_open(),
            "displaced" => super::crowd::play_displaced(),
            "beside-another-user" => super::crowd::play_beside_another_user(),
            role => match role.split_once(' ') {
                Some(("silent", sources)) => super::crowd::play_silent(sources.parse().unwrap()),
                Some(("another-user", port)) => super::crowd::play_another_user(port.parse().unwrap()),
                Some(("no-answer", kind)) => super::crowd::play_no_answer(kind),
                Some(("idle", port)) => super::starved::play_idle(port.parse().unwrap()),
                Some(("poor", port)) => super::shortage::play_poor(port.parse().unwrap()),
                Some(("stop-half-way", port)) => super::crowd::play_stop_half_way(port.parse().unwrap()),
                _ => support::play(role),
            },
        }
    }
}
