//! Content whose every byte depends on a seed and on its place.

/// Content that depends on a seed and on the position in the stream, so that a check finds every byte that is lost, doubled,
/// moved or stale.
#[derive(Clone, Debug)]
pub struct Content {
    seed: u64,
    position: u64,
}

impl Content {
    /// Starts the stream of this seed.
    pub fn new(seed: u64) -> Self {
        Self { seed, position: 0 }
    }

    fn byte(&self, position: u64) -> u8 {
        let word = (position / 8).wrapping_add(self.seed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let word = (word ^ (word >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (word >> (8 * (position % 8))) as u8
    }

    /// Returns the next `length` bytes of the stream.
    pub fn take(&mut self, length: usize) -> Vec<u8> {
        let start = self.position;
        self.position += length as u64;
        (start..self.position).map(|position| self.byte(position)).collect()
    }

    /// Checks that `bytes` come next.
    pub fn check(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            assert_eq!(byte, self.byte(self.position), "wrong byte at {} of the stream", self.position);
            self.position += 1;
        }
    }

    /// Returns the number of bytes taken or checked so far.
    pub fn position(&self) -> u64 {
        self.position
    }
}

/// Draws a length from 0 to `most` whose magnitude is evenly spread.
pub fn random_length(random: &mut fastrand::Rng, most: usize) -> usize {
    let magnitude = 1_usize << random.u32(0..=usize::BITS - most.leading_zeros());
    random.usize(0..magnitude).min(most)
}
