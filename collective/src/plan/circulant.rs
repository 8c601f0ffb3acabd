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
    let skips = skips(builder.ranks);
    // Parts, counted from this rank's own, that this rank has reduced at least once.
    let reduced = builder.ranks - skips[1];
    let sums = Sums::new(builder, reduced);
    for (round, skip) in skips.windows(2).enumerate() {
        let (before, after) = (skip[0], skip[1]);
        let (to, from) = (builder.ahead(after), builder.behind(after));
        // Sender and receiver divide the parts where the sender's reduced ones end.
        let divided = if round == 0 { before } else { reduced.clamp(after, before) };
        for (parts, is_reduced) in [(after..divided, round > 0), (divided..before, false)] {
            for chunk in chunks(builder, parts) {
                let from = if is_reduced { sums.span(chunk) } else { Span::input(chunk) };
                builder.send(to, from);
            }
        }
        let is_last = after == 1;
        for parts in [0..divided - after, divided - after..before - after] {
            for chunk in chunks(builder, parts) {
                let reduce = match round {
                    0 => Span::input(chunk.clone()),
                    _ => sums.span(chunk.clone()),
                };
                let into = match is_last {
                    true => builder.scattered(chunk),
                    false => sums.span(chunk),
                };
                builder.receive(from, into.clone(), Some(reduce));
                if is_last {
                    builder.finish(into);
                }
            }
        }
    }
}

pub(super) fn all_gather(builder: &mut Builder) {
    builder.copy_own();
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
        _ if first >= ranks => [start(first)..builder.part(end - 1).end, 0..0],
        _ if end > ranks => [start(first)..builder.elements, 0..builder.part(end - 1).end],
        _ => [start(first)..builder.part(end - 1).end, 0..0],
    };
    let [one, other] = ranges.map(|range| builder.chunks(range));
    one.chain(other)
}

/// Where sums lie that are not final: in place in Work, otherwise in scratch memory, from this rank's own
/// part on.
#[derive(Debug)]
struct Sums {
    in_place: bool,
    origin: usize,
    elements: usize,
}

impl Sums {
    /// Reserves memory for this number of parts.
    fn new(builder: &mut Builder, parts: usize) -> Self {
        // With two ranks, the first sum is the result.
        if !builder.in_place && builder.ranks > 2 {
            let elements = (0..parts).map(|part| builder.part(builder.rank + part).len()).sum();
            builder.reserve(elements);
        }
        let origin = builder.part(builder.rank).start;
        Self { in_place: builder.in_place, origin, elements: builder.elements }
    }

    fn span(&self, chunk: Range<usize>) -> Span {
        if self.in_place {
            return Span::work(chunk);
        }
        let start = (chunk.start + self.elements - self.origin) % self.elements;
        Span::scratch(start..start + chunk.len())
    }
}
