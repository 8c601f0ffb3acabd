//! The table for the terminal, and the columns of table and report.

use std::path::Path;

use comfy_table::Table;
use tonic_rdma_commands::table::{dash, grid, times};
use tonic_rdma_commands::{Failure, output, units};

use super::facts::Facts;
use super::row::{Ratio, Row};
use crate::compare::modes::mode::Mode;

/// A column: the heading, and a function from a row and all rows to the text of the row.
pub(crate) struct Column {
    pub(crate) heading: &'static str,
    pub(crate) text: fn(&Row, &[Row]) -> String,
}

/// Returns the columns that `rows` need.
pub(crate) fn columns(rows: &[Row]) -> Vec<Column> {
    let column = |heading, text| Column { heading, text };
    let open_loop = rows.iter().any(|row| row.rate.is_some());
    let mut columns =
        vec![column("mode", |row, _| row.mode.to_owned()), column("size", |row, _| row.cell.load.label())];
    if open_loop {
        columns.extend([
            column("at most in flight", |row, _| row.inflight.to_string()),
            column("offered/s", |row, _| row.rate.map_or_else(dash, units::count)),
            column("achieved/s", |row, _| measured(row, achieved(row))),
        ]);
    } else {
        columns.push(column("in flight", |row, _| row.inflight.to_string()));
    }
    columns.extend([
        column("p50", |row, _| measured(row, units::micros(row.p50_us))),
        column("p99", |row, _| row.p99_us.map_or_else(dash, units::micros)),
    ]);
    if open_loop {
        columns.push(column("p99.9", |row, _| row.p999_us.map_or_else(dash, units::micros)));
    } else {
        columns.push(column("ops/s", |row, _| measured(row, units::count(row.ops_per_s))));
    }
    columns.extend([
        column("GB/s", |row, _| measured(row, units::digits(row.gbytes_per_s))),
        column("CPU/op", |row, _| measured(row, units::micros(row.cpu_us_per_op))),
        column("errors", |row, _| row.errors.to_string()),
        column("latency ×", |row, rows| times(Ratio::of(row, rows).latency)),
        column("throughput ×", |row, rows| times(Ratio::of(row, rows).throughput)),
    ]);
    columns
}

/// Explains the columns and modes that need an explanation.
pub(crate) fn legend(rows: &[Row]) -> String {
    let mut legend = "latency ×, throughput ×: how many times better than grpc-tcp in the same cell \
                      (p50, ops/s). CPU/op: user + system time of both processes."
        .to_owned();
    let has = |mode: Mode| rows.iter().any(|row| row.mode == mode.name());
    if has(Mode::GrpcTcpBusy) {
        legend.push_str("\ngrpc-tcp-busy: grpc-tcp in a runtime that never sleeps, at both ends.");
    }
    if has(Mode::GrpcTcpTuned) {
        legend.push_str("\ngrpc-tcp-tuned: grpc-tcp with the windows and frames of --http2 tuned.");
    }
    if has(Mode::GrpcNative) {
        legend.push_str("\ngrpc-native: generated code as it is over native calls: RDMA without HTTP/2.");
    }
    if has(Mode::GrpcNativeGather) {
        legend.push_str(
            "\ngrpc-native-gather: native calls with payloads by reference at both ends, sent from registered memory.",
        );
    }
    let carries_tensors = |row: &Row| Mode::from_name(row.mode).is_some_and(Mode::carries_tensors);
    if rows.iter().any(carries_tensors) {
        legend.push_str(
            "\nrdma-cp, rdma-zerocp: no RPC. A tensor is written to the memory where the receiver expects it, from a registered copy \
             (cp) or from registered memory (zerocp); an operation ends when the receiver has checked, consumed and released it. \
             Both ends poll; in rdma-zerocp-await both wait by futures. A set is sent as a whole.",
        );
    }
    if rows.iter().any(|row| row.ops > 0 && row.p99_us.is_none()) {
        legend.push_str("\np99: only of 100 operations or more.");
    }
    if rows.iter().any(|row| row.saturated == Some(true)) {
        legend.push_str(
            "\nsaturated: the mode fell behind the offered rate, so its latencies grow with the length of the run; \
             calls that were never sent count with the time that they had waited.",
        );
    }
    for row in rows {
        if let Some(reason) = &row.skipped {
            legend.push_str(&format!("\n{} was not measured at {}: {reason}.", row.mode, row.cell.label()));
        }
    }
    legend
}

fn achieved(row: &Row) -> String {
    let note = if row.saturated == Some(true) { " saturated" } else { "" };
    format!("{}{note}", units::count(row.ops_per_s))
}

fn measured(row: &Row, text: String) -> String {
    if row.ops == 0 { dash() } else { text }
}

/// Prints facts and table.
pub(crate) fn print(facts: &Facts, rows: &[Row], json: Option<&Path>) -> Result<(), Failure> {
    print_with_facts(facts, &format!("{}\n\n{}", table(rows), legend(rows)), json)
}

/// Prints facts and `table`, which has its explanation below it. `json`: the file of `--json`.
pub(crate) fn print_with_facts(facts: &Facts, table: &str, json: Option<&Path>) -> Result<(), Failure> {
    output::print(&render(facts, table), json)
}

fn render(facts: &Facts, table: &str) -> String {
    let mut text = String::new();
    let lines = facts.lines();
    let width = lines.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    for (name, value) in lines {
        text.push_str(&format!("{name:>width$}: {value}\n"));
    }
    text.push_str(&format!("\n{table}\n"));
    text
}

fn table(rows: &[Row]) -> Table {
    let columns = columns(rows);
    let headings: Vec<&str> = columns.iter().map(|column| column.heading).collect();
    let groups = rows.chunk_by(|one, next| one.cell == next.cell);
    let text = |row| columns.iter().map(|column| (column.text)(row, rows)).collect();
    grid(&headings, groups.map(|group| group.iter().map(text).collect()))
}

#[cfg(test)]
mod tests {
    use super::super::row::sample_row;
    use super::*;
    use crate::compare::plan::cell::{Cell, Load};
    use crate::workload::{Mix, Workload};

    #[test]
    fn a_table_shows_ratios_and_dashes_for_missing_values() {
        let cell = Cell::closed(64, 1);
        let rows = [sample_row("grpc-tcp", cell, 80.0), sample_row("grpc-uds", cell, 32.0)];
        let text = table(&rows).to_string();
        let uds = text.lines().find(|line| line.contains("grpc-uds")).unwrap_or_default();
        assert!(uds.contains("32.0 µs") && uds.contains("2.50"), "{text}");
        assert!(!text.contains("offered") && !text.contains("p99.9"), "{text}");
        let alone = table(&rows[1..]).to_string();
        assert!(alone.contains('–'), "{alone}");
    }

    #[test]
    fn a_p99_of_few_operations_is_a_dash() {
        let mut row = sample_row("grpc-tcp", Cell::closed(64, 1), 80.0);
        (row.ops, row.p99_us) = (99, None);
        let text = table(&[row.clone()]).to_string();
        assert!(text.contains("80.0 µs") && text.contains('–') && !text.contains("160"), "{text}");
        assert!(legend(&[row]).contains("only of 100"));
    }

    #[test]
    fn a_skipped_row_has_dashes_and_a_reason() {
        let mut row = sample_row("grpc-tcp", Cell::closed(3 << 30, 1), 80.0);
        (row.ops, row.skipped) = (0, Some("it is too much".to_owned()));
        let rows = [row, sample_row("memcpy", Cell::closed(3 << 30, 1), 32.0)];
        assert!(legend(&rows).ends_with("grpc-tcp was not measured at 3 GiB × 1: it is too much."));
        assert!(table(&rows).to_string().contains('–') && !legend(&rows[1..]).contains("not measured"));
    }

    #[test]
    fn an_open_loop_shows_the_offered_rate_and_saturated_modes() {
        let cell = Cell { load: Load::Workload(Workload::Mix(Mix::Skew)), inflight: 1, rate: Some(20_000.0) };
        let rows = [sample_row("grpc-tcp", cell, 80.0), sample_row("grpc-rdma", cell, 10.0)];
        let text = table(&rows).to_string();
        let tcp = text.lines().find(|line| line.contains("grpc-tcp")).unwrap_or_default();
        assert!(tcp.contains("skew") && tcp.contains("20.0 k") && tcp.contains("12.5 k saturated"), "{text}");
        let rdma = text.lines().find(|line| line.contains("grpc-rdma")).unwrap_or_default();
        assert!(rdma.contains("100 k") && !rdma.contains("saturated") && rdma.contains("30.0 µs"), "{text}");
        assert!(legend(&rows).contains("fell behind") && !legend(&rows[1..]).contains("fell behind"));
    }
}
