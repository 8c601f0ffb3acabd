//! Draws plans for the book, in `docs/book/src/pictures`.
//!
//! The pictures show what the planner plans: [`rounds`] carries the plans of all ranks out, and [`svg`] draws what moved. After a
//! change of a plan, `UPDATE_PICTURES=1 cargo test -p tonic-rdma-collective --lib pictures` draws the pictures anew.

mod rounds;
mod svg;

use std::path::{Path, PathBuf};

use self::rounds::{History, Message};
use self::svg::Names;
use super::{Algorithm, Arguments, Collective, arguments};

const RANKS: usize = 4;

#[test]
fn the_pictures_of_the_book_show_these_plans() {
    let mut stale = Vec::new();
    for (algorithm, file, names) in [
        (Algorithm::OneShot, "one-shot.svg", Names { title: "One-shot", sums: "exchange", copies: "copy" }),
        (
            Algorithm::HalvingDoubling,
            "halving-doubling.svg",
            Names { title: "Halving-doubling", sums: "halving", copies: "doubling" },
        ),
        (Algorithm::Ring, "ring.svg", Names { title: "Ring", sums: "scatter-reduce", copies: "all-gather" }),
    ] {
        let picture = svg::draw(&all_reduce(algorithm, RANKS), &names);
        let path = folder().join(file);
        if std::env::var_os("UPDATE_PICTURES").is_some() {
            std::fs::write(&path, &picture).unwrap();
        }
        if std::fs::read_to_string(&path).ok().as_deref() != Some(picture.as_str()) {
            stale.push(file);
        }
    }
    assert!(
        stale.is_empty(),
        "the plans have changed, and these pictures have not: {stale:?}; run \
         `UPDATE_PICTURES=1 cargo test -p tonic-rdma-collective --lib pictures`, and look at them"
    );
}

#[test]
fn a_drawn_ring_goes_round() {
    let history = all_reduce(Algorithm::Ring, RANKS);
    assert_eq!(history.rounds.len(), 2 * (RANKS - 1));
    for (number, round) in history.rounds.iter().enumerate() {
        assert_eq!(round.len(), RANKS, "round {number}");
        for Message { from, to, range, reduces } in round {
            assert_eq!((*to, range.len(), *reduces), ((from + 1) % RANKS, 1, number < RANKS - 1));
        }
    }
}

#[test]
fn a_drawn_plan_ends_with_the_whole_on_all_ranks() {
    for (algorithm, rounds) in
        [(Algorithm::OneShot, 1), (Algorithm::HalvingDoubling, 4), (Algorithm::Ring, 6)]
    {
        let history = all_reduce(algorithm, RANKS);
        assert_eq!(history.rounds.len(), rounds, "{algorithm:?}");
        let last = history.states.last().unwrap();
        assert!(last.iter().flatten().all(|sum| *sum == (1 << RANKS) - 1), "{algorithm:?}: {last:?}");
    }
}

/// Carries out an all-reduce in place, of one element for each rank.
fn all_reduce(algorithm: Algorithm, ranks: usize) -> History {
    History::of(&Arguments {
        in_place: true,
        inline: ranks,
        ..arguments(Collective::AllReduce, algorithm, ranks, ranks)
    })
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/book/src/pictures")
}
