//! One-shot: every rank sends to every other rank, once. It has the fewest steps one after the other, and
//! moves the most bytes.
//!
//! Each rank reduces for itself, in the order of the ranks: ((x0 + x1) + x2) + … So all ranks get the same
//! bits. Reductions give the same bits for both orders of their two operands, so rank 1 may begin with its
//! own elements.

use std::ops::Range;

use super::builder::{Builder, shifted};
use super::step::Span;

/// Where the sums of a rank grow until its own elements are in them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Growing {
    /// Where the result goes.
    Result,
    /// In scratch memory, because the result overwrites this rank's own elements.
    Scratch,
    /// In scratch memory up to the last reduction, because other ranks still take this rank's elements. Each
    /// rank but the last takes the elements of the last rank when it writes its result, after all others took
    /// its own elements. The last rank takes all elements into scratch memory, and adds its own at the end.
    /// So no two ranks wait for one another.
    ScratchToTheEnd,
}

pub(super) fn all_reduce(builder: &mut Builder) {
    for chunk in builder.chunks(0..builder.elements) {
        let own = Span::input(chunk.clone());
        for distance in 1..builder.ranks {
            builder.send(builder.ahead(distance), own.clone());
        }
        let growing = match builder.in_place {
            false => Growing::Result,
            true if chunk.len() <= builder.inline => Growing::Scratch,
            true => Growing::ScratchToTheEnd,
        };
        reduce(builder, &own, &Span::work(chunk.clone()), chunk, growing);
    }
}

pub(super) fn reduce_scatter(builder: &mut Builder) {
    for distance in 1..builder.ranks {
        let to = builder.ahead(distance);
        builder.send_chunks(to, builder.part(to), Span::input);
    }
    let part = builder.part(builder.rank);
    // The ranks do not send their own parts, so no other rank takes what the result overwrites.
    let growing = if builder.in_place { Growing::Scratch } else { Growing::Result };
    for chunk in builder.chunks(part.clone()) {
        let result = builder.scattered(chunk.clone());
        reduce(builder, &Span::input(chunk.clone()), &result, shifted(chunk, part.start), growing);
    }
}

pub(super) fn all_gather(builder: &mut Builder) {
    let part = builder.part(builder.rank);
    for chunk in builder.chunks(part.clone()) {
        let own = match builder.in_place {
            true => Span::work(chunk.clone()),
            false => Span::input(shifted(chunk.clone(), part.start)),
        };
        for distance in 1..builder.ranks {
            builder.send(builder.ahead(distance), own.clone());
        }
        if !builder.in_place {
            builder.local(own, Span::work(chunk), None);
        }
    }
    for distance in 1..builder.ranks {
        let from = builder.behind(distance);
        builder.receive_chunks(from, builder.part(from));
    }
}

/// Reduces one message of each other rank and this rank's `own` elements into `result`, in the order of the
/// ranks. Uses `scratch` of the scratch area if `growing` says so.
fn reduce(builder: &mut Builder, own: &Span, result: &Span, scratch: Range<usize>, growing: Growing) {
    let (rank, ranks) = (builder.rank, builder.ranks);
    // The last rank must not wait while it takes the elements of others; see `ScratchToTheEnd`.
    let begins_with_own = rank == 0 || (rank == 1 && (ranks > 2 || growing != Growing::ScratchToTheEnd));
    let mut sum = begins_with_own.then(|| own.clone());
    let contributions = (0..ranks).filter(|other| !begins_with_own || *other != rank);
    let last = contributions.clone().next_back();
    for other in contributions {
        let is_in = begins_with_own || other >= rank;
        let into = match growing {
            Growing::Result => result.clone(),
            Growing::Scratch if is_in => result.clone(),
            Growing::ScratchToTheEnd if Some(other) == last => result.clone(),
            Growing::Scratch | Growing::ScratchToTheEnd => {
                builder.reserve(scratch.end);
                Span::scratch(scratch.clone())
            }
        };
        if other == rank {
            builder.local(own.clone(), into.clone(), sum);
        } else {
            builder.receive(other, into.clone(), sum);
        }
        sum = Some(into);
    }
    builder.finish(result.clone());
}
