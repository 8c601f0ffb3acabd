//! Statistics of measured times.

/// Returns the median of `values`, or 0 if there are none.
pub(crate) fn median(values: &[f64]) -> f64 {
    let sorted = sorted(values);
    match sorted.len() {
        0 => 0.0,
        count => (sorted[(count - 1) / 2] + sorted[count / 2]) / 2.0,
    }
}

/// Returns the least value that is not below 99 % of `values`, or 0 if there are none.
pub(crate) fn p99(values: &[f64]) -> f64 {
    let sorted = sorted(values);
    let rank = (sorted.len() * 99).div_ceil(100);
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or(0.0)
}

/// Returns the geometric mean of positive `values`, or 1 if there are none.
pub(crate) fn geometric_mean(values: &[f64]) -> f64 {
    let logarithms: f64 = values.iter().map(|value| value.ln()).sum();
    if values.is_empty() { 1.0 } else { (logarithms / values.len() as f64).exp() }
}

/// Returns the bytes that the algorithms with the least traffic move for each rank: 2(N−1)/N times the size.
pub(crate) fn bus_bytes(ranks: usize, bytes: u64) -> f64 {
    2.0 * ranks.saturating_sub(1) as f64 / ranks.max(1) as f64 * bytes as f64
}

/// Returns the bus bandwidth in GB/s of an operation that took `micros`. One rank moves nothing, so its bandwidth is 0.
pub(crate) fn bus_gbytes_per_s(ranks: usize, bytes: u64, micros: f64) -> f64 {
    if micros > 0.0 { bus_bytes(ranks, bytes) / micros / 1000.0 } else { 0.0 }
}

fn sorted(values: &[f64]) -> Vec<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn medians_and_percentiles() {
        assert_eq!(
            [median(&[]), median(&[3.0]), median(&[4.0, 1.0, 2.0]), median(&[4.0, 1.0, 2.0, 3.0])],
            [0.0, 3.0, 2.0, 2.5]
        );
        let hundred: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        assert_eq!([p99(&hundred), p99(&hundred[..10]), p99(&[7.0]), p99(&[])], [99.0, 100.0, 7.0, 0.0]);
    }

    #[test]
    fn the_bus_bandwidth_counts_what_the_ring_moves() {
        // 1 MB over 4 ranks: 1.5 MB for each rank.
        assert_eq!(bus_bytes(4, 1_000_000), 1_500_000.0);
        assert_eq!(bus_gbytes_per_s(4, 1_000_000, 1_000.0), 1.5);
        assert_eq!(bus_gbytes_per_s(2, 1_000_000, 1_000.0), 1.0);
        assert_eq!(bus_gbytes_per_s(1, 1_000_000, 1_000.0), 0.0);
        assert_eq!(bus_gbytes_per_s(4, 1_000_000, 0.0), 0.0);
    }

    #[test]
    fn the_geometric_mean_of_ratios() {
        assert!((geometric_mean(&[2.0, 0.5]) - 1.0).abs() < 1e-12);
        assert!((geometric_mean(&[1.0, 8.0, 1.0]) - 2.0).abs() < 1e-12);
        assert_eq!(geometric_mean(&[]), 1.0);
    }

    proptest! {
        #[test]
        fn statistics_lie_within_the_values(values in proptest::collection::vec(0.0..1e9_f64, 1..200)) {
            let least = values.iter().copied().fold(f64::MAX, f64::min);
            let most = values.iter().copied().fold(0.0, f64::max);
            prop_assert!((least..=most).contains(&median(&values)));
            prop_assert!((median(&values)..=most).contains(&p99(&values)));
            let below = values.iter().filter(|value| **value <= p99(&values)).count();
            prop_assert!(below * 100 >= values.len() * 99);
        }
    }
}
