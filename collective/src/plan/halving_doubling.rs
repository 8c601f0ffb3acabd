//! All-reduce by recursive halving, then recursive doubling (R. Rabenseifner: "Optimization of collective
//! reduction operations", 2004), with binary blocks for a number of ranks that is no power of two.
//!
//! ```text
//!   7 ranks = blocks of 4, 2 and 1:   0 1 2 3 | 4 5 | 6
//!
//!   halving     in each block, partners exchange halves and reduce them, until each rank of a block of B has a B-th of the whole
//!   up          each block, from the smallest on, sends its sums to the next larger block, which reduces them:  6 → 4 5 → 0 1 2 3
//!   down        the largest block sends the results to the next smaller block, and so on
//!   doubling    in each block, partners exchange what they have, until each rank has the whole
//! ```
//!
//! The first partner is the most distant one. The ranges are halved at the same offsets in all blocks, so the
//! range of a rank of a small block is made of whole ranges of ranks of a large one.

use std::ops::Range;

use super::builder::Builder;

/// Ranges of at least this many elements are halved at a multiple of [`ALIGNMENT`], so that halves begin on a
/// cache line.
const ALIGNED_FROM: usize = 1024;
/// A number of elements whose length is a multiple of a cache line, for all types.
const ALIGNMENT: usize = 64;

pub(super) fn all_reduce(builder: &mut Builder) {
    let block = Block::of(builder.rank, builder.ranks);
    let index = builder.rank - block.first;
    for level in 0..block.levels {
        let halves = halves(&block.range(builder, index, level));
        let bit = block.bit(level);
        let is_upper = usize::from(index & bit != 0);
        let partner = block.first + (index ^ bit);
        builder.send_chunks(partner, halves[1 - is_upper].clone());
        builder.reduce_chunks(&[partner], halves[is_upper].clone());
    }
    let own = block.range(builder, index, block.levels);
    if let Some(smaller) = block.smaller(builder.ranks) {
        let from = smaller.first + (index >> (block.levels - smaller.levels));
        builder.reduce_chunks(&[from], own.clone());
    }
    match block.larger(builder.ranks) {
        Some(larger) => {
            let fan = larger.levels - block.levels;
            let others = (index << fan)..((index + 1) << fan);
            for other in others.clone() {
                builder.send_chunks(larger.first + other, larger.range(builder, other, larger.levels));
            }
            for other in others {
                builder.receive_chunks(larger.first + other, larger.range(builder, other, larger.levels));
            }
        }
        None => builder.finish_chunks(own.clone()),
    }
    if let Some(smaller) = block.smaller(builder.ranks) {
        let to = smaller.first + (index >> (block.levels - smaller.levels));
        builder.send_chunks(to, own);
    }
    for level in (0..block.levels).rev() {
        let halves = halves(&block.range(builder, index, level));
        let bit = block.bit(level);
        let is_upper = usize::from(index & bit != 0);
        let partner = block.first + (index ^ bit);
        builder.send_chunks(partner, halves[is_upper].clone());
        builder.receive_chunks(partner, halves[1 - is_upper].clone());
    }
}

/// A block of 2^`levels` ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Block {
    first: usize,
    levels: u32,
}

impl Block {
    /// Returns the block of a rank. Blocks are the powers of two of which the number of ranks is the sum, the
    /// largest first.
    fn of(rank: usize, ranks: usize) -> Self {
        let mut first = 0;
        loop {
            let levels = (ranks - first).ilog2();
            if rank < first + (1 << levels) {
                return Self { first, levels };
            }
            first += 1 << levels;
        }
    }

    fn smaller(self, ranks: usize) -> Option<Self> {
        let next = self.first + (1 << self.levels);
        (next < ranks).then(|| Self::of(next, ranks))
    }

    fn larger(self, ranks: usize) -> Option<Self> {
        self.first.checked_sub(1).map(|before| Self::of(before, ranks))
    }

    /// Returns the bit of the index in the block in which partners of a level differ.
    fn bit(self, level: u32) -> usize {
        1 << (self.levels - 1 - level)
    }

    /// Returns the range that is left to a rank of this block after this many halvings.
    fn range(self, builder: &Builder, index: usize, halvings: u32) -> Range<usize> {
        (0..halvings).fold(0..builder.elements, |range, level| {
            let [lower, upper] = halves(&range);
            if index & self.bit(level) == 0 { lower } else { upper }
        })
    }
}

/// Halves a range.
fn halves(range: &Range<usize>) -> [Range<usize>; 2] {
    let half = range.len().div_ceil(2);
    let half = if range.len() < ALIGNED_FROM { half } else { half.next_multiple_of(ALIGNMENT) };
    let middle = range.start + half;
    [range.start..middle, middle..range.end]
}
