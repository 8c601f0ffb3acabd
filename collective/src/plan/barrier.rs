//! Barrier. Of few ranks, each sends an empty message to each other one: one round, so that each rank waits once. Where ranks share
//! cores, a wait is a change to another process, which takes longer than some messages.
//!
//! Of more ranks, by dissemination: ⌈log2 N⌉ rounds. In round k, rank r sends an empty message to rank r + 2^k, and waits for one of
//! rank r − 2^k (Hensgen, Finkel, Manber: "Two algorithms for barrier synchronization", 1988).

use super::builder::Builder;
use super::step::{Action, Span};

/// The largest number of ranks of which each sends to each.
const FEW: usize = 8;

pub(super) fn plan(builder: &mut Builder) {
    let nothing = Span::work(0..0);
    if builder.ranks <= FEW {
        for distance in 1..builder.ranks {
            let to = builder.ahead(distance);
            builder.push(Action::Send { to, from: nothing.clone() }, &[]);
        }
        for distance in 1..builder.ranks {
            let from = builder.behind(distance);
            builder.push(Action::Receive { from, into: nothing.clone(), reduce: None }, &[]);
        }
        return;
    }
    let mut received = Vec::new();
    let mut distance = 1;
    while distance < builder.ranks {
        let to = builder.ahead(distance);
        // The message says that this rank has heard of all ranks up to `distance` places behind it.
        builder.push(Action::Send { to, from: nothing.clone() }, &received);
        let from = builder.behind(distance);
        // Each round after the one before, so that the last step ends the barrier.
        let receive = Action::Receive { from, into: nothing.clone(), reduce: None };
        received = vec![builder.push(receive, &received)];
        distance *= 2;
    }
}
