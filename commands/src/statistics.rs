//! Statistics of measured values.

/// Returns the median of `values`, or 0 if there are none. Between two values in the middle it is half-way.
pub fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let sorted = sorted(values);
    match sorted.len() {
        0 => 0.0,
        count => f64::midpoint(sorted[(count - 1) / 2], sorted[count / 2]),
    }
}

/// Returns the least value that is not below this share of `values`, such as 0.99, or 0 if there are none.
pub fn quantile(values: impl IntoIterator<Item = f64>, share: f64) -> f64 {
    let sorted = sorted(values);
    // A share such as 0.99 has no exact form, so that 0.99 × 100 may lie a little above 99.
    let rank = (sorted.len() as f64 * share - 1e-9).ceil().max(1.0) as usize;
    sorted.get(rank.min(sorted.len()).saturating_sub(1)).copied().unwrap_or(0.0)
}

/// Returns the median absolute deviation of `values` from their median, or 0 if there are none.
pub fn deviation(values: &[f64]) -> f64 {
    let middle = median(values.iter().copied());
    median(values.iter().map(|value| (value - middle).abs()))
}

/// Returns the least and the largest of `values`, or `None` if there are none.
pub fn range(values: &[f64]) -> Option<[f64; 2]> {
    let all = || values.iter().copied();
    Some([all().reduce(f64::min)?, all().reduce(f64::max)?])
}

/// Returns the narrowest pair of `values`, as far from the least as from the largest, between which the median
/// of further values lies in at least nine cases of ten, whatever their distribution is. It is the range of up
/// to seven values; of fewer than five the range holds the median in fewer cases. `None` if there are none.
pub fn median_interval(values: &[f64]) -> Option<[f64; 2]> {
    let sorted = sorted(values.iter().copied());
    let last = sorted.len().checked_sub(1)?;
    // A value is below the median as often as a coin shows heads. The median is outside if at most `left` of
    // the coins show heads, or at most `left` show tails.
    let mut left = 0;
    let mut exactly = 0.5_f64.powi(sorted.len() as i32);
    let mut at_most = exactly;
    loop {
        exactly *= (sorted.len() - left) as f64 / (left + 1) as f64;
        at_most += exactly;
        if 2.0 * at_most > 0.1 || 2 * (left + 1) > last {
            return Some([sorted[left], sorted[last - left]]);
        }
        left += 1;
    }
}

/// Returns the geometric mean of positive `values`, or 1 if there are none.
pub fn geometric_mean(values: impl IntoIterator<Item = f64>) -> f64 {
    let logarithms: Vec<f64> = values.into_iter().map(f64::ln).collect();
    if logarithms.is_empty() { 1.0 } else { (logarithms.iter().sum::<f64>() / logarithms.len() as f64).exp() }
}

fn sorted(values: impl IntoIterator<Item = f64>) -> Vec<f64> {
    let mut sorted: Vec<f64> = values.into_iter().collect();
    sorted.sort_by(f64::total_cmp);
    sorted
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn medians_and_quantiles() {
        assert_eq!(
            [median([]), median([3.0]), median([4.0, 1.0, 2.0]), median([4.0, 1.0, 2.0, 3.0])],
            [0.0, 3.0, 2.0, 2.5]
        );
        let hundred = || (1..=100).rev().map(f64::from);
        let p99 = |count| quantile(hundred().take(count), 0.99);
        assert_eq!([p99(100), p99(10), p99(1), p99(0)], [99.0, 100.0, 100.0, 0.0]);
        assert_eq!([0.0, 0.5, 1.0].map(|share| quantile(hundred(), share)), [1.0, 50.0, 100.0]);
    }

    #[test]
    fn the_spread_of_values() {
        assert_eq!((range(&[]), range(&[2.0, 1.0, 3.0])), (None, Some([1.0, 3.0])));
        assert_eq!([&[][..], &[7.0], &[1.0, 2.0, 4.0, 9.0]].map(deviation), [0.0, 0.0, 1.5]);
    }

    #[test]
    fn the_interval_of_a_median_leaves_out_as_many_values_as_chance_allows() {
        assert_eq!(median_interval(&[]), None);
        for (count, left) in [(1, 0), (2, 0), (5, 0), (7, 0), (8, 1), (10, 1), (11, 2), (20, 5), (99, 40)] {
            let values: Vec<f64> = (0..count).rev().map(f64::from).collect();
            let expected = [f64::from(left), f64::from(count - 1 - left)];
            assert_eq!(median_interval(&values), Some(expected), "of {count}");
        }
    }

    #[test]
    fn the_geometric_mean_of_ratios() {
        assert!((geometric_mean([2.0, 0.5]) - 1.0).abs() < 1e-12);
        assert!((geometric_mean([1.0, 8.0, 1.0]) - 2.0).abs() < 1e-12);
        assert_eq!(geometric_mean([]), 1.0);
    }

    proptest! {
        #[test]
        fn statistics_lie_within_the_values(values in proptest::collection::vec(0.0..1e9_f64, 1..200)) {
            let all = || values.iter().copied();
            let p99 = quantile(all(), 0.99);
            let (least, most) = (quantile(all(), 0.0), quantile(all(), 1.0));
            prop_assert!((least..=most).contains(&median(all())));
            prop_assert!((median(all())..=most).contains(&p99));
            let below = values.iter().filter(|value| **value <= p99).count();
            prop_assert!(below * 100 >= values.len() * 99);
        }
    }
}
