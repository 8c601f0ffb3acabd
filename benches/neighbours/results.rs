//! The table of results, and their JSON.

use std::collections::BTreeMap;
use std::fmt::Write as _;

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
        Some(Summary {
            calls: rounds.iter().map(|round| round.micros.len()).sum(),
            failed: rounds.iter().map(|round| round.failed).sum(),
            p50: median(rounds, |round| round.quantile(0.5)),
            p99: median(rounds, |round| round.quantile(0.99)),
            others: median(rounds, |round| round.others_each_second),
            held: rounds.iter().map(|round| round.held).fold(Held::default(), Held::max),
        })
    }

    /// Returns the quotient of the 99th percentile and that over TCP beside the same kind of neighbour.
    fn over_tcp(&self, cell: Cell) -> Option<f64> {
        let tcp = self.summary(Cell { transport: Transport::Tcp, level: Level::User, ..cell })?;
        (cell.transport == Transport::Rdma).then_some(self.summary(cell)?.p99 / tcp.p99)
    }

    /// Returns a table in Markdown.
    pub(crate) fn table(&self) -> String {
        let mut table = String::from(
            "| bytes | neighbour | level | transport | calls | failed | p50 | p99 | p99 × TCP | neighbour's calls/s | server's memory | descriptors | mappings |\n\
             |---|---|---|---|---|---|---|---|---|---|---|---|---|\n",
        );
        for &cell in self.0.keys() {
            let Some(summary) = self.summary(cell) else { continue };
            let Summary { calls, failed, p50, p99, held, others } = summary;
            let ratio = self.over_tcp(cell).map_or_else(String::new, |ratio| format!("{ratio:.2}"));
            let (bytes, neighbour, transport) = (cell.bytes, cell.neighbour.name(), cell.transport.name());
            let level = cell.level.name();
            let Held { resident_kib, descriptors, mappings } = held;
            let memory = resident_kib / 1024;
            let _ = writeln!(
                table,
                "| {bytes} | {neighbour} | {level} | {transport} | {calls} | {failed} | {p50:.0} µs | {p99:.0} µs | {ratio} | {others:.0} | {memory} MiB | {descriptors} | {mappings} |"
            );
        }
        table
    }

    /// Returns the results as JSON, with the arguments of the run.
    pub(crate) fn json(&self, arguments: &[String]) -> String {
        let cells: Vec<String> =
            self.0.keys().filter_map(|&cell| Some((cell, self.summary(cell)?))).map(line).collect();
        let arguments = arguments.join(" ");
        format!("{{\"arguments\": {arguments:?}, \"cells\": [\n{}\n]}}\n", cells.join(",\n"))
    }
}

fn line((cell, summary): (Cell, Summary)) -> String {
    let Summary { calls, failed, p50, p99, held, others } = summary;
    let Held { resident_kib, descriptors, mappings } = held;
    format!(
        "  {{\"bytes\": {}, \"neighbour\": \"{}\", \"level\": \"{}\", \"transport\": \"{}\", \"calls\": {calls}, \"failed\": {failed}, \"p50_micros\": {p50:.1}, \"p99_micros\": {p99:.1}, \"neighbour_calls_each_second\": {others:.0}, \"server_resident_kib\": {resident_kib}, \"server_descriptors\": {descriptors}, \"server_mappings\": {mappings}}}",
        cell.bytes,
        cell.neighbour.name(),
        cell.level.name(),
        cell.transport.name(),
    )
}

/// Returns the median over the rounds.
fn median(rounds: &[Measured], figure: impl Fn(&Measured) -> f64) -> f64 {
    let mut figures: Vec<f64> = rounds.iter().map(figure).collect();
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}
