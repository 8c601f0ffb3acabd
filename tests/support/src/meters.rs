//! A recorder of metrics whose values a test reads.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};
use metrics_util::registry::{AtomicStorage, Registry};

/// A recorder that keeps all values. It is not the process's: [`within`](Self::within) makes it that of a thread.
pub struct Meters(Registry<Key, AtomicStorage>);

impl Default for Meters {
    fn default() -> Self {
        Self(Registry::atomic())
    }
}

impl Meters {
    /// Runs `test`, and records what this thread counts meanwhile.
    pub fn within<T>(&self, test: impl FnOnce() -> T) -> T {
        metrics::with_local_recorder(self, test)
    }

    /// Returns the sum of the counters and gauges of this name that have these labels, among others.
    pub fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let counters = self.0.get_counter_handles().into_iter();
        let counters = counters.map(|(key, count)| (key, count.load(Ordering::SeqCst) as f64));
        let gauges = self.0.get_gauge_handles().into_iter();
        let gauges = gauges.map(|(key, bits)| (key, f64::from_bits(bits.load(Ordering::SeqCst))));
        counters.chain(gauges).filter(|(key, _)| is_of(key, name, labels)).map(|(_, value)| value).sum()
    }

    /// Returns whether there is a counter of this name that has these labels, among others.
    pub fn has_labelled(&self, name: &str, labels: &[(&str, &str)]) -> bool {
        self.0.get_counter_handles().keys().any(|key| is_of(key, name, labels))
    }

    /// Returns whether there is a metric of this name.
    pub fn has(&self, name: &str) -> bool {
        let mut found = false;
        self.0.visit_counters(|key, _| found |= key.name() == name);
        self.0.visit_gauges(|key, _| found |= key.name() == name);
        self.0.visit_histograms(|key, _| found |= key.name() == name);
        found
    }
}

fn is_of(key: &Key, name: &str, labels: &[(&str, &str)]) -> bool {
    let has =
        |(label, value): &(&str, &str)| key.labels().any(|of| (of.key(), of.value()) == (*label, *value));
    key.name() == name && labels.iter().all(has)
}

impl Recorder for Meters {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        self.0.get_or_create_counter(key, |counter| Counter::from_arc(Arc::clone(counter)))
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        self.0.get_or_create_gauge(key, |gauge| Gauge::from_arc(Arc::clone(gauge)))
    }

    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        self.0.get_or_create_histogram(key, |histogram| Histogram::from_arc(Arc::clone(histogram)))
    }
}
