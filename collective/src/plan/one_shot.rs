//! One-shot: every rank sends to every other rank, once. It has the fewest steps one after the other, and
//! moves the most bytes.
//!
//! Each rank reduces for itself, in the order of the ranks: ((x0 + x1) + x2) + … So all ranks get the same
//! bits. Reductions give the same bits for both orders of their two operands, so rank 1 may begin with its
//! own elements.

use super::builder::Builder;
use super::step::Span;

pub(super) fn all_reduce(builder: &mut Builder) {
    for chunk in builder.chunks(0..builder.elements) {
        for distance in 1..builder.ranks {
            builder.send(builder.ahead(distance), Span::work(chunk.clone()));
        }
        let is_copied = chunk.len() <= builder.inline;
        reduce(builder, &Span::work(chunk.clone()), &Span::scratch(chunk), !is_copied);
    }
}

pub(super) fn reduce_scatter(builder: &mut Builder) {
    for distance in 1..builder.ranks {
        let to = builder.ahead(distance);
        builder.send_chunks(to, builder.part(to));
    }
    let part = builder.part(builder.rank);
    for chunk in builder.chunks(part.clone()) {
        let sums = Span::scratch(chunk.start - part.start..chunk.end - part.start);
        // The ranks do not send their own parts, so no other rank takes what the result overwrites.
        reduce(builder, &Span::work(chunk), &sums, false);
    }
}

pub(super) fn all_gather(builder: &mut Builder) {
    for chunk in builder.chunks(builder.part(builder.rank)) {
        for distance in 1..builder.ranks {
            builder.send(builder.ahead(distance), Span::work(chunk.clone()));
        }
    }
    for distance in 1..builder.ranks {
        let from = builder.behind(distance);
        builder.receive_chunks(from, builder.part(from));
    }
}

/// Reduces one message of each other rank and this rank's `own` elements, in the order of the ranks. The
/// result replaces the own elements. Until these are in the sum, it grows in `scratch`.
///
/// With `are_taken`, other ranks still take the own elements, so the sum grows in scratch memory up to the
/// last reduction. Each rank but the last takes the elements of the last rank when it writes its result, after
/// all others took its own elements. The last rank takes all elements into scratch memory, and adds its own at
/// the end. So no two ranks wait for one another.
fn reduce(builder: &mut Builder, own: &Span, scratch: &Span, are_taken: bool) {
    let (rank, ranks) = (builder.rank, builder.ranks);
    // The last rank must not wait while it takes the elements of others.
    let begins_with_own = rank == 0 || (rank == 1 && (ranks > 2 || !are_taken));
    let mut sum = begins_with_own.then(|| own.clone());
    let contributions = (0..ranks).filter(|other| !begins_with_own || *other != rank);
    let last = contributions.clone().next_back();
    for other in contributions {
        let is_final = if are_taken { Some(other) == last } else { begins_with_own || other >= rank };
        let into = if is_final { own } else { scratch };
        if into == scratch {
            builder.reserve(scratch.range.end);
        }
        match sum {
            Some(sum) if other == rank => builder.local(own.clone(), into.clone(), sum),
            sum => _ = builder.receive(other, into.clone(), sum),
        }
        sum = Some(into.clone());
    }
    builder.finish(own.clone());
}
