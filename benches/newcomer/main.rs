//! What a newcomer gets: `#[tokio::main]` or tokio's current-thread runtime, the system's allocator, nothing pinned.
//!
//! ```sh
//! cargo bench --bench newcomer
//! cargo bench --bench newcomer -- --runtimes multi-thread --paths grpc-tcp,static --sizes 64 --rounds 5
//! ```
//!
//! Two processes: this one, and this binary once more as the server (see `server`). Each path is the code of README's examples in
//! a loop; every message that arrives is checked. The paths take turns, `--rounds` times, and the medians are shown, beside those
//! of gRPC over TCP with as many bytes in the same runtime.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a bench that can't run says so by stopping")]
#![allow(clippy::panic, clippy::print_stdout, missing_docs, reason = "the same")]

mod client;
mod content;
mod options;
mod runtimes;
mod server;

use std::collections::BTreeMap;

use client::{Cell, Measured};
use options::Options;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    match arguments.split_first() {
        Some((first, rest)) if first == server::ARGUMENT => server::run(rest),
        // `cargo bench -- --test` runs every bench once.
        Some((first, [])) if first == "--test" => measure(&Options::once()),
        _ => measure(&Options::parse(&arguments)),
    }
}

fn measure(options: &Options) {
    let mut measured: BTreeMap<Cell, Vec<Measured>> = BTreeMap::new();
    for _ in 0..options.rounds {
        for cell in options.cells() {
            let once = client::run(cell, options.duration);
            measured.entry(cell).or_default().push(once);
        }
    }
    println!(
        "{:<14} {:<11} {:>9} {:>9} {:>11} {:>12} {:>6}",
        "runtime", "path", "bytes", "in flight", "µs", "× grpc-tcp", "naps"
    );
    for (cell, rounds) in &measured {
        let micros = median(rounds);
        let naps: u64 = rounds.iter().map(|once| once.naps).sum();
        let ratio = measured
            .get(&cell.over_tcp())
            .map_or_else(String::new, |tcp| format!("{:.2}", median(tcp) / micros));
        let Cell { runtime, bytes, inflight, path } = cell;
        println!("{runtime:<14} {path:<11} {bytes:>9} {inflight:>9} {micros:>11.2} {ratio:>12} {naps:>6}");
    }
}

fn median(rounds: &[Measured]) -> f64 {
    let mut micros: Vec<f64> = rounds.iter().map(|once| once.micros).collect();
    micros.sort_by(f64::total_cmp);
    micros[micros.len() / 2]
}
