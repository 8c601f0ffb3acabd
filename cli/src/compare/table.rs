//! The table for the terminal.

use std::io::{self, Write};

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{CellAlignment, Table};

use super::facts::Facts;
use super::results::{Ratio, Row};
use crate::failure::Failure;
use crate::units;

/// Headings of the table, here and in the report.
pub(crate) const HEADINGS: [&str; 11] = [
    "mode",
    "size",
    "in flight",
    "p50",
    "p99",
    "ops/s",
    "GB/s",
    "CPU/op",
    "errors",
    "latency ×",
    "throughput ×",
];

/// What the last two columns are.
pub(crate) const LEGEND: &str = "latency ×, throughput ×: how many times better than grpc-tcp in the same cell \
     (p50, ops/s). CPU/op: user + system time of both processes.";

/// Prints facts and table on stdout.
pub(crate) fn print(facts: &Facts, rows: &[Row]) -> Result<(), Failure> {
    let mut stdout = io::stdout().lock();
    stdout
        .write_all(render(facts, rows).as_bytes())
        .and_then(|()| stdout.flush())
        .map_err(|error| Failure::output(&error))
}

fn render(facts: &Facts, rows: &[Row]) -> String {
    let mut text = String::new();
    for (name, value) in facts.lines() {
        text.push_str(&format!("{name:>10}: {value}\n"));
    }
    text.push_str(&format!("\n{}\n\n{LEGEND}\n", table(rows)));
    text
}

fn table(rows: &[Row]) -> Table {
    let mut table = Table::new();
    table.load_preset(UTF8_FULL_CONDENSED).set_header(HEADINGS);
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    let mut cell = None;
    for row in rows {
        let this = (row.bytes, row.inflight);
        // An empty line sets the cells apart.
        if cell.replace(this).is_some_and(|before| before != this) {
            table.add_row([""; HEADINGS.len()]);
        }
        table.add_row(fields(row, rows));
    }
    table
}

/// The fields of a row as text.
pub(crate) fn fields(row: &Row, rows: &[Row]) -> [String; HEADINGS.len()] {
    let ratio = Ratio::of(row, rows);
    let times = |value: Option<f64>| value.map_or_else(|| "–".to_owned(), |value| format!("{value:.2}"));
    let measured = |text: String| if row.ops == 0 { "–".to_owned() } else { text };
    [
        row.mode.to_owned(),
        units::size(row.bytes),
        row.inflight.to_string(),
        measured(units::micros(row.p50_us)),
        measured(units::micros(row.p99_us)),
        measured(units::count(row.ops_per_s)),
        measured(units::digits(row.gbytes_per_s)),
        measured(units::micros(row.cpu_us_per_op)),
        row.errors.to_string(),
        times(ratio.latency),
        times(ratio.throughput),
    ]
}

#[cfg(test)]
mod tests {
    use super::super::results::sample_row;
    use super::*;

    #[test]
    fn a_table_shows_the_ratios_and_dashes_what_is_not_there() {
        let rows = [sample_row("grpc-tcp", 64, 1, 80.0), sample_row("grpc-uds", 64, 1, 32.0)];
        let text = table(&rows).to_string();
        let uds = text.lines().find(|line| line.contains("grpc-uds")).unwrap_or_default();
        assert!(uds.contains("32.0 µs") && uds.contains("2.50"), "{text}");
        let alone = table(&rows[1..]).to_string();
        assert!(alone.contains('–'), "{alone}");
    }
}
