//! Runs one test at a time, to its end, and demands that nothing in it waited for a timer.

use std::error::Error;
use std::future::Future;
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::Duration;

use metrics_util::debugging::{DebugValue, DebuggingRecorder, Snapshotter};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::oneshot;

/// What a `main` of a page's returns.
pub(crate) type Outcome<T = ()> = Result<T, Box<dyn Error + Send + Sync>>;

/// How often what repeats is repeated.
pub(crate) const TURNS: u64 = 1000;

/// Long enough for any test on a busy machine; a test that takes longer hangs.
const PATIENCE: Duration = Duration::from_secs(120);

/// Waits that the safety net ended: each took some 20 ms.
const NAPS: &str = "tonic_rdma_tensor_naps_total";
/// Connections, of which there are some in every test.
const NEGOTIATIONS: &str = "tonic_rdma_negotiations_total";

/// The process has one recorder, so one test at a time writes to it.
static METRICS: LazyLock<Mutex<Snapshotter>> = LazyLock::new(|| {
    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    metrics::set_global_recorder(recorder).unwrap();
    Mutex::new(snapshotter)
});

/// What `#[tokio::main]` makes.
pub(crate) fn default_runtime() -> Runtime {
    Builder::new_multi_thread().enable_all().build().unwrap()
}

/// Runs one end in a runtime of its own, as if it were another process: the two ends then poll by themselves, and have to wake one
/// another. Says how it ended.
pub(crate) fn apart(
    runtime: Runtime,
    end: impl Future<Output = Outcome> + Send + 'static,
) -> oneshot::Receiver<Outcome> {
    let (tell, ended) = oneshot::channel();
    std::thread::spawn(move || tell.send(runtime.block_on(end)));
    ended
}

/// Runs `test` in this runtime.
pub(crate) fn run(runtime: Runtime, test: impl Future<Output = Outcome>) {
    let metrics = METRICS.lock().unwrap_or_else(PoisonError::into_inner);
    // What an earlier test left that failed.
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
    assert_eq!(count(NAPS), 0, "waits that a timer ended");
}
