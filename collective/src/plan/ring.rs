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

use super::builder::Builder;
use super::step::Span;

pub(super) fn all_reduce(builder: &mut Builder) {
    reduce_scatter(builder);
    all_gather(builder);
}

/// Reduces part r on rank r.
pub(super) fn reduce_scatter(builder: &mut Builder) {
    pass_parts(builder, 1, true);
}

/// Sends part r of rank r to all ranks.
pub(super) fn all_gather(builder: &mut Builder) {
    pass_parts(builder, 0, false);
}

/// Passes all parts but one round the ring. The first one that rank r sends is part r − `first`.
fn pass_parts(builder: &mut Builder, first: usize, reduces: bool) {
    let (next, previous) = (builder.ahead(1), builder.behind(1));
    let last = first + builder.ranks - 2;
    for distance in first..=last {
        let leaving = builder.chunks(builder.part(builder.behind(distance)));
        let arriving = builder.chunks(builder.part(builder.behind(distance + 1)));
        for (leave, arrive) in zip_longest(leaving, arriving) {
            if let Some(chunk) = leave {
                builder.send(next, Span::work(chunk));
            }
            if let Some(chunk) = arrive {
                let into = Span::work(chunk);
                builder.receive(previous, into.clone(), reduces.then(|| into.clone()));
                if reduces && distance == last {
                    builder.finish(into);
                }
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
