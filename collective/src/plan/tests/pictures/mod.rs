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
use super::hosts::across;
use super::model::micros;
use super::{Algorithm, Arguments, Collective, arguments};
use crate::plan::PlanTable;

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
        (
            Algorithm::Hierarchical,
            "hierarchical.svg",
            Names { title: "Hierarchical, hosts of two ranks", sums: "sums", copies: "copies" },
        ),
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
fn the_table_of_hosts_in_the_book_counts_these_plans() {
    const ELEMENTS: usize = 55_440;
    let compared = [Algorithm::OneShot, Algorithm::HalvingDoubling, Algorithm::Ring, Algorithm::Hierarchical];
    let mut table =
        "| hosts | one-shot | halving-doubling | ring | hierarchical |\n|---|---|---|---|---|\n".to_owned();
    let in_order = |hosts: &[usize]| {
        hosts.iter().enumerate().flat_map(|(host, ranks)| vec![host; *ranks]).collect::<Vec<usize>>()
    };
    for (name, hosts) in [
        ("2 of 2 ranks", in_order(&[2, 2])),
        ("2 of 4 ranks", in_order(&[4, 4])),
        ("2 of 4 ranks, in turn", (0..8).map(|rank| rank % 2).collect()),
        ("4 of 2 ranks", in_order(&[2; 4])),
        ("4 of 8 ranks", in_order(&[8; 4])),
        ("1 of 4 ranks, 1 of 2, 1 of 1", in_order(&[4, 2, 1])),
    ] {
        let cells = compared.map(|algorithm| {
            let arguments = Arguments {
                hosts: hosts.iter().copied().collect(),
                ..arguments(Collective::AllReduce, algorithm, hosts.len(), ELEMENTS)
            };
            let (sent, rounds) = across(&arguments);
            let most = *sent.iter().max().unwrap() as f64 / ELEMENTS as f64;
            format!("{rounds} round{}, {most:.2} K", if rounds == 1 { "" } else { "s" })
        });
        writeln!(table, "| {name} | {} |", cells.join(" | ")).unwrap();
    }
    is_in_the_book("src/tables/hosts.md", &table);
}

/// The times of the algorithms in a model of several hosts, and which one the table takes.
#[test]
fn the_table_of_modelled_times_in_the_book_is_that_of_these_plans() {
    let compared = [Algorithm::OneShot, Algorithm::HalvingDoubling, Algorithm::Ring, Algorithm::Hierarchical];
    let mut table =
        "| hosts, card | size | one-shot | halving-doubling | ring | hierarchical | chosen |\n".to_owned();
    table.push_str("|---|---|---|---|---|---|---|\n");
    for (hosts, each, in_turn, gbits) in
        [(2, 4, false, 100), (2, 4, false, 25), (2, 4, true, 100), (4, 8, false, 100), (4, 8, false, 25)]
    {
        let (ranks, plans) = (hosts * each, PlanTable::for_hosts(&vec![each; hosts]));
        let turns = if in_turn { ", in turn" } else { "" };
        for (size, bytes) in [
            ("1 KiB", 1 << 10),
            ("16 KiB", 16 << 10),
            ("256 KiB", 256 << 10),
            ("4 MiB", 4 << 20),
            ("16 MiB", 16 << 20),
        ] {
            let mut times = Vec::new();
            let cells = compared.map(|algorithm| {
                // The model takes long for the many messages of long one-shots.
                if algorithm == Algorithm::OneShot && bytes > 1 << 20 {
                    return "–".to_owned();
                }
                let of_rank = |rank| if in_turn { rank % hosts } else { rank / each };
                let arguments = Arguments {
                    hosts: (0..ranks).map(of_rank).collect(),
                    chunk: 256 << 10,
                    inline: 16 << 10,
                    ..arguments(Collective::AllReduce, algorithm, ranks, bytes)
                };
                let micros = micros(&arguments, gbits);
                times.push(micros);
                format!("{micros:.0} µs")
            });
            // The hierarchical plan is the last one.
            let best = times.iter().copied().fold(f64::MAX, f64::min);
            let ratio = times.last().unwrap() / best;
            assert!(bytes < 16 << 10 || ratio <= 1.25, "{hosts} of {each}, {size}: {ratio} times the best");
            let chosen = plans.choose(bytes).0;
            writeln!(
                table,
                "| {hosts} of {each} ranks{turns}, {gbits} Gb/s | {size} | {} | {chosen} |",
                cells.join(" | ")
            )
            .unwrap();
        }
    }
    is_in_the_book("src/tables/hosts-times.md", &table);
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
    for (algorithm, rounds) in [
        (Algorithm::OneShot, 1),
        (Algorithm::HalvingDoubling, 4),
        (Algorithm::Ring, 6),
        (Algorithm::Hierarchical, 4),
    ] {
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
        hosts: (0..ranks).map(|rank| rank / 2).collect(),
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
