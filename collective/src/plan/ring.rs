//! The ring of Baidu's allreduce (A. Gibiansky: "Bringing HPC techniques to deep learning", 2017): each rank
//! sends to the next rank only, and receives from the one before it only.
//!
//! ```text
//!   scatter-reduce, 4 ranks; in step s, rank r sends part r−s−1, and reduces the part r−s−2 that it receives
//!
//!            rank 0      rank 1      rank 2      rank 3
//!   s = 0    3 →         0 →         1 →         2 →
//!   s = 1    2 →         3 →         0 →         1 →
//!   s = 2    1 →         2 →         3 →         0 →          then part r is final at rank r
//!
//!   all-gather: in step s, rank r sends part r−s, and receives part r−s−1
//! ```
//!
//! Baidu's parts are numbered by one more: there, part r+1 is final at rank r. Each rank sends all parts but
//! one in each half, which is 2(N−1)/N·K for K bytes on N ranks. A part is sent in chunks. A rank sends a
//! chunk on as soon as it has reduced it, while the next chunk arrives.

use std::ops::Range;

use super::builder::{Builder, shifted};
use super::step::Span;

pub(super) fn all_reduce(builder: &mut Builder) {
    scatter_reduce(builder, &|_, chunk| Span::work(chunk));
    gather(builder);
}

pub(super) fn reduce_scatter(builder: &mut Builder) {
    let in_place = builder.in_place;
    let (last, own) = (builder.ranks - 2, builder.part(builder.rank).start);
    // Out of place, sums of even and odd steps have a buffer each.
    let buffer = builder.part(0).len();
    if !in_place && builder.ranks > 2 {
        builder.reserve(if builder.ranks == 3 { buffer } else { 2 * buffer });
    }
    let parts: Vec<usize> =
        (0..=last).map(|step| builder.part(builder.behind(step + 1) + builder.ranks - 1).start).collect();
    scatter_reduce(builder, &|step, chunk| match in_place {
        true => Span::work(chunk),
        false if step == last => Span::work(shifted(chunk, own)),
        false => {
            let range = shifted(chunk, parts[step]);
            let offset = step % 2 * buffer;
            Span::scratch(range.start + offset..range.end + offset)
        }
    });
}

pub(super) fn all_gather(builder: &mut Builder) {
    builder.copy_own();
    gather(builder);
}

/// Reduces part r on rank r. `span_of` says where the sums of a step lie.
fn scatter_reduce(builder: &mut Builder, span_of: &dyn Fn(usize, Range<usize>) -> Span) {
    let (next, previous) = (builder.ahead(1), builder.behind(1));
    for step in 0..builder.ranks - 1 {
        let sent = builder.part(builder.behind(step + 1));
        let received = builder.part(builder.behind(step + 1) + builder.ranks - 1);
        let is_last = step == builder.ranks - 2;
        for (leave, arrive) in zip_longest(builder.chunks(sent), builder.chunks(received)) {
            if let Some(chunk) = leave {
                let from = if step == 0 { Span::input(chunk) } else { span_of(step - 1, chunk) };
                builder.send(next, from);
            }
            if let Some(chunk) = arrive {
                let into = span_of(step, chunk.clone());
                builder.receive(previous, into.clone(), Some(Span::input(chunk)));
                if is_last {
                    builder.finish(into);
                }
            }
        }
    }
}

/// Sends part r of rank r, which lies in Work, to all ranks.
fn gather(builder: &mut Builder) {
    let (next, previous) = (builder.ahead(1), builder.behind(1));
    for step in 0..builder.ranks - 1 {
        let leaving = builder.chunks(builder.part(builder.behind(step)));
        let arriving = builder.chunks(builder.part(builder.behind(step + 1)));
        for (leave, arrive) in zip_longest(leaving, arriving) {
            if let Some(chunk) = leave {
                builder.send(next, Span::work(chunk));
            }
            if let Some(chunk) = arrive {
                builder.receive(previous, Span::work(chunk), None);
            }
        }
    }
}

/// Returns one item of each at a time, until both have ended.
fn zip_longest<T>(
    mut one: impl Iterator<Item = T>,
    mut other: impl Iterator<Item = T>,
) -> impl Iterator<Item = (Option<T>, Option<T>)> {
    std::iter::from_fn(move || Some((one.next(), other.next())))
        .take_while(|(one, other)| one.is_some() || other.is_some())
}
