//! Blocks of one length that lie anywhere in memory, like the blocks of the paged key-value caches of language models.

use crate::workload::Message;
use tonic_rdma_payload::seeded::Draws;

/// Number of blocks of an operation, and length of each in bytes.
pub(crate) const BLOCKS: usize = 4096;
const BLOCK: u64 = 16 << 10;

/// Number of places for blocks, each as long as a block: two for each block, so that half of them stay empty.
pub(crate) const PLACES: usize = 2 * BLOCKS;

/// Returns the only operation: a message for each block.
pub(super) fn operation() -> Vec<Message> {
    vec![vec![BLOCK]; BLOCKS]
}

/// Returns the place of each block of an operation, as an offset in memory of [`PLACES`] blocks. `seed` determines the
/// places, which are distinct and in no order.
pub(crate) fn scattered(seed: u64) -> Vec<u64> {
    let mut places: Vec<u64> = (0..PLACES as u64).collect();
    let mut draws = Draws::new(seed);
    for index in 0..BLOCKS {
        places.swap(index, index + draws.choice(PLACES - index));
    }
    places.truncate(BLOCKS);
    places.into_iter().map(|place| place * BLOCK).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_within_the_room_distinct_and_in_no_order() {
        let offsets = scattered(1);
        assert_eq!(offsets, scattered(1));
        assert_ne!(offsets, scattered(2));
        assert!(offsets.iter().all(|offset| offset % BLOCK == 0 && offset + BLOCK <= PLACES as u64 * BLOCK));
        let neighbours = offsets.windows(2).filter(|pair| pair[1] == pair[0] + BLOCK).count();
        assert!(neighbours < BLOCKS / 100, "{neighbours}");
        let mut sorted = offsets;
        sorted.sort_unstable();
        sorted.dedup();
        assert_eq!(sorted.len(), BLOCKS);
    }
}
