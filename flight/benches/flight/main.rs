//! Measures Flight over tonic-rdma against stock Flight over TCP: gets and puts of record batches.
//!
//! ```sh
//! cargo bench -p tonic-rdma-flight
//! cargo bench -p tonic-rdma-flight -- --sizes 8388608 --runtimes multi-thread --rounds 5 --json flight.json
//! ```
//!
//! Each measurement has two new processes, a server and a client, which run this program with tokio's usual runtime and the system's
//! allocator, and are not pinned. The paths are measured in turn, `--rounds` times, and the table shows medians. `ours` is a native call with
//! `FlightClient`, `FlightServer` and `BatchEncoder`. `stock` is arrow-flight's client, server and encoder over TCP, with the windows and
//! frames that `compare --http2 tuned` found best; each batch is one message. `stock-split` is the same with arrow-flight's own limit
//! of 2 MiB for a message. All of them have no limit for what they decode.
//!
//! Receivers look at one number in each page of each batch. Before the clock starts, and always with `--check all`, they compare all numbers.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a bench that can't run says so by stopping")]
#![allow(clippy::panic, clippy::print_stdout, missing_docs, reason = "the same")]

mod client;
mod content;
mod options;
#[path = "../../../benches/newcomer/runtimes.rs"]
mod runtimes;
mod server;
mod service;
mod table;

use options::Options;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let options = match arguments.split_first() {
        Some((first, rest)) if first == server::ARGUMENT => return server::run(rest),
        Some((first, rest)) if first == client::ARGUMENT => return client::run(rest),
        // `cargo bench -- --test` runs every bench once.
        Some((first, [])) if first == "--test" => Options::once(),
        _ => Options::parse(&arguments),
    };
    let mut measured = table::Rounds::new();
    for round in 0..options.rounds {
        for mut turn in options.turns() {
            // The path that comes first differs from round to round.
            turn.rotate_left(round % options.paths.len());
            for cell in turn {
                let once = client::measure(cell, &options);
                measured.entry(cell).or_default().push(once);
            }
        }
    }
    table::print(&measured);
    if let Some(file) = &options.json {
        std::fs::write(file, table::json(&measured)).unwrap();
    }
}
