//! The table of results, and their JSON.

use std::collections::BTreeMap;

use tonic_rdma_commands::serde_json::{Value, json};
use tonic_rdma_commands::statistics::median;
use tonic_rdma_commands::table::markdown;
use tonic_rdma_commands::{Named as _, table};

use super::cell::{Cell, Level, Transport};
use super::honest::Measured;
use super::process::Held;

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
    held: Held,
    others: f64,
}

impl Results {
    pub(crate) fn add(&mut self, cell: Cell, measured: Measured) {
        self.0.entry(cell).or_default().push(measured);
    }

    /// Returns what may not happen, and did.
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
            held: rounds.iter().map(|round| round.held).fold(Held::default(), Held::max),
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
