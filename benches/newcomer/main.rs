//! Measures what a new user gets: `#[tokio::main]` or tokio's current-thread runtime, the system's allocator, nothing pinned.
//!
//! ```sh
//! cargo bench --bench newcomer
//! cargo bench --bench newcomer -- --runtimes multi-thread --paths put-tcp,static --sizes 64 --rounds 5
//! ```
//!
//! The bench starts itself once more as the server process. Each path is the code of the book's examples in a loop, and the bench
//! checks every message. The bench runs all paths one after the other, `--rounds` times, and shows the medians beside the medians of
//! gRPC over TCP with as many bytes in the same kind of runtime. A wait that a timer ended is a failure.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a bench that can't run says so by stopping")]
#![allow(clippy::panic, clippy::print_stdout, missing_docs, reason = "the same")]

mod calls;
mod client;
mod content;
mod late_waits;
mod options;
mod path;
mod runtimes;
mod server;
mod services;
mod serving;
mod tensors;

use std::collections::BTreeMap;
use std::process::ExitCode;

use client::Measured;
use options::Options;
use path::Cell;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let measured = match arguments.split_first() {
        Some((first, rest)) if first == server::ARGUMENT => {
            server::run(rest);
            return ExitCode::SUCCESS;
        }
        // `cargo bench -- --test` runs every bench once.
        Some((first, [])) if first == "--test" => measure(&Options::once()),
        _ => measure(&Options::parse(&arguments)),
    };
    show(&measured);
    let late_waits: u64 = measured.values().flatten().map(|once| once.late_waits).sum();
    if late_waits == 0 {
        return ExitCode::SUCCESS;
    }
    println!("a timer, the safety net, ended {late_waits} waits: a wake-up is missing");
    ExitCode::FAILURE
}

type Rounds = BTreeMap<Cell, Vec<Measured>>;

fn measure(options: &Options) -> Rounds {
    let mut measured = Rounds::new();
    for _ in 0..options.rounds {
        for cell in options.cells() {
            let once = client::run(cell, options.duration);
            measured.entry(cell).or_default().push(once);
        }
    }
    measured
}

fn show(measured: &Rounds) {
    println!(
        "{:<14} {:<11} {:>9} {:>9} {:>11} {:>7} {:<11} {:>4}",
        "runtime", "path", "bytes", "in flight", "µs", "×", "of", "late"
    );
    for (cell, rounds) in measured {
        let micros = median(rounds);
        let late_waits: u64 = rounds.iter().map(|once| once.late_waits).sum();
        let tcp = cell.over_tcp();
        let ratio =
            measured.get(&tcp).map_or_else(String::new, |rounds| format!("{:.2}", median(rounds) / micros));
        let (Cell { runtime, bytes, inflight, path }, than) = (cell, tcp.path);
        println!(
            "{runtime:<14} {path:<11} {bytes:>9} {inflight:>9} {micros:>11.2} {ratio:>7} {than:<11} {late_waits:>4}"
        );
    }
}

fn median(rounds: &[Measured]) -> f64 {
    let mut micros: Vec<f64> = rounds.iter().map(|once| once.micros).collect();
    micros.sort_by(f64::total_cmp);
    micros[micros.len() / 2]
}
