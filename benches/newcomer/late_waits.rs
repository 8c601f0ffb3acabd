//! Counts the late waits of this process, by the library's metric. A wait is late if a timer ended it, because no wake-up came.

use std::sync::LazyLock;

use metrics_util::debugging::{DebugValue, DebuggingRecorder, Snapshotter};

const LATE_WAITS: &str = "tonic_rdma_tensor_naps_total";

static METRICS: LazyLock<Snapshotter> = LazyLock::new(|| {
    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    metrics::set_global_recorder(recorder).unwrap();
    snapshotter
});

/// Starts the count.
pub(crate) fn begin() {
    count();
}

/// Returns the count since the last call.
pub(crate) fn count() -> u64 {
    // A snapshot resets every counter.
    let metrics = METRICS.snapshot().into_vec();
    let waits = metrics.iter().filter(|(key, ..)| key.key().name() == LATE_WAITS);
    waits.map(|(.., value)| if let DebugValue::Counter(count) = value { *count } else { 0 }).sum()
}
