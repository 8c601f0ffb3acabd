//! The runtimes of tests, and the time limit of a test.

use std::future::Future;
use std::time::Duration;

use tonic_rdma::{Config, PollMode};

use crate::config;

/// The time limit of a test. It is long enough for a busy machine, so a test that takes longer hangs.
const PATIENCE: Duration = Duration::from_secs(120);

/// The kind of a test's runtime.
#[derive(Clone, Copy, Debug)]
pub enum Runtime {
    /// Current thread, idle polling.
    Idle,
    /// Current thread, as tokio builds it.
    CurrentThread,
    /// Two workers.
    MultiThread,
}

impl Runtime {
    /// All kinds.
    pub const ALL: [Self; 3] = [Self::Idle, Self::CurrentThread, Self::MultiThread];

    /// Runs `test` to its end, or fails if it hangs.
    pub fn run<T>(self, test: impl Future<Output = T>) -> T {
        self.run_for_ever(within(test))
    }

    /// Runs `task` without a time limit.
    pub fn run_for_ever<T>(self, task: impl Future<Output = T>) -> T {
        let mut builder = match self {
            Self::MultiThread => tokio::runtime::Builder::new_multi_thread(),
            Self::Idle | Self::CurrentThread => tokio::runtime::Builder::new_current_thread(),
        };
        if matches!(self, Self::Idle) {
            tonic_rdma::runtime::idle_polling(&mut builder);
        }
        builder.worker_threads(2).enable_all().build().unwrap().block_on(task)
    }
}

/// Runs `step` to its end, or fails if it hangs. A long test limits each of its steps with this function.
pub async fn within<T>(step: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, step).await.expect("the test hangs")
}

/// Waits until `condition` returns true. The time limit of the test ends the wait.
pub async fn until(mut condition: impl FnMut() -> bool) {
    while !condition() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Runs `test` in every kind of runtime and with every mode of polling.
pub fn everywhere<F: Future<Output = ()>>(test: impl Fn(Config) -> F) {
    for runtime in Runtime::ALL {
        for mode in [PollMode::Adaptive, PollMode::Event] {
            runtime.run(test(config().poll_mode(mode)));
        }
    }
    Runtime::MultiThread.run(test(config().poll_mode(PollMode::Busy)));
}
