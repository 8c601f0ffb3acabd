//! The reduction that receivers compute over a payload: the largest element, and a digest of all bytes.

use super::content::{STAMPS, WORD};
use super::seeded::mix;

const ELEMENT: usize = size_of::<f32>();

/// Number of running maxima, independent of one another: enough for the widest vectors, and for as many of
/// them as a core processes at once.
const LANES: usize = 32;

/// Number of running sums. An addition takes a fourth of the time of a comparison, so fewer are enough.
/// Together with the maxima they just fit into a core's vector registers.
const SUMS: usize = 16;

const BLOCK: usize = LANES * ELEMENT;

/// Bytes of a group. The digest weights the sums of a group by its position.
const GROUP: usize = 16 << 10;

/// Payloads up to this many bytes have no digest, because the check by stamps reads every word of them.
const ALL_STAMPED: usize = STAMPS as usize * WORD;
const _: () = assert!(ALL_STAMPED <= LANES * ELEMENT, "one element for each lane");

/// The result of consuming a payload.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Reduced {
    /// The largest element, little-endian `f32`. Fewer than four bytes at the end count as an element whose
    /// other bytes are zero. NaN does not count. Without any number the result is −∞, and never NaN.
    pub maximum: f32,
    /// Digest of every byte. Contents that differ in one element have different digests. A torn or partly
    /// stale payload has, almost surely, another digest than the right payload. The digest does not detect
    /// elements that change positions within a group of 16 KiB at a distance of a multiple of 64 bytes,
    /// because they are in one sum.
    pub digest: u64,
}

impl Reduced {
    /// The result for no payload.
    pub const NOTHING: Self = Self { maximum: f32::NEG_INFINITY, digest: 0 };

    /// Combines the results of two payloads, in either order.
    pub fn and(self, other: Self) -> Self {
        let Self { maximum, digest } = other;
        Self { maximum: larger(maximum, self.maximum), digest: self.digest.wrapping_add(digest) }
    }

    /// Makes the result from its parts. A receiver that consumes sends both parts.
    pub fn of_parts(maximum: Option<f32>, digest: Option<u64>) -> Option<Self> {
        Some(Self { maximum: maximum?, digest: digest? })
    }
}

/// The reduction of a payload, chunk by chunk.
#[derive(Debug)]
pub struct Reduction {
    maxima: [f32; LANES],
    sums: [u32; SUMS],
    /// Bytes so far.
    length: usize,
    digest: u64,
}

impl Default for Reduction {
    fn default() -> Self {
        Self::new()
    }
}

impl Reduction {
    /// Starts a reduction over no bytes.
    pub const fn new() -> Self {
        Self { maxima: [f32::NEG_INFINITY; LANES], sums: [0; SUMS], length: 0, digest: 0 }
    }

    /// Consumes the next `bytes`. Every chunk but the last must be a multiple of 128 bytes.
    pub fn take(&mut self, bytes: &[u8]) {
        let mut rest = bytes;
        while !rest.is_empty() {
            let (group, others) = rest.split_at(rest.len().min(GROUP - self.length % GROUP));
            reduce_group(&mut self.maxima, &mut self.sums, group);
            self.length += group.len();
            if self.length.is_multiple_of(GROUP) {
                self.fold();
            }
            rest = others;
        }
    }

    /// Returns the result.
    pub fn end(mut self) -> Reduced {
        if self.length > ALL_STAMPED {
            self.fold();
        }
        Reduced { maximum: largest(self.maxima), digest: self.digest }
    }

    /// Adds a group's sums to the digest, weighted by the position of the group.
    fn fold(&mut self) {
        let weighted = self.sums.iter().zip(WEIGHTS).map(|(sum, weight)| u64::from(*sum) * u64::from(weight));
        let group = weighted.fold(0u64, u64::wrapping_add);
        // The factor is odd, so that no bit of the group is lost.
        let position = mix((self.length.div_ceil(GROUP)) as u64) | 1;
        self.digest = self.digest.wrapping_add(group.wrapping_mul(position));
        self.sums = [0; SUMS];
    }
}

/// The weights of the sums: odd numbers that differ from one another.
const WEIGHTS: [u32; SUMS] = {
    let mut weights = [0; SUMS];
    let mut lane = 0;
    while lane < SUMS {
        weights[lane] = (mix(lane as u64) >> 32) as u32 | 1;
        lane += 1;
    }
    weights
};

/// Adds a group, or a part of one, to the maxima and sums.
fn reduce_group(maxima: &mut [f32; LANES], sums: &mut [u32; SUMS], bytes: &[u8]) {
    let (blocks, rest) = bytes.as_chunks();
    reduce_blocks(maxima, sums, blocks);
    for (lane, bytes) in rest.chunks(ELEMENT).enumerate() {
        let bits = element(bytes);
        maxima[lane] = larger(f32::from_bits(bits), maxima[lane]);
        sums[lane % SUMS] = sums[lane % SUMS].wrapping_add(bits);
    }
}

// The compiler makes vector instructions of this loop only in a separate function, of arrays that nothing
// else points to. Otherwise the loop takes 30 times as long.
#[inline(never)]
fn reduce_blocks(maxima: &mut [f32; LANES], sums: &mut [u32; SUMS], blocks: &[[u8; BLOCK]]) {
    let (mut tops, mut totals) = (*maxima, *sums);
    for block in blocks {
        let words = block.as_chunks::<ELEMENT>().0;
        for (top, word) in tops.iter_mut().zip(words) {
            *top = larger(f32::from_le_bytes(*word), *top);
        }
        let (one, other) = words.split_at(SUMS);
        for ((total, one), other) in totals.iter_mut().zip(one).zip(other) {
            let both = u32::from_le_bytes(*one).wrapping_add(u32::from_le_bytes(*other));
            *total = total.wrapping_add(both);
        }
    }
    (*maxima, *sums) = (tops, totals);
}

/// Consumes `bytes` at any alignment.
pub fn reduce(bytes: &[u8]) -> Reduced {
    if bytes.len() <= ALL_STAMPED {
        let mut maxima = [f32::NEG_INFINITY; LANES];
        for (maximum, bytes) in maxima.iter_mut().zip(bytes.chunks(ELEMENT)) {
            *maximum = f32::from_bits(element(bytes));
        }
        return Reduced { maximum: largest(maxima), digest: 0 };
    }
    let mut reduction = Reduction::new();
    reduction.take(bytes);
    reduction.end()
}

/// Consumes all `buffers`.
pub fn reduce_all<'a>(buffers: impl IntoIterator<Item = &'a [u8]>) -> Reduced {
    buffers.into_iter().map(reduce).fold(Reduced::NOTHING, Reduced::and)
}

/// Returns the larger number in one instruction, where `f32::max` takes several. A `value` that is NaN is
/// never larger.
fn larger(value: f32, maximum: f32) -> f32 {
    if value > maximum { value } else { maximum }
}

fn largest(maxima: [f32; LANES]) -> f32 {
    maxima.into_iter().fold(f32::NEG_INFINITY, |maximum, value| larger(value, maximum))
}

fn element(bytes: &[u8]) -> u32 {
    match bytes.first_chunk() {
        Some(whole) => u32::from_le_bytes(*whole),
        None => {
            let mut padded = [0; ELEMENT];
            padded[..bytes.len()].copy_from_slice(bytes);
            u32::from_le_bytes(padded)
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

    use proptest::prelude::*;

    use super::*;

    /// Computes the maximum by its definition, one element after the other.
    fn by_definition(bytes: &[u8]) -> f32 {
        let elements = bytes.chunks(4).map(|part| {
            let mut element = [0; 4];
            element[..part.len()].copy_from_slice(part);
            f32::from_le_bytes(element)
        });
        elements.filter(|value| !value.is_nan()).fold(f32::NEG_INFINITY, f32::max)
    }

    #[test]
    fn the_largest_element_is_found_at_every_place() {
        for len in [1, 31, 32, 33, 127, 128, 1000] {
            for at in 0..len {
                let mut values = vec![-2.5f32; len];
                values[at] = -1.5;
                let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
                assert_eq!(reduce(&bytes).maximum, -1.5, "{at} of {len}");
            }
        }
    }

    #[test]
    fn nan_does_not_count() {
        assert_eq!(reduce(&[]), Reduced::NOTHING);
        assert_eq!(reduce(&f32::NAN.to_le_bytes().repeat(100)).maximum, f32::NEG_INFINITY);
        let mixed = [f32::NAN, 1.0, -f32::NAN, 2.0, f32::NAN].map(f32::to_le_bytes).concat();
        assert_eq!(reduce(&mixed).maximum, 2.0);
        assert_eq!(reduce_all([&mixed[..8], &mixed[8..], &[]]).maximum, 2.0);
        assert_eq!(reduce_all([]), Reduced::NOTHING);
    }

    #[test]
    fn contents_that_differ_have_different_digests() {
        for len in [129, 200, 1000, GROUP - 1, GROUP, 3 * GROUP + 130] {
            let right: Vec<u8> = (0..len).map(|at| mix(at as u64) as u8).collect();
            let digest = reduce(&right).digest;
            for at in (0..len).step_by(len / 60 + 1) {
                let mut wrong = right.clone();
                wrong[at] ^= 1;
                assert_ne!(reduce(&wrong).digest, digest, "{at} of {len}");
            }
        }
        assert_eq!(reduce(&[1; ALL_STAMPED]).digest, 0);
        // Two parts that are exchanged change the digest, too.
        let right: Vec<u8> = (0..3 * GROUP).map(|at| mix(at as u64) as u8).collect();
        let swapped = [&right[GROUP..2 * GROUP], &right[..GROUP], &right[2 * GROUP..]].concat();
        assert_ne!(reduce(&swapped).digest, reduce(&right).digest);
        let mut swapped = right.clone();
        swapped.swap(100, 200);
        assert_ne!(reduce(&swapped).digest, reduce(&right).digest);
    }

    #[test]
    fn pieces_give_the_result_of_the_whole() {
        let bytes: Vec<u8> = (0..5 * GROUP + 77).map(|at| mix(at as u64) as u8).collect();
        for chunk in [128, 8 << 10, GROUP, 3 * GROUP + 128] {
            let mut reduction = Reduction::new();
            bytes.chunks(chunk).for_each(|chunk| reduction.take(chunk));
            assert_eq!(reduction.end(), reduce(&bytes), "{chunk}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_at_any_address_match_the_definition(
            bytes in proptest::collection::vec(any::<u8>(), 0..700), skip in 0usize..8,
        ) {
            let bytes = &bytes[skip.min(bytes.len())..];
            prop_assert_eq!(reduce(bytes).maximum, by_definition(bytes));
        }
    }
}
