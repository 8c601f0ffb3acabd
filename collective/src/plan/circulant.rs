//! Reduce-scatter and all-gather on circulant graphs, for any number of ranks in ⌈log2 N⌉ rounds (J. L.
//! Träff: "Optimal, non-pipelined reduce-scatter and allreduce algorithms", 2024). For a power of two they
//! send what recursive halving and doubling send. Each rank ends with its own part, which binary blocks do
//! not give.
//!
//! ```text
//!   7 ranks: the skips are 7 → 4 → 2 → 1. A rank r has sums of the parts r, r+1, … (mod 7)
//!
//!   round        sends sums of the parts     to       receives sums of      from
//!   7 → 4        r+4 … r+6                   r + 4    r … r+2               r − 4
//!   4 → 2        r+2, r+3                    r + 2    r, r+1                r − 2
//!   2 → 1        r+1                         r + 1    r                     r − 1
//! ```
//!
//! An all-gather does the same backwards, and receives where the reduce-scatter sends.

use std::ops::Range;

use super::builder::Builder;
use super::step::Span;

pub(super) fn reduce_scatter(builder: &mut Builder) {
    for skip in skips(builder.ranks).windows(2) {
        let (before, after) = (skip[0], skip[1]);
        let (to, from) = (builder.ahead(after), builder.behind(after));
        for chunk in chunks(builder, after..before) {
            builder.send(to, Span::work(chunk));
        }
        for chunk in chunks(builder, 0..before - after) {
            let sum = Span::work(chunk);
            builder.receive(from, sum.clone(), Some(sum.clone()));
            if after == 1 {
                builder.finish(sum);
            }
        }
    }
}

pub(super) fn all_gather(builder: &mut Builder) {
    for skip in skips(builder.ranks).windows(2).rev() {
        let (all, had) = (skip[0], skip[1]);
        let (to, from) = (builder.behind(had), builder.ahead(had));
        for chunk in chunks(builder, 0..all - had) {
            builder.send(to, Span::work(chunk));
        }
        for chunk in chunks(builder, had..all) {
            builder.receive(from, Span::work(chunk), None);
        }
    }
}

/// Returns the skips: the number of ranks, and half of it, rounded up, until 1.
fn skips(ranks: usize) -> Vec<usize> {
    let halved = |skip: &usize| (*skip > 1).then(|| skip.div_ceil(2));
    std::iter::successors(Some(ranks), halved).collect()
}

/// Returns the chunks of parts that are counted from this rank's own. The parts behind the last one are those
/// from 0 on.
fn chunks(builder: &Builder, parts: Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
    let (ranks, first, end) = (builder.ranks, builder.rank + parts.start, builder.rank + parts.end);
    let start = |part: usize| builder.part(part).start;
    let ranges = match (first, end) {
        _ if parts.is_empty() => [0..0, 0..0],
        _ if first < ranks && end > ranks => [start(first)..builder.elements, 0..builder.part(end - 1).end],
        _ => [start(first)..builder.part(end - 1).end, 0..0],
    };
    let [one, other] = ranges.map(|range| builder.chunks(range));
    one.chain(other)
}
