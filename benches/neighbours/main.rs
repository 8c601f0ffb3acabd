//! Measures an honest client beside a bad one, over TCP and over RDMA on the software device.
//!
//! ```sh
//! cargo bench --bench neighbours
//! cargo bench --bench neighbours -- --list
//! cargo bench --bench neighbours -- --neighbours none,flooding --levels user --sizes 64 --seconds 5 --json neighbours.json
//! ```
//!
//! Each cell starts a server process and an honest client, which calls the server in a loop and checks each
//! answer. Beside them runs a bad neighbour, of this user or of another one: `--list` names the kinds.
//! Half-way, or every 5 s, one more honest client connects; beside a stranger, it belongs to a third user.
//! The table has the failed honest calls, the latencies, and what the server held at most. `× TCP` is the
//! 99th percentile divided by that over TCP beside the same kind of neighbour. The bench fails if an honest
//! call failed, if the server held more than its bounds, or if a neighbour did no harm.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a bench that can't run says so by stopping")]
#![allow(clippy::panic, clippy::print_stdout, clippy::print_stderr, missing_docs, reason = "the same")]
#![allow(unreachable_pub, reason = "a bench exports nothing")]

mod bad;
mod cell;
mod honest;
#[allow(dead_code, reason = "tests use the rest")]
#[path = "../../verbs/tests/neighbours/hostile.rs"]
mod hostile;
mod server;
#[allow(dead_code, reason = "tests use the rest")]
#[path = "../../verbs/tests/neighbours/system.rs"]
mod system;

use std::collections::BTreeMap;
use std::os::unix::process::CommandExt as _;
use std::process::ExitCode;

use crate::cell::{Cell, Level, Neighbour, Options, Role, Transport};
use crate::honest::Measured;
use crate::server::Resources;
use tonic_rdma_commands::output::{write_file, write_json};
use tonic_rdma_commands::serde_json::{Value, json};
use tonic_rdma_commands::statistics::median;
use tonic_rdma_commands::table::{self, markdown};
use tonic_rdma_commands::{Failure, Named as _, bench_options};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    // All processes let in all users, whatever the variable says. Where the kernel has Yama, all peers are
    // strangers then.
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

/// Measures all cells. Returns whether no fault was found.
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

/// The measurements of all rounds, by cell.
#[derive(Debug, Default)]
pub(crate) struct Results(BTreeMap<Cell, Vec<Measured>>);

/// The result of a cell: medians over the rounds, the sum of failed calls, and the most that the server held.
#[derive(Clone, Copy, Debug)]
struct Summary {
    calls: usize,
    failed: u64,
    p50: f64,
    p99: f64,
    held: Resources,
    others: f64,
}

impl Results {
    pub(crate) fn add(&mut self, cell: Cell, measured: Measured) {
        self.0.entry(cell).or_default().push(measured);
    }

    /// Returns the faults: failed honest calls, exceeded bounds, and neighbours that did no harm.
    pub(crate) fn faults(&self) -> Vec<String> {
        let rounds = self.0.iter().flat_map(|(cell, rounds)| rounds.iter().map(move |round| (cell, round)));
        rounds
            .flat_map(|(cell, round)| {
                let failed = (round.failed > 0).then(|| format!("{} honest calls failed", round.failed));
                failed.into_iter().chain(round.fault.clone()).map(move |fault| format!("{cell:?}: {fault}"))
            })
            .collect()
    }

    fn summary(&self, cell: Cell) -> Option<Summary> {
        let rounds = self.0.get(&cell)?;
        let of = |figure: fn(&Measured) -> f64| median(rounds.iter().map(figure));
        Some(Summary {
            calls: rounds.iter().map(|round| round.micros.len()).sum(),
            failed: rounds.iter().map(|round| round.failed).sum(),
            p50: of(|round| round.quantile(0.5)),
            p99: of(|round| round.quantile(0.99)),
            others: of(|round| round.others_each_second),
            held: rounds.iter().map(|round| round.held).fold(Resources::default(), Resources::max),
        })
    }

    /// Returns the quotient of the 99th percentile and that over TCP beside the same kind of neighbour.
    fn over_tcp(&self, cell: Cell) -> Option<f64> {
        let tcp = self.summary(Cell { transport: Transport::Tcp, level: Level::User, ..cell })?;
        (cell.transport == Transport::Rdma).then_some(self.summary(cell)?.p99 / tcp.p99)
    }

    fn summaries(&self) -> impl Iterator<Item = (Cell, Summary)> {
        self.0.keys().filter_map(|&cell| Some((cell, self.summary(cell)?)))
    }

    /// Returns a table in Markdown.
    pub(crate) fn table(&self) -> String {
        let headings = [
            "bytes",
            "neighbour",
            "level",
            "transport",
            "calls",
            "failed",
            "p50",
            "p99",
            "p99 × TCP",
            "neighbour's calls/s",
            "server's memory",
            "descriptors",
            "mappings",
        ];
        let row = |(cell, summary): (Cell, Summary)| {
            let Summary { calls, failed, p50, p99, held, others } = summary;
            vec![
                cell.bytes.to_string(),
                cell.neighbour.name().to_owned(),
                cell.level.name().to_owned(),
                cell.transport.name().to_owned(),
                calls.to_string(),
                failed.to_string(),
                format!("{p50:.0} µs"),
                format!("{p99:.0} µs"),
                self.over_tcp(cell).map_or_else(String::new, |ratio| table::times(Some(ratio))),
                format!("{others:.0}"),
                format!("{} MiB", held.resident_kib / 1024),
                held.descriptors.to_string(),
                held.mappings.to_string(),
            ]
        };
        format!("{}\n", markdown(&headings, 4, self.summaries().map(row)))
    }

    /// Returns the results as JSON, with the arguments of the run.
    pub(crate) fn json(&self, arguments: &[String]) -> Value {
        let row = |(cell, summary): (Cell, Summary)| {
            json!({
                "bytes": cell.bytes,
                "neighbour": cell.neighbour.name(),
                "level": cell.level.name(),
                "transport": cell.transport.name(),
                "calls": summary.calls,
                "failed": summary.failed,
                "p50_micros": summary.p50,
                "p99_micros": summary.p99,
                "neighbour_calls_each_second": summary.others,
                "server_resident_kib": summary.held.resident_kib,
                "server_descriptors": summary.held.descriptors,
                "server_mappings": summary.held.mappings,
            })
        };
        json!({ "arguments": arguments.join(" "), "cells": self.summaries().map(row).collect::<Vec<_>>() })
    }
}
