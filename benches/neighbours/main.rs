//! Measures an honest client beside a bad one, over TCP and over RDMA on the software device.
//!
//! ```sh
//! cargo bench --bench neighbours
//! cargo bench --bench neighbours -- --list
//! cargo bench --bench neighbours -- --neighbours none,flooding --levels user --sizes 64 --seconds 5 --json neighbours.json
//! ```
//!
//! Each cell starts a server process and an honest client, which calls the server in a loop and checks each answer. Beside them runs a
//! bad neighbour, of this user or of another one: `--list` names the kinds. Half-way, or every 5 s, one more honest client connects;
//! beside a stranger, it belongs to a third user. The table has the failed honest calls, the latencies, and what the server held at most. `× TCP` is
//! the 99th percentile divided by that over TCP beside the same kind of neighbour. The bench fails if an honest call failed, if the server
//! held more than its bounds, or if a neighbour did no harm.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a bench that can't run says so by stopping")]
#![allow(clippy::panic, clippy::print_stdout, clippy::print_stderr, missing_docs, reason = "the same")]
#![allow(unreachable_pub, reason = "a bench exports nothing")]

mod bad;
mod cell;
mod honest;
#[allow(dead_code, reason = "tests use the rest")]
#[path = "../../verbs/tests/neighbours/hostile.rs"]
mod hostile;
mod options;
mod process;
mod results;
mod server;
#[allow(dead_code, reason = "tests use the rest")]
#[path = "../../verbs/tests/neighbours/system.rs"]
mod system;

use std::os::unix::process::CommandExt as _;
use std::process::ExitCode;

use cell::Neighbour;
use options::{Options, Role};
use results::Results;
use tonic_rdma_commands::output::{write_file, write_json};
use tonic_rdma_commands::{Failure, bench_options};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    // All processes let in all users, whatever the variable says. Where the kernel has Yama, all peers are strangers then.
    if std::env::var_os("RDMA_SOFT_PEERS").is_none_or(|value| value != "any") {
        let mut again = tonic_rdma_commands::process::again().unwrap();
        panic!("{}", again.args(&arguments).env("RDMA_SOFT_PEERS", "any").exec());
    }
    let options: Options = bench_options();
    match options.role.clone() {
        Some(Role::Server { transport, runtime }) => server::run(transport, runtime),
        Some(Role::Bad(caller)) => bad::run(&caller),
        Some(Role::Visit(caller)) => honest::visit(&caller),
        None if options.list => print!("{}", Neighbour::list()),
        None => match measure(&options, &arguments) {
            Ok(true) => {}
            Ok(false) => return ExitCode::FAILURE,
            Err(failure) => return failure.report("neighbours"),
        },
    }
    ExitCode::SUCCESS
}

/// Measures all cells. Returns whether nothing happened that may not happen.
fn measure(options: &Options, arguments: &[String]) -> Result<bool, Failure> {
    let mut results = Results::default();
    for round in 0..options.rounds() {
        for cell in options.cells() {
            let measured = honest::measure(cell, options);
            eprintln!("round {round}: {cell:?}: {measured}");
            results.add(cell, measured);
        }
    }
    println!("{}", results.table());
    if let Some(path) = &options.table {
        write_file(path, &results.table())?;
    }
    if let Some(path) = &options.json {
        write_json(path, &results.json(arguments))?;
    }
    results.faults().iter().for_each(|fault| eprintln!("FAILED: {fault}"));
    Ok(results.faults().is_empty())
}
