//! Draws plans for the book, in `docs/book/src/pictures`, and counts what they send, in
//! `docs/book/src`.
//!
//! The pictures show what the planner plans: [`rounds`] carries the plans of all ranks out, and [`svg`] draws
//! what moved. After a change of a plan,
//! `UPDATE_PICTURES=1 cargo test -p tonic-rdma-collective --lib pictures` makes pictures and table anew.

mod rounds;
mod svg;

use std::fmt::Write as _;
use std::path::Path;

use self::rounds::{History, Message};
use self::svg::Names;
use super::{Algorithm, Arguments, Collective, arguments};

const RANKS: usize = 4;

#[test]
fn the_pictures_of_the_book_show_these_plans() {
    for (algorithm, file, names) in [
        (Algorithm::OneShot, "one-shot.svg", Names { title: "One-shot", sums: "exchange", copies: "copy" }),
        (
            Algorithm::HalvingDoubling,
            "halving-doubling.svg",
            Names { title: "Halving-doubling", sums: "halving", copies: "doubling" },
        ),
        (Algorithm::Ring, "ring.svg", Names { title: "Ring", sums: "scatter-reduce", copies: "all-gather" }),
    ] {
        is_in_the_book(
            &format!("src/pictures/{file}"),
            &svg::draw(&all_reduce(algorithm, RANKS, RANKS), &names),
        );
    }
}

#[test]
fn the_table_of_the_book_counts_these_plans() {
    // A multiple of all numbers of ranks.
    const ELEMENTS: usize = 840;
    let mut table = "| ranks | one-shot | halving-doubling | ring |\n|---|---|---|---|\n".to_owned();
    for ranks in 2..=8 {
        let cells = [Algorithm::OneShot, Algorithm::HalvingDoubling, Algorithm::Ring].map(|algorithm| {
            let history = all_reduce(algorithm, ranks, ELEMENTS);
            let most = (0..ranks).map(|rank| history.elements_sent(rank)).max().unwrap();
            let rounds = history.rounds.len();
            let sent = most as f64 / ELEMENTS as f64;
            format!("{rounds} round{}, {sent:.2} K", if rounds == 1 { "" } else { "s" })
        });
        writeln!(table, "| {ranks} | {} |", cells.join(" | ")).unwrap();
    }
    is_in_the_book("src/tables/plans.md", &table);
}

#[test]
fn a_drawn_ring_goes_round() {
    let history = all_reduce(Algorithm::Ring, RANKS, RANKS);
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
        let history = all_reduce(algorithm, RANKS, RANKS);
        assert_eq!(history.rounds.len(), rounds, "{algorithm:?}");
        let last = history.states.last().unwrap();
        assert!(last.iter().flatten().all(|sum| *sum == (1 << RANKS) - 1), "{algorithm:?}: {last:?}");
    }
}

/// Carries out an all-reduce.
fn all_reduce(algorithm: Algorithm, ranks: usize, elements: usize) -> History {
    History::of(&Arguments {
        inline: elements,
        ..arguments(Collective::AllReduce, algorithm, ranks, elements)
    })
}

/// Fails if the file of the book differs. Writes the file first, if `UPDATE_PICTURES` says so.
fn is_in_the_book(file: &str, content: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/book").join(file);
    if std::env::var_os("UPDATE_PICTURES").is_some() {
        std::fs::write(&path, content).unwrap();
    }
    assert!(
        std::fs::read_to_string(&path).ok().as_deref() == Some(content),
        "the plans have changed, and docs/book/{file} has not; run \
         `UPDATE_PICTURES=1 cargo test -p tonic-rdma-collective --lib pictures`, and look at it"
    );
}
