//! Measures Flight over tonic-rdma against stock Flight over TCP: gets and puts of record batches.
//!
//! ```sh
//! cargo bench -p tonic-rdma-flight
//! cargo bench -p tonic-rdma-flight -- --sizes 8388608 --runtimes multi-thread --rounds 5 --json flight.json
//! ```
//!
//! Each measurement has two new processes, a server and a client, which run this program with tokio's usual
//! runtime and the system's allocator, and are not pinned. The paths are measured in turn, `--rounds` times,
//! and the table shows medians. `ours` is a native call with `FlightClient`, `FlightServer` and
//! `BatchEncoder`. `stock` is arrow-flight's client, server and encoder over TCP, with the windows and frames
//! that `compare --http2 tuned` found best; each batch is one message. `stock-split` is the same with
//! arrow-flight's own limit of 2 MiB for a message. All of them have no limit for what they decode.
//!
//! Receivers look at one number in each page of each batch. Before the clock starts, and always with
//! `--check all`, they compare all numbers.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a bench that can't run says so by stopping")]
#![allow(clippy::panic, clippy::print_stdout, missing_docs, reason = "the same")]

mod client;
mod content;
mod options;
mod server;
mod service;
#[path = "../../tests/flight/stubs.rs"]
mod stubs;
mod table;

use options::{Options, Role};
use tonic_rdma_commands::bench_options;
use tonic_rdma_commands::output::write_json;

fn main() {
    let mut options: Options = bench_options();
    match options.role {
        Some(Role::Server(cell)) => return server::run(cell),
        Some(Role::Client { cell, address, millis, check }) => {
            return client::run(cell, &address, millis, check);
        }
        None => {}
    }
    if options.test {
        (options.rounds, options.millis) = (1, 1);
    }
    let mut measured = table::Rounds::new();
    for round in 0..options.rounds {
        for mut cells in options.cells_by_path() {
            // The path that comes first differs from round to round.
            cells.rotate_left(round % options.paths.len());
            for cell in cells {
                let once = client::measure(cell, &options);
                measured.entry(cell).or_default().push(once);
            }
        }
    }
    table::print(&measured);
    if let Some(file) = &options.json {
        write_json(file, &table::json(&measured)).unwrap();
    }
}
