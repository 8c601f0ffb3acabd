//! Runs one test at a time, to its end, and checks that no wait in it ended by a timer.

use std::error::Error;
use std::future::Future;
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::Duration;

use metrics_util::debugging::{DebugValue, DebuggingRecorder, Snapshotter};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::oneshot;

/// The result of a function with a block of a page.
pub(crate) type Outcome<T = ()> = Result<T, Box<dyn Error + Send + Sync>>;

/// The number of rounds of a block that a program would repeat.
pub(crate) const ROUNDS: u64 = 1000;

/// The time limit of a test. It is long enough for a busy machine, so a test that takes longer hangs.
const PATIENCE: Duration = Duration::from_secs(120);

/// The metric of waits that a timer ended. Each of them takes some 20 ms.
const TIMED_WAITS: &str = "tonic_rdma_tensor_naps_total";
/// The metric of connections. Every test makes some.
const NEGOTIATIONS: &str = "tonic_rdma_negotiations_total";

/// The process has one recorder, so one test at a time writes to it.
static METRICS: LazyLock<Mutex<Snapshotter>> = LazyLock::new(|| {
    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    metrics::set_global_recorder(recorder).unwrap();
    Mutex::new(snapshotter)
});

/// Makes the runtime of `#[tokio::main]`.
pub(crate) fn default_runtime() -> Runtime {
    Builder::new_multi_thread().enable_all().build().unwrap()
}

/// Runs one end on a new thread with its own runtime, like a second process: the two ends poll independently, and must wake one
/// another. Returns a receiver of the result.
pub(crate) fn apart(
    runtime: Runtime,
    end: impl Future<Output = Outcome> + Send + 'static,
) -> oneshot::Receiver<Outcome> {
    let (sender, ended) = oneshot::channel();
    std::thread::spawn(move || sender.send(runtime.block_on(end)));
    ended
}

/// Runs `test` in `runtime`, while no other test runs. Checks that the test made connections, and that no wait ended by a timer.
pub(crate) fn run(runtime: Runtime, test: impl Future<Output = Outcome>) {
    let metrics = METRICS.lock().unwrap_or_else(PoisonError::into_inner);
    // An earlier test that failed may have left counts.
    drop(metrics.snapshot());
    super::addresses::forget();
    let outcome = runtime.block_on(async { tokio::time::timeout(PATIENCE, test).await });
    drop(runtime);
    outcome.expect("the test hangs").unwrap_or_else(|error| panic!("the test failed: {error:?}"));

    let counts = metrics.snapshot().into_vec();
    let count = |name: &str| {
        let of_name = counts.iter().filter(|(key, ..)| key.key().name() == name);
        of_name
            .map(|(.., value)| if let DebugValue::Counter(count) = value { *count } else { 0 })
            .sum::<u64>()
    };
    assert_ne!(count(NEGOTIATIONS), 0, "the metrics of this test were not recorded");
    assert_eq!(count(TIMED_WAITS), 0, "waits that a timer ended");
}
