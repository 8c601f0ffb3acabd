//! A hash function for short keys.

use std::hash::Hasher;

/// A hash function that is much faster than the standard one, and has no protection against keys that are chosen to collide. The maps
/// that use it are short, or have keys that only this end chooses.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::grpc) struct Fast(u64);

impl Fast {
    /// An odd number with irregular bits: 2^64 divided by the golden ratio.
    const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;

    fn add(&mut self, word: u64) {
        self.0 = (self.0.rotate_left(5) ^ word).wrapping_mul(Self::FACTOR);
    }
}

impl Hasher for Fast {
    fn write(&mut self, bytes: &[u8]) {
        let (words, rest) = bytes.as_chunks();
        for word in words {
            self.add(u64::from_le_bytes(*word));
        }
        if !rest.is_empty() {
            let mut word = [0; 8];
            word[..rest.len()].copy_from_slice(rest);
            self.add(u64::from_le_bytes(word));
        }
    }

    fn write_u8(&mut self, value: u8) {
        self.add(value.into());
    }

    fn write_u32(&mut self, value: u32) {
        self.add(value.into());
    }

    fn write_u64(&mut self, value: u64) {
        self.add(value);
    }

    fn write_usize(&mut self, value: usize) {
        self.add(value as u64);
    }

    /// The map takes the lowest and the highest bits; the highest are the best ones of a product.
    fn finish(&self) -> u64 {
        self.0.rotate_left(26)
    }
}
