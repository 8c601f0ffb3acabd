//! Measures an honest client beside a bad one, over TCP and over RDMA on the software device.
//!
//! ```sh
//! cargo bench --bench neighbours
//! cargo bench --bench neighbours -- --neighbours none,flooding --sizes 64 --seconds 5 --json neighbours.json
//! ```
//!
//! Each cell starts a server process and an honest client, which calls the server in a loop and checks each answer. Beside them runs a
//! bad neighbour: a client of the same server that floods it, stops in mid-transfer, holds 1 000 connections without a request, or
//! overwrites all memory that it shares with the server. The table has the honest client's failed calls and latencies, and what the
//! server held at most. `× TCP` is the 99th percentile divided by that over TCP beside the same kind of neighbour.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a bench that can't run says so by stopping")]
#![allow(clippy::panic, clippy::print_stdout, clippy::print_stderr, missing_docs, reason = "the same")]

mod bad;
mod cell;
mod honest;
mod options;
mod process;
mod results;
#[path = "../newcomer/runtimes.rs"]
mod runtimes;
mod server;

use std::process::ExitCode;

use options::Options;
use process::{BAD, SERVER};
use results::Results;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let options = match arguments.split_first() {
        Some((first, rest)) if first == SERVER => {
            server::run(rest);
            return ExitCode::SUCCESS;
        }
        Some((first, rest)) if first == BAD => bad::run(rest),
        // `cargo bench -- --test` runs every bench once.
        Some((first, [])) if first == "--test" => Options::once(),
        _ => Options::parse(&arguments),
    };
    let mut results = Results::default();
    for round in 0..options.rounds {
        for cell in options.cells() {
            let measured = honest::measure(cell, &options);
            eprintln!("round {round}: {cell:?}: {measured}");
            results.add(cell, measured);
        }
    }
    println!("{}", results.table());
    if let Some(path) = &options.table {
        std::fs::write(path, results.table()).unwrap();
    }
    if let Some(path) = &options.json {
        std::fs::write(path, results.json(&arguments)).unwrap();
    }
    if results.failed() == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
