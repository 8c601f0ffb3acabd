//! The content of payloads, which `proto/checked.proto` defines.

use bytes::Bytes;

/// Content in which a wrong, missing or moved byte is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Content {
    /// First word of the content.
    pub(crate) seed: u32,
    /// Number of words after which the content repeats; 0 for never.
    pub(crate) period: u32,
}

impl Content {
    /// Makes content that never repeats.
    pub(crate) fn new(seed: u32) -> Self {
        Self { seed, period: 0 }
    }

    /// Returns the first `length` bytes.
    pub(crate) fn bytes(self, length: usize) -> Bytes {
        let mut bytes = Vec::with_capacity(length.next_multiple_of(4));
        for word in self.words().take(length.div_ceil(4)) {
            bytes.extend_from_slice(&word);
        }
        bytes.truncate(length);
        bytes.into()
    }

    /// Returns the offset of the first wrong byte of `payload`.
    pub(crate) fn first_mismatch(self, payload: &[u8]) -> Option<usize> {
        let chunks = payload.chunks(4).zip(self.words());
        let (at, (chunk, word)) =
            chunks.enumerate().find(|(_, (chunk, word))| **chunk != word[..chunk.len()])?;
        let within = chunk.iter().zip(word).position(|(byte, expected)| *byte != expected)?;
        Some(at * 4 + within)
    }

    fn words(self) -> impl Iterator<Item = [u8; 4]> {
        let period = if self.period == 0 { u32::MAX } else { self.period };
        (0..period)
            .cycle()
            .map(move |index| index.wrapping_mul(2_654_435_761).wrapping_add(self.seed).to_le_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_follows_the_proto() {
        let bytes = Content::new(7).bytes(10);
        assert_eq!(bytes[..4], 7u32.to_le_bytes());
        assert_eq!(bytes[4..8], 2_654_435_768u32.to_le_bytes());
        assert_eq!(bytes[8..], (2 * 2_654_435_761u64 + 7).to_le_bytes()[..2]);
        let repeated = Content { seed: 7, period: 2 }.bytes(20);
        assert_eq!(repeated[..8], bytes[..8]);
        assert_eq!(repeated[8..16], bytes[..8]);
        assert_eq!(repeated[16..], bytes[..4]);
    }

    #[test]
    fn every_wrong_byte_is_found() {
        let content = Content::new(3);
        let right = content.bytes(1003);
        assert_eq!(content.first_mismatch(&right), None);
        for at in [0, 1, 4, 500, 999, 1000, 1002] {
            let mut wrong = right.to_vec();
            wrong[at] ^= 0x10;
            assert_eq!(content.first_mismatch(&wrong), Some(at));
        }
        let moved = content.bytes(1007).slice(4..);
        assert!(content.first_mismatch(&moved).is_some());
    }
}
