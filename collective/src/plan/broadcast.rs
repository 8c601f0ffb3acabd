//! Broadcast: from the root to every rank directly, along a binomial tree, or along a chain. Pieces follow one another, so a long
//! broadcast along a chain takes little longer than one transfer.
//!
//! ```text
//!   one-shot   0 → 1, 0 → 2, … 0 → 7
//!   tree       0 → 4, 0 → 2, 0 → 1, 4 → 6, 4 → 5, 2 → 3, 6 → 7     (places, counted from the root)
//!   chain      0 → 1 → 2 → … → 7
//! ```

use super::builder::Builder;
use super::step::{Algorithm, Span};

pub(super) fn plan(builder: &mut Builder, root: usize, algorithm: Algorithm) {
    let ranks = builder.ranks;
    let place = (builder.rank + ranks - root % ranks) % ranks;
    let rank = |place: usize| (place + root) % ranks;
    let (parent, children) = match algorithm {
        Algorithm::OneShot => (0, if place == 0 { (1..ranks).collect() } else { Vec::new() }),
        Algorithm::HalvingDoubling => tree(place, ranks),
        Algorithm::Ring => (place.saturating_sub(1), (place + 1..ranks).take(1).collect()),
    };
    for piece in builder.pieces(0..builder.elements) {
        let from = match place {
            0 => Span::input(piece.clone()),
            _ => {
                builder.receive(rank(parent), Span::work(piece.clone()), None);
                Span::work(piece.clone())
            }
        };
        for child in &children {
            builder.send(rank(*child), from.clone());
        }
        if place == 0 && !builder.in_place {
            builder.local(from, Span::work(piece), None);
        }
    }
}

/// Returns the parent and the children of a place in the binomial tree. The parent of a place is the place without its lowest bit.
/// The child with the most descendants comes first.
fn tree(place: usize, ranks: usize) -> (usize, Vec<usize>) {
    let lowest = if place == 0 { ranks.next_power_of_two() } else { 1 << place.trailing_zeros() };
    let distances = std::iter::successors(Some(lowest / 2), |distance| Some(distance / 2));
    let children = distances.take_while(|distance| *distance > 0).map(|distance| place + distance);
    (place & place.wrapping_sub(1), children.filter(|child| *child < ranks).collect())
}
