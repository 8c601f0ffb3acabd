//! Payloads whose every byte depends on a seed and on its own position, and the checks of such payloads.
//!
//! Word `i` (8 bytes, little-endian) of the payload of seed `s` is `mix(s + i)`. So a check finds a stale,
//! shifted, zeroed or torn buffer, and one buffer holds the payloads of many seeds: the payload of `s + 8`
//! begins 64 bytes further on.

use std::collections::TryReserveError;

use bytes::Bytes;

use super::seeded::mix;

/// Bytes of a word of content.
pub const WORD: usize = 8;

/// Words from one variant to the next: a cache line, so that all variants have the same alignment.
const VARIANT_STRIDE: usize = 8;

/// Number of variants of a content. Callers use them one after the other, so that remains of an earlier
/// message never pass a check.
pub const VARIANTS: usize = 4;

/// The largest number of words that the check by stamps reads.
pub const STAMPS: u64 = 16;

/// If nothing else checks every byte in the measured time, one buffer in `SHARE` is checked fully. This is so
/// seldom that it changes only the very last percentiles.
pub const SHARE: u64 = 256;

/// Content from which buffers are cut one after the other. Each buffer begins on a cache line and has a seed
/// of its own.
#[derive(Clone, Debug)]
pub struct Content {
    seed: u64,
    rest: Bytes,
}

impl Content {
    /// Makes content for buffers that take `room` bytes together, in all its variants.
    pub fn new(room: usize, seed: u64) -> Result<Self, TryReserveError> {
        let rest = generate(seed, room.saturating_add((VARIANTS - 1) * VARIANT_STRIDE * WORD))?.into();
        Ok(Self { seed, rest })
    }

    /// Returns the content of `seed` that lies in `memory`, with all its variants. [`fill`] must have written
    /// it.
    pub fn over(memory: Bytes, seed: u64) -> Self {
        Self { seed, rest: memory }
    }

    /// Returns the bytes that the content needs, with all its variants, for buffers that take `room` bytes
    /// together.
    pub const fn with_variants(room: u64) -> u64 {
        room.saturating_add(((VARIANTS - 1) * VARIANT_STRIDE * WORD) as u64)
    }

    /// Returns the bytes that a buffer of `len` bytes takes.
    pub const fn room(len: u64) -> u64 {
        len.next_multiple_of((VARIANT_STRIDE * WORD) as u64)
    }

    /// Returns a function from the lengths of successive buffers to their seeds. The first buffer has the
    /// seed `seed`.
    pub fn follow(seed: u64) -> impl FnMut(u64) -> u64 {
        let mut next = seed;
        move |len| {
            let seed = next;
            next = next.wrapping_add(Self::room(len) / WORD as u64);
            seed
        }
    }

    /// Returns the content of the variant at `index`. Two successive variants have different seeds.
    pub fn variant(&self, index: usize) -> Self {
        self.at(index % VARIANTS * VARIANT_STRIDE * WORD)
    }

    /// Returns all remaining bytes, from which variants are cut.
    pub fn all(&self) -> &Bytes {
        &self.rest
    }

    /// Returns the seed of the next buffer.
    pub const fn seed(&self) -> u64 {
        self.seed
    }

    /// Cuts the next buffer.
    pub fn cut(&mut self, len: usize) -> Bytes {
        let buffer = self.rest.slice(..len);
        self.skip(Self::room(len as u64) as usize);
        buffer
    }

    /// Returns the content that begins `bytes` further on, a multiple of a cache line.
    pub fn at(&self, bytes: usize) -> Self {
        let mut content = self.clone();
        content.skip(bytes);
        content
    }

    /// Returns the buffer of `len` bytes with the content of `seed`, if it lies in the remaining bytes.
    pub fn buffer(&self, seed: u64, len: usize) -> Option<Bytes> {
        let start = usize::try_from(offset_of(seed, self.seed)).ok()?;
        let end = start.checked_add(len).filter(|end| *end <= self.rest.len())?;
        Some(self.rest.slice(start..end))
    }

    /// Skips `bytes`, or everything if fewer are left.
    fn skip(&mut self, bytes: usize) {
        self.rest = self.rest.slice(bytes.min(self.rest.len())..);
        self.seed = self.seed.wrapping_add((bytes / WORD) as u64);
    }
}

/// Returns index and offset of the first wrong byte in buffers that were cut from [`Content`] of `seed`. The
/// check reads every byte, or, with a draw, stamps in each buffer.
pub fn check_buffers(seed: u64, buffers: &[Bytes], stamps: Option<u64>) -> Option<(u64, u64)> {
    let mut next = Content::follow(seed);
    for (index, buffer) in buffers.iter().enumerate() {
        let seed = next(buffer.len() as u64);
        let mismatch = match stamps {
            None => check_all(seed, buffer),
            Some(draw) => check_stamps(seed, buffer, mix(draw).wrapping_add(index as u64)),
        };
        if let Some(offset) = mismatch {
            return Some((index as u64, offset));
        }
    }
    None
}

/// Returns the offset of the first byte of `content` that differs from the content of `seed`. The check reads
/// every byte.
pub fn check_all(seed: u64, content: &[u8]) -> Option<u64> {
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

/// Checks as [`check_all`] does, but reads at most 16 words: the first, the last, and one in each fourteenth
/// of the content, at an offset that `draw` determines. So the check always finds a wrong part as long as a
/// seventh of the content. It finds a shorter part in some of many calls.
pub fn check_stamps(seed: u64, content: &[u8], draw: u64) -> Option<u64> {
    check_stamps_of(seed, content.len(), draw, |start, word| {
        word.copy_from_slice(&content[start..start + word.len()]);
    })
}

/// Checks as [`check_stamps`] does, for `len` bytes of memory that is no slice. `read` copies bytes from an
/// offset on.
pub fn check_stamps_of(
    seed: u64,
    len: usize,
    draw: u64,
    mut read: impl FnMut(usize, &mut [u8]),
) -> Option<u64> {
    let words = len.div_ceil(WORD) as u64;
    for stamp in 0..STAMPS.min(words) {
        let index = match stamp {
            _ if words <= STAMPS => stamp,
            0 => 0,
            1 => words - 1,
            _ => {
                let (part, parts) = (stamp - 2, STAMPS - 2);
                let (from, to) = (words * part / parts, words * (part + 1) / parts);
                from + mix(draw.wrapping_mul(STAMPS).wrapping_add(stamp)) % (to - from)
            }
        };
        let start = index as usize * WORD;
        let mut word = [0; WORD];
        let word = &mut word[..WORD.min(len - start)];
        read(start, word);
        if word != &word_at(seed, index)[..word.len()] {
            return Some(first_difference(seed, index, word));
        }
    }
    None
}

/// Fills `memory` with the content of `seed`.
pub fn fill(seed: u64, memory: &mut [u8]) {
    for (index, word) in memory.chunks_mut(WORD).enumerate() {
        word.copy_from_slice(&word_at(seed, index as u64)[..word.len()]);
    }
}

/// Returns whether the content of `seed` begins with the bytes of `start`. At most eight bytes count.
#[inline]
pub fn begins(seed: u64, start: &[u8]) -> bool {
    start.iter().zip(word_at(seed, 0)).all(|(byte, demanded)| *byte == demanded)
}

/// Returns the seed of a variant of the content of `seed`. The first variant has the seed `seed`.
#[inline]
pub const fn variant_seed(seed: u64, variant: usize) -> u64 {
    seed.wrapping_add((variant % VARIANTS * VARIANT_STRIDE) as u64)
}

/// Returns the offset in bytes of the content of `seed` within the content of `origin`, which contains it.
#[inline]
pub const fn offset_of(seed: u64, origin: u64) -> u64 {
    seed.wrapping_sub(origin).wrapping_mul(WORD as u64)
}

fn generate(seed: u64, len: usize) -> Result<Vec<u8>, TryReserveError> {
    let mut content = Vec::new();
    content.try_reserve_exact(len.saturating_add(WORD))?;
    for index in 0..len.div_ceil(WORD) as u64 {
        content.extend_from_slice(&word_at(seed, index));
    }
    content.truncate(len);
    Ok(content)
}

fn word_at(seed: u64, index: u64) -> [u8; WORD] {
    mix(seed.wrapping_add(index)).to_le_bytes()
}

fn first_difference(seed: u64, index: u64, word: &[u8]) -> u64 {
    let same =
        word.iter().zip(word_at(seed, index)).take_while(|(byte, demanded)| **byte == *demanded).count();
    index * WORD as u64 + same as u64
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

    use proptest::prelude::*;

    use super::*;

    /// Returns seed and content of the payload at `index`.
    fn payload(len: usize, seed: u64, index: usize) -> (u64, Bytes) {
        let mut content = Content::new(len, seed).unwrap().variant(index);
        (content.seed(), content.cut(len))
    }

    #[test]
    fn right_content_passes_both_checks() {
        for len in [0, 1, 7, 8, 9, 63, 64, 127, 128, 129, 4096, 65_537] {
            for index in 0..VARIANTS + 1 {
                let (seed, content) = payload(len, 77, index);
                assert_eq!(content.len(), len);
                assert_eq!(check_all(seed, &content), None);
                assert_eq!(check_stamps(seed, &content, index as u64), None);
            }
        }
    }

    #[test]
    fn zeros_another_seed_and_a_shift_are_found() {
        let (seed, content) = payload(4096, 5, 0);
        let (other, stale) = payload(4096, 5, 1);
        assert_ne!(seed, other);
        assert_eq!(check_stamps(seed, &[0; 4096], 1), Some(0));
        assert_eq!(check_stamps(seed, &stale, 1), Some(0));
        let shifted = [&content[8..], &content[..8]].concat();
        assert!(check_stamps(seed, &shifted, 1).is_some());
    }

    #[test]
    fn stamps_find_a_wrong_byte_in_some_call_and_at_both_ends_in_each() {
        let (seed, content) = payload(1000, 9, 0);
        for at in [0, 999] {
            let mut wrong = content.to_vec();
            wrong[at] ^= 1;
            assert_eq!(check_stamps(seed, &wrong, 3), Some(at as u64));
        }
        let mut wrong = content.to_vec();
        wrong[500] ^= 0x80;
        assert!((0..1000).any(|draw| check_stamps(seed, &wrong, draw) == Some(500)));
    }

    #[test]
    fn stamps_find_a_long_part_of_another_variant_in_each_call() {
        for len in [1000, 4096, 100_001] {
            let ((seed, right), (_, other)) = (payload(len, 9, 1), payload(len, 9, 2));
            let long = len / 7 + 16;
            for begin in (0..len - long).step_by(len / 50) {
                let mut torn = right.to_vec();
                torn[begin..begin + long].copy_from_slice(&other[begin..begin + long]);
                assert!((0..20).all(|draw| check_stamps(seed, &torn, draw).is_some()), "{begin} of {len}");
            }
        }
    }

    #[test]
    fn buffers_in_another_order_of_another_length_or_with_a_wrong_byte_are_found() {
        let mut content = Content::new(10_000, 3).unwrap().variant(1);
        let seed = content.seed();
        let buffers = [10, 1000, 10, 4096].map(|len| content.cut(len)).to_vec();
        assert_eq!(check_buffers(seed, &buffers, None), None);
        assert_eq!(check_buffers(seed, &buffers, Some(5)), None);
        for stamps in [None, Some(5)] {
            let swapped = [0, 1, 3, 2].map(|index| buffers[index].clone());
            assert_eq!(check_buffers(seed, &swapped, stamps), Some((2, 0)));
            let mut shorter = buffers.clone();
            shorter[1] = shorter[1].slice(..900);
            assert_eq!(check_buffers(seed, &shorter, stamps), Some((2, 0)));
        }
        let mut wrong = buffers.clone();
        let mut bytes = wrong[3].to_vec();
        bytes[2000] ^= 1;
        wrong[3] = bytes.into();
        assert_eq!(check_buffers(seed, &wrong, None), Some((3, 2000)));
    }

    #[test]
    fn content_over_other_memory_is_equal() {
        let lengths = [10, 1000, 4096];
        let room = lengths.iter().map(|len| Content::room(*len)).sum();
        let mut memory = vec![0; Content::with_variants(room) as usize];
        fill(7, &mut memory);
        let content = Content::over(memory.into(), 7);
        for index in 0..VARIANTS + 1 {
            let mut variant = content.variant(index);
            assert_eq!(variant.seed(), variant_seed(7, index));
            let mut next = Content::follow(variant.seed());
            for len in lengths {
                assert_eq!(check_all(next(len), &variant.cut(len as usize)), None);
            }
        }
    }

    #[test]
    fn content_beyond_the_memory_is_an_error() {
        Content::new(usize::MAX, 1).unwrap_err();
        Content::new(isize::MAX as usize, 1).unwrap_err();
    }

    #[test]
    fn content_further_on_has_its_own_seed() {
        let content = Content::new(4096, 3).unwrap();
        for bytes in [0, 64, 1024] {
            let mut later = content.at(bytes);
            let seed = later.seed();
            assert_eq!(check_all(seed, &later.cut(512)), None);
            assert_eq!(seed, 3 + bytes as u64 / 8);
        }
    }

    proptest! {
        #[test]
        fn any_wrong_byte_is_found_at_its_offset(
            seed in any::<u64>(), len in 1usize..3000, at in any::<prop::sample::Index>(), change in 1u8..,
        ) {
            let mut content = generate(seed, len).unwrap();
            let at = at.index(len);
            content[at] ^= change;
            prop_assert_eq!(check_all(seed, &content), Some(at as u64));
        }
    }
}
