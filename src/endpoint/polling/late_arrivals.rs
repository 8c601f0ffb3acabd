//! Watched values that no completion announced, although the poller slept.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::watched::UnannouncedArrival;
use tonic_rdma_verbs::internal::lock;

/// The metric of values that only the time limit of a sleep found. Each of them was found up to 20 ms late.
const METRIC: &str = "tonic_rdma_tensor_naps_total";
/// Longest time between a value and the completion that announces the value. The peer may not get a core in between.
const PATIENCE: Duration = Duration::from_secs(10);

/// Values that arrived while the poll task slept, and whose completion may still come: a peer may have been stopped
/// between the value and the request for the completion.
#[derive(Debug, Default)]
pub(super) struct LateArrivals(Mutex<Vec<(UnannouncedArrival, Instant)>>);

impl LateArrivals {
    /// Returns whether no value waits for its completion.
    pub(super) fn is_empty(&self) -> bool {
        lock(&self.0).is_empty()
    }

    /// Adds `fresh` values, and counts those whose completion is overdue.
    pub(super) fn add(&self, fresh: Vec<UnannouncedArrival>) {
        let now = Instant::now();
        let mut all = lock(&self.0);
        all.extend(fresh.into_iter().map(|arrival| (arrival, now)));
        all.retain(|(arrival, since)| {
            let is_overdue = !arrival.asked || now.saturating_duration_since(*since) > PATIENCE;
            if is_overdue && !arrival.was_announced() {
                metrics::counter!(METRIC).increment(1);
                tracing::debug!(
                    asked = arrival.asked,
                    "a word came without the completion that should tell of it"
                );
            }
            !is_overdue && !arrival.was_announced()
        });
    }
}
