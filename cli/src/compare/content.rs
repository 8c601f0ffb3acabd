//! Payloads whose every byte depends on a seed and on its own position, and the checks for them.
//!
//! Word `i` (8 bytes, little-endian) of the payload of seed `s` is `mix(s + i)`. So a stale, shifted, zeroed or torn
//! buffer can't pass, and one buffer holds the payloads of many seeds: that of `s + 8` begins 64 bytes further on.

use bytes::Bytes;

const WORD: usize = 8;

/// Words from one variant to the next: a cache line, so that all variants are aligned alike.
const VARIANT_STRIDE: usize = 8;

/// Payloads of one size that a caller takes turns with, so that no answer can be right by what came before.
const VARIANTS: usize = 4;

/// Most words that the check by stamps looks at.
const STAMPS: u64 = 16;

/// Prebuilt payloads of one size. Taking one costs a reference count.
#[derive(Clone, Debug)]
pub(crate) struct Payloads {
    variants: [(u64, Bytes); VARIANTS],
}

impl Payloads {
    /// Payloads of `len` bytes.
    pub(crate) fn new(len: usize, seed: u64) -> Self {
        let all = Bytes::from(generate(seed, len + (VARIANTS - 1) * VARIANT_STRIDE * WORD));
        let variant = |index: usize| {
            let words = index * VARIANT_STRIDE;
            (seed.wrapping_add(words as u64), all.slice(words * WORD..words * WORD + len))
        };
        Self { variants: std::array::from_fn(variant) }
    }

    /// Seed and content of the payload whose turn is `turn`.
    pub(crate) fn take(&self, turn: usize) -> (u64, Bytes) {
        self.variants[turn % VARIANTS].clone()
    }

    /// Bytes of each payload.
    pub(crate) fn size(&self) -> usize {
        self.variants[0].1.len()
    }
}

/// The offset of the first byte of `content` that is not as `seed` demands, looking at every byte.
pub(crate) fn check_all(seed: u64, content: &[u8]) -> Option<u64> {
    let mut words = content.chunks_exact(WORD);
    let mut index = 0u64;
    for word in words.by_ref() {
        if word != word_at(seed, index) {
            return Some(first_difference(seed, index, word));
        }
        index += 1;
    }
    let tail = words.remainder();
    let differs = tail != &word_at(seed, index)[..tail.len()];
    differs.then(|| first_difference(seed, index, tail))
}

/// Like [`check_all`], looking at no more than 16 words: the first, the last, and others that `draw` chooses.
pub(crate) fn check_stamps(seed: u64, content: &[u8], draw: u64) -> Option<u64> {
    let words = content.len().div_ceil(WORD) as u64;
    if words <= STAMPS {
        return check_all(seed, content);
    }
    for stamp in 0..STAMPS {
        let index = match stamp {
            0 => 0,
            1 => words - 1,
            _ => mix(draw.wrapping_mul(STAMPS).wrapping_add(stamp)) % words,
        };
        let start = index as usize * WORD;
        let word = &content[start..content.len().min(start + WORD)];
        if word != &word_at(seed, index)[..word.len()] {
            return Some(first_difference(seed, index, word));
        }
    }
    None
}

fn generate(seed: u64, len: usize) -> Vec<u8> {
    let mut content = Vec::with_capacity(len.next_multiple_of(WORD));
    for index in 0..len.div_ceil(WORD) as u64 {
        content.extend_from_slice(&word_at(seed, index));
    }
    content.truncate(len);
    content
}

fn word_at(seed: u64, index: u64) -> [u8; WORD] {
    mix(seed.wrapping_add(index)).to_le_bytes()
}

fn first_difference(seed: u64, index: u64, word: &[u8]) -> u64 {
    let same =
        word.iter().zip(word_at(seed, index)).take_while(|(byte, demanded)| **byte == *demanded).count();
    index * WORD as u64 + same as u64
}

/// SplitMix64's output function: a bijection in which every input bit reaches every output bit.
pub(crate) const fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn right_content_passes_both_checks() {
        for len in [0, 1, 7, 8, 9, 63, 64, 127, 128, 129, 4096, 65_537] {
            let payloads = Payloads::new(len, 77);
            for turn in 0..VARIANTS + 1 {
                let (seed, content) = payloads.take(turn);
                assert_eq!(content.len(), len);
                assert_eq!(check_all(seed, &content), None);
                assert_eq!(check_stamps(seed, &content, turn as u64), None);
            }
        }
    }

    #[test]
    fn zeros_another_seed_and_a_shift_are_found() {
        let payloads = Payloads::new(4096, 5);
        let (seed, content) = payloads.take(0);
        let (other, stale) = payloads.take(1);
        assert_ne!(seed, other);
        assert_eq!(check_stamps(seed, &[0; 4096], 1), Some(0));
        assert_eq!(check_stamps(seed, &stale, 1), Some(0));
        let shifted = [&content[8..], &content[..8]].concat();
        assert!(check_stamps(seed, &shifted, 1).is_some());
    }

    #[test]
    fn stamps_find_a_wrong_byte_sooner_or_later_and_both_ends_at_once() {
        let (seed, content) = Payloads::new(1000, 9).take(0);
        for at in [0, 999] {
            let mut wrong = content.to_vec();
            wrong[at] ^= 1;
            assert_eq!(check_stamps(seed, &wrong, 3), Some(at as u64));
        }
        let mut wrong = content.to_vec();
        wrong[500] ^= 0x80;
        assert!((0..1000).any(|draw| check_stamps(seed, &wrong, draw) == Some(500)));
    }

    proptest! {
        #[test]
        fn any_wrong_byte_is_found_where_it_is(
            seed in any::<u64>(), len in 1usize..3000, at in any::<prop::sample::Index>(), change in 1u8..,
        ) {
            let mut content = generate(seed, len);
            let at = at.index(len);
            content[at] ^= change;
            prop_assert_eq!(check_all(seed, &content), Some(at as u64));
        }
    }
}
