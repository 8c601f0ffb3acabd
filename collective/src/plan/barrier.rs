//! Barrier by dissemination: ⌈log2 N⌉ rounds. In round k, rank r sends an empty message to rank r + 2^k, and waits for one of rank
//! r − 2^k (Hensgen, Finkel, Manber: "Two algorithms for barrier synchronization", 1988).

use super::builder::Builder;
use super::step::{Action, Span};

pub(super) fn plan(builder: &mut Builder) {
    let mut received = Vec::new();
    let mut distance = 1;
    while distance < builder.ranks {
        let to = builder.ahead(distance);
        // The message says that this rank has heard of all ranks up to `distance` places behind it.
        builder.push(Action::Send { to, from: Span::work(0..0) }, &received);
        let from = builder.behind(distance);
        // Each round after the one before, so that the last step ends the barrier.
        let receive = Action::Receive { from, into: Span::work(0..0), reduce: None };
        received = vec![builder.push(receive, &received)];
        distance *= 2;
    }
}
