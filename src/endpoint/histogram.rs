//! Histograms of a connection. A value costs a few nanoseconds, because it only counts in its bucket. The buckets
//! are published with the connection's counters, in Prometheus' form of a histogram: counters `NAME_bucket` with
//! the upper bound in the label `le`, a counter `NAME_count`, and a gauge `NAME_sum`. An exporter that takes each
//! value by itself stores it until a thread adds it up, which costs small calls several times as much.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use metrics::Label;
use tonic_rdma_verbs::unstable::lock;

/// Upper bounds of buckets, each with its label.
#[derive(Debug)]
pub(crate) struct Scale {
    bounds: &'static [(u64, &'static str)],
    /// The first bucket for values of so many bits. No two bounds have as many bits, so a value is in this bucket or
    /// in the next.
    by_bits: [u8; 65],
    /// One unit of a value, in the unit of the metric.
    unit: f64,
}

impl Scale {
    const fn new(bounds: &'static [(u64, &'static str)], unit: f64) -> Self {
        let mut by_bits = [0; 65];
        let (mut bits, mut bucket) = (0, 0);
        while bits < by_bits.len() {
            while bucket < bounds.len() && bits_of(bounds[bucket].0) < bits {
                bucket += 1;
            }
            by_bits[bits] = bucket as u8;
            bits += 1;
        }
        Self { bounds, by_bits, unit }
    }

    /// Returns the bucket of a value: the first whose bound it does not exceed.
    fn bucket(&self, value: u64) -> usize {
        let first = usize::from(self.by_bits[bits_of(value)]);
        first + usize::from(self.bounds.get(first).is_some_and(|(bound, _)| *bound < value))
    }
}

const fn bits_of(value: u64) -> usize {
    (u64::BITS - value.leading_zeros()) as usize
}

/// Adds a histogram to the [`Histograms`] of a connection.
macro_rules! histogram {
    ($name:expr, $($key:literal => $value:expr),+; $scale:expr, $of:expr) => {
        $of.add($name, $scale, &[$(($key, $value)),+])
    };
}
pub(crate) use histogram;

/// Values in nanoseconds, for a metric in seconds.
pub(crate) static SECONDS: Scale = Scale::new(
    &[
        (1_000, "0.000001"),
        (2_000, "0.000002"),
        (5_000, "0.000005"),
        (10_000, "0.00001"),
        (20_000, "0.00002"),
        (50_000, "0.00005"),
        (100_000, "0.0001"),
        (200_000, "0.0002"),
        (500_000, "0.0005"),
        (1_000_000, "0.001"),
        (2_000_000, "0.002"),
        (5_000_000, "0.005"),
        (10_000_000, "0.01"),
        (20_000_000, "0.02"),
        (50_000_000, "0.05"),
        (100_000_000, "0.1"),
        (200_000_000, "0.2"),
        (500_000_000, "0.5"),
        (1_000_000_000, "1"),
        (2_000_000_000, "2"),
        (5_000_000_000, "5"),
        (10_000_000_000, "10"),
        (60_000_000_000, "60"),
        (600_000_000_000, "600"),
        (3_600_000_000_000, "3600"),
    ],
    1e-9,
);

/// Lengths in bytes.
pub(crate) static BYTES: Scale = Scale::new(
    &[
        (16, "16"),
        (64, "64"),
        (256, "256"),
        (1 << 10, "1024"),
        (4 << 10, "4096"),
        (16 << 10, "16384"),
        (64 << 10, "65536"),
        (256 << 10, "262144"),
        (1 << 20, "1048576"),
        (4 << 20, "4194304"),
        (16 << 20, "16777216"),
        (64 << 20, "67108864"),
        (256 << 20, "268435456"),
        (1 << 30, "1073741824"),
    ],
    1.0,
);

/// The histogram of one metric with one set of labels.
#[derive(Debug)]
pub(crate) struct Histogram {
    name: &'static str,
    labels: Vec<Label>,
    scale: &'static Scale,
    /// The values in each bucket since the last publication. The last bucket has no bound.
    fresh: Box<[AtomicU64]>,
    sum: AtomicU64,
}

impl Histogram {
    fn new(name: &'static str, scale: &'static Scale, labels: &[(&'static str, &'static str)]) -> Self {
        let labels = labels.iter().map(|(key, value)| Label::from_static_parts(key, value)).collect();
        let fresh = (0..=scale.bounds.len()).map(|_| AtomicU64::new(0)).collect();
        Self { name, labels, scale, fresh, sum: AtomicU64::new(0) }
    }

    /// Counts a value.
    pub(crate) fn record(&self, value: u64) {
        self.fresh[self.scale.bucket(value)].fetch_add(1, Ordering::Relaxed);
        if value > 0 {
            self.sum.fetch_add(value, Ordering::Relaxed);
        }
    }

    /// Adds what came since the last call to the metrics of the process.
    fn publish(&self) {
        let labelled = |le: &'static str| {
            let le = [Label::from_static_parts("le", le)];
            self.labels.iter().cloned().chain(le).collect::<Vec<_>>()
        };
        let bounds = self.scale.bounds.iter().map(|(_, label)| *label).chain(["+Inf"]);
        let sum = self.sum.swap(0, Ordering::Relaxed);
        if sum > 0 {
            let sum = sum as f64 * self.scale.unit;
            metrics::gauge!(format!("{}_sum", self.name), self.labels.clone()).increment(sum);
        }
        let mut count = 0;
        let of_buckets: Vec<_> = (self.fresh.iter().zip(bounds))
            .map(|(bucket, label)| {
                // A bucket has all values up to its bound.
                count += bucket.swap(0, Ordering::Relaxed);
                (label, count)
            })
            .collect();
        if count == 0 {
            return;
        }
        // All buckets are there from the first value on, because a query takes one that is missing as one that
        // has no bound below it. The largest first, so that no reader finds more values in a smaller one.
        for (label, count) in of_buckets.into_iter().rev() {
            metrics::counter!(format!("{}_bucket", self.name), labelled(label)).increment(count);
        }
        metrics::counter!(format!("{}_count", self.name), self.labels.clone()).increment(count);
    }
}

impl Drop for Histogram {
    fn drop(&mut self) {
        self.publish();
    }
}

/// The histograms of one connection.
#[derive(Debug, Default)]
pub(crate) struct Histograms(Mutex<Vec<Arc<Histogram>>>);

impl Histograms {
    /// Adds a histogram with these labels.
    pub(crate) fn add(
        &self,
        name: &'static str,
        scale: &'static Scale,
        labels: &[(&'static str, &'static str)],
    ) -> Arc<Histogram> {
        let added = Arc::new(Histogram::new(name, scale, labels));
        lock(&self.0).push(Arc::clone(&added));
        added
    }

    /// Adds what came since the last call to the metrics of the process.
    pub(crate) fn publish(&self) {
        // A recorder runs code of the application.
        let all = lock(&self.0).clone();
        all.iter().for_each(|histogram| histogram.publish());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use support::Meters;

    #[test]
    fn each_value_is_in_the_buckets_from_its_own_on() {
        let meters = Meters::default();
        meters.within(|| {
            let histograms = Histograms::default();
            let histogram = histogram!("some_seconds", "side" => "client"; &SECONDS, histograms);
            for value in [0, 1_000, 1_001, 3_000_000, 7_200_000_000_000] {
                histogram.record(value);
            }
            histograms.publish();
            let up_to = |le| meters.sum("some_seconds_bucket", &[("le", le), ("side", "client")]);
            let bounds = ["0.000001", "0.000002", "0.002", "0.005", "3600", "+Inf"];
            assert_eq!(bounds.map(up_to), [2.0, 3.0, 3.0, 4.0, 4.0, 5.0]);
            assert_eq!(meters.sum("some_seconds_count", &[("side", "client")]), 5.0);
            histogram.record(2_000_000_000);
            drop((histograms, histogram));
            assert_eq!(meters.sum("some_seconds_count", &[]), 6.0, "what was left at the end");
            let sum = meters.sum("some_seconds_sum", &[]);
            assert!((sum - 7_202.003_002_001).abs() < 1e-9, "{sum}");
        });
    }

    #[test]
    fn buckets_without_a_value_are_there() {
        let meters = Meters::default();
        meters.within(|| {
            let histograms = Histograms::default();
            let histogram = histogram!("some_seconds", "side" => "client"; &SECONDS, histograms);
            histograms.publish();
            assert!(!meters.has("some_seconds_bucket"), "there is no value");
            histogram.record(15_000_000);
            histograms.publish();
        });
        let has = |le| meters.has_labelled("some_seconds_bucket", &[("le", le)]);
        assert!(has("0.000001") && has("0.01") && has("+Inf"));
        assert_eq!(meters.sum("some_seconds_bucket", &[("le", "0.01")]), 0.0);
    }

    #[test]
    fn bounds_are_their_labels() {
        for scale in [&SECONDS, &BYTES] {
            for (bound, label) in scale.bounds {
                let value: f64 = label.parse().unwrap_or_default();
                assert_eq!((value / scale.unit).round() as u64, *bound);
            }
            let bits: Vec<_> = scale.bounds.iter().map(|(bound, _)| bits_of(*bound)).collect();
            assert!(bits.is_sorted_by(|one, next| one < next), "{bits:?}");
            let values = scale.bounds.iter().flat_map(|(bound, _)| [bound - 1, *bound, bound + 1]);
            for value in values.chain([0, u64::MAX]) {
                let bucket = scale.bounds.partition_point(|(bound, _)| *bound < value);
                assert_eq!(scale.bucket(value), bucket, "{value}");
            }
        }
    }
}
