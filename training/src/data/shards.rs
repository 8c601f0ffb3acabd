//! Which samples each rank takes.

use std::ops::Range;

/// Returns the samples of an epoch in their order. It depends on the seed and the epoch alone, so all ranks have the same order.
pub(crate) fn order(samples: usize, seed: u64, epoch: usize) -> Vec<u32> {
    let mut order = vec![0; samples];
    reorder(&mut order, seed, epoch);
    order
}

/// Puts the samples of an epoch in their order, as [`order`] does, into memory that is there. `order` has an element for each sample.
pub(crate) fn reorder(order: &mut [u32], seed: u64, epoch: usize) {
    order.iter_mut().zip(0..).for_each(|(place, sample)| *place = sample);
    // The odd factor (2⁶⁴ divided by the golden ratio) keeps the seeds of the epochs apart.
    let seed = seed.wrapping_add((epoch as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    fastrand::Rng::with_seed(seed).shuffle(order);
}

/// Returns the part of `length` that belongs to a rank. The lengths of two parts differ by one at most.
pub(crate) fn part(length: usize, ranks: usize, rank: usize) -> Range<usize> {
    let bound = |rank: usize| rank * (length / ranks) + rank.min(length % ranks);
    bound(rank)..bound(rank + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_epoch_has_each_sample_once_in_an_order_of_its_own() {
        let first = order(1000, 5, 0);
        assert_eq!(first, order(1000, 5, 0));
        for other in [order(1000, 5, 1), order(1000, 6, 0)] {
            assert_ne!(first, other);
            let mut sorted = other;
            sorted.sort_unstable();
            assert_eq!(sorted, (0..1000).collect::<Vec<u32>>());
        }
    }

    #[test]
    fn the_parts_of_all_ranks_are_the_whole() {
        for length in 0..40 {
            for ranks in 1..10 {
                let parts: Vec<_> = (0..ranks).map(|rank| part(length, ranks, rank)).collect();
                assert_eq!(
                    parts.iter().flat_map(Clone::clone).collect::<Vec<_>>(),
                    (0..length).collect::<Vec<_>>()
                );
                let (least, most) = (length / ranks, length.div_ceil(ranks));
                assert!(parts.iter().all(|part| (least..=most).contains(&part.len())), "{parts:?}");
            }
        }
    }
}
