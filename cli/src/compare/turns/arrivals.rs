//! The arrivals of an open loop: the times when operations are due.

use std::time::Duration;

use tonic_rdma_payload::seeded::Draws;

/// The largest number of operations of one turn. The times of all of them are drawn before the turn begins.
pub(crate) const MAX_ARRIVALS: f64 = 1e6;

/// Draws Poisson arrivals in `length`: as many as `rate` (per second) demands, at least one, at times that `seed`
/// determines.
pub(crate) fn poisson_arrivals(rate: f64, length: Duration, seed: u64) -> Vec<Duration> {
    let count = (rate * length.as_secs_f64()).round().clamp(1.0, MAX_ARRIVALS) as usize;
    let mut draws = Draws::new(seed);
    let mut at = 0.0;
    let places: Vec<f64> = (0..count)
        .map(|_| {
            at += draws.gap();
            at
        })
        .collect();
    // A Poisson process with a known number of arrivals is a Poisson process scaled to its length.
    let end = at + draws.gap();
    places.iter().map(|place| length.mul_f64(place / end)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrivals_match_the_rate_and_are_in_order_within_the_turn() {
        let length = Duration::from_millis(500);
        for (rate, count) in [(1000.0, 500), (0.1, 1), (2e6, 1_000_000)] {
            let arrivals = poisson_arrivals(rate, length, 3);
            assert_eq!(arrivals.len(), count);
            assert!(arrivals.is_sorted() && arrivals.iter().all(|place| *place <= length));
        }
    }

    #[test]
    fn arrivals_follow_their_seed_and_a_poisson_process() {
        let length = Duration::from_secs(1);
        let arrivals = poisson_arrivals(10_000.0, length, 3);
        assert_eq!(arrivals, poisson_arrivals(10_000.0, length, 3));
        assert_ne!(arrivals, poisson_arrivals(10_000.0, length, 4));
        // The share of exponential gaps that are shorter than the mean is 1 − 1/e. Of regular gaps it is about one
        // half, or none.
        let short =
            arrivals.windows(2).filter(|pair| (pair[1] - pair[0]) < Duration::from_micros(100)).count();
        assert!((6_100..6_550).contains(&short), "{short} of 9999");
    }
}
