//! Counts the waits of this process that only the safety net ended, by the library's metric.

use std::sync::LazyLock;

use metrics_util::debugging::{DebugValue, DebuggingRecorder, Snapshotter};

const NAPS: &str = "tonic_rdma_tensor_naps_total";

static METRICS: LazyLock<Snapshotter> = LazyLock::new(|| {
    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    metrics::set_global_recorder(recorder).unwrap();
    snapshotter
});

/// Starts the count.
pub(crate) fn begin() {
    waits();
}

/// Returns the count since the last call.
pub(crate) fn waits() -> u64 {
    // A snapshot resets every counter.
    let metrics = METRICS.snapshot().into_vec();
    let naps = metrics.iter().filter(|(key, ..)| key.key().name() == NAPS);
    naps.map(|(.., value)| if let DebugValue::Counter(count) = value { *count } else { 0 }).sum()
}
