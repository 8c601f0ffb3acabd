//! What a run shows: the columns of its table, and their explanation.

use tonic_rdma_commands::table::{dash, times};
use tonic_rdma_commands::{Failure, units};

use crate::compare::modes::mode::Mode;
use crate::compare::options::CompareOptions;
use crate::compare::results::facts::Facts;
use crate::compare::results::row::{Ratio, Row, check_ratios};
use crate::measure::report::{Column, Report, column};

/// Explains the columns of `--connections`.
const OF_CONNECTIONS: &str = "
busy: connections that make calls; the others are open and idle. in flight: calls at once on each busy connection.
p50 of one ×: the median as a multiple of the mode's own with one connection.
memory each: resident memory of both processes for each connection beyond the first, shared pages counted once; before the \
calls where one connection is busy, after them where all are. With one connection: everything that came with it.";

/// Explains the modes that carry tensors.
const OF_TENSORS: &str = "
rdma-cp, rdma-zerocp: no RPC. A tensor is written to the memory where the receiver expects it, from a registered copy \
(cp) or from registered memory (zerocp); an operation ends when the receiver has checked, consumed and released it. \
Both ends poll; in rdma-zerocp-await both wait by futures. A set is sent as a whole.";

const OF_SATURATION: &str = "
saturated: the mode fell behind the offered rate, so its latencies grow with the length of the run; \
calls that were never sent count with the time that they had waited.";

/// The gRPC modes that need an explanation.
const EXPLAINED: [(Mode, &str); 5] = [
    (Mode::GrpcTcpBusy, "grpc-tcp in a runtime that never sleeps, at both ends."),
    (Mode::GrpcTcpTuned, "grpc-tcp with the windows and frames of --http2 tuned."),
    (Mode::GrpcTcpShared, "grpc-tcp to the port that also offers RDMA."),
    (Mode::GrpcNative, "generated code as it is over native calls: RDMA without HTTP/2."),
    (
        Mode::GrpcNativeGather,
        "native calls with payloads by reference at both ends, sent from registered memory.",
    ),
];

/// Writes all outputs that `options` ask for. Errors in rows, and a ratio below that of `--at-least`, are failures.
pub(crate) fn show(options: &CompareOptions, facts: &Facts, rows: &[Row]) -> Result<(), Failure> {
    report(facts, facts.lines(), rows).show(options.json.as_deref())?;
    let errors: Vec<String> = rows.iter().filter(|row| row.errors > 0).map(Row::describe_errors).collect();
    match (errors.as_slice(), options.at_least) {
        ([], None) => Ok(()),
        ([], Some(least)) => check_ratios(least, rows),
        (errors, _) => Err(Failure::run(errors.join("; "))),
    }
}

fn report<'a, F>(facts: &'a F, lines: Vec<(&'static str, String)>, rows: &'a [Row]) -> Report<'a, F, Row> {
    Report { facts, lines, columns: columns(rows), rows, beside: Row::is_beside, legend: legend(rows) }
}

/// Returns the columns that `rows` need.
fn columns(rows: &[Row]) -> Vec<Column<Row>> {
    let column = column::<Row>;
    let (open_loop, of_connections) = (is_open_loop(rows), is_of_connections(rows));
    let mut columns = vec![
        column("mode", |row, _| row.mode.to_string()),
        column("size", |row, _| row.cell.load.to_string()),
    ];
    if open_loop {
        columns.extend([
            column("at most in flight", |row, _| row.inflight.to_string()),
            column("offered/s", |row, _| row.rate.map_or_else(dash, units::count)),
            column("achieved/s", |row, _| measured(row, achieved(row))),
        ]);
    } else {
        columns.push(column("in flight", |row, _| row.inflight.to_string()));
    }
    if of_connections {
        columns.extend([
            column("connections", |row, _| {
                row.connections.map_or_else(dash, |of| of.connections.to_string())
            }),
            column("busy", |row, _| row.connections.map_or_else(dash, |of| of.busy.to_string())),
        ]);
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
    if of_connections {
        columns.extend([
            column("p50 of one ×", |row, rows| times(row.times_one(rows))),
            column("memory each", |row, _| {
                row.connections.and_then(|of| of.memory_bytes_each).map_or_else(dash, units::rough_size)
            }),
        ]);
    }
    columns
}

fn is_open_loop(rows: &[Row]) -> bool {
    rows.iter().any(|row| row.rate.is_some())
}

fn is_of_connections(rows: &[Row]) -> bool {
    rows.iter().any(|row| row.connections.is_some())
}

/// Explains the columns and modes that need an explanation.
fn legend(rows: &[Row]) -> String {
    let mut legend = "latency ×, throughput ×: how many times better than grpc-tcp in the same cell \
                      (p50, ops/s). CPU/op: user + system time of both processes."
        .to_owned();
    for (mode, text) in EXPLAINED.iter().filter(|(mode, _)| rows.iter().any(|row| row.mode == *mode)) {
        legend.push_str(&format!("\n{mode}: {text}"));
    }
    let notes: [(fn(&Row) -> bool, &str); 3] = [
        (|row| row.mode.carries_tensors(), OF_TENSORS),
        (|row| row.ops > 0 && row.p99_us.is_none(), "\np99: only of 100 operations or more."),
        (|row| row.saturated == Some(true), OF_SATURATION),
    ];
    for (_, text) in notes.iter().filter(|(applies, _)| rows.iter().any(applies)) {
        legend.push_str(text);
    }
    if is_of_connections(rows) {
        legend.push_str(OF_CONNECTIONS);
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;
    use crate::compare::plan::cell::Cell;
    use crate::compare::results::row::{Connections, sample_row};
    use crate::workload::{Mix, Workload};

    fn table(rows: &[Row]) -> String {
        let report = report(&(), Vec::new(), rows);
        // Without the explanation below the table.
        Report { legend: String::new(), ..report }.text()
    }

    #[test]
    fn a_table_shows_ratios_and_dashes_for_missing_values() {
        let cell = Cell::closed(64, 1);
        let rows = [sample_row("grpc-tcp", cell, 80.0), sample_row("grpc-uds", cell, 32.0)];
        let text = table(&rows);
        let uds = text.lines().find(|line| line.contains("grpc-uds")).unwrap_or_default();
        assert!(uds.contains("32.0 µs") && uds.contains("2.50"), "{text}");
        assert!(!text.contains("offered") && !text.contains("p99.9"), "{text}");
        let alone = table(&rows[1..]);
        assert!(alone.contains('–'), "{alone}");
    }

    #[test]
    fn a_p99_of_few_operations_is_a_dash() {
        let mut row = sample_row("grpc-tcp", Cell::closed(64, 1), 80.0);
        (row.ops, row.p99_us) = (99, None);
        let text = table(&[row.clone()]);
        assert!(text.contains("80.0 µs") && text.contains('–') && !text.contains("160"), "{text}");
        assert!(legend(&[row]).contains("only of 100"));
    }

    #[test]
    fn a_skipped_row_has_dashes_and_a_reason() {
        let mut row = sample_row("grpc-tcp", Cell::closed(3 << 30, 1), 80.0);
        (row.ops, row.skipped) = (0, Some("it is too much".to_owned()));
        let rows = [row, sample_row("memcpy", Cell::closed(3 << 30, 1), 32.0)];
        assert!(legend(&rows).ends_with("grpc-tcp was not measured at 3 GiB × 1: it is too much."));
        assert!(table(&rows).contains('–') && !legend(&rows[1..]).contains("not measured"));
    }

    #[test]
    fn an_open_loop_shows_the_offered_rate_and_saturated_modes() {
        let cell = Cell { load: Workload::Mix(Mix::Skew), inflight: 1, rate: Some(20_000.0) };
        let rows = [sample_row("grpc-tcp", cell, 80.0), sample_row("grpc-rdma", cell, 10.0)];
        let text = table(&rows);
        let tcp = text.lines().find(|line| line.contains("grpc-tcp")).unwrap_or_default();
        assert!(tcp.contains("skew") && tcp.contains("20.0 k") && tcp.contains("12.5 k saturated"), "{text}");
        let rdma = text.lines().find(|line| line.contains("grpc-rdma")).unwrap_or_default();
        assert!(rdma.contains("100 k") && !rdma.contains("saturated") && rdma.contains("30.0 µs"), "{text}");
        assert!(legend(&rows).contains("fell behind") && !legend(&rows[1..]).contains("fell behind"));
    }

    fn of_connections() -> Vec<Row> {
        let row = |mode, connections, busy, p50_us| {
            let memory_bytes_each = Some(40 << 10);
            let of = Connections { connections, busy, memory_bytes_each, descriptors_each: Some(2) };
            Row { connections: Some(of), ..sample_row(mode, Cell::closed(64, 1), p50_us) }
        };
        vec![
            row("grpc-tcp", 1, 1, 80.0),
            row("grpc-native", 1, 1, 4.0),
            row("grpc-tcp", 8, 1, 88.0),
            row("grpc-native", 8, 1, 5.0),
            row("grpc-tcp", 8, 8, 640.0),
            row("grpc-native", 8, 8, 20.0),
        ]
    }

    #[test]
    fn the_table_has_ratios_and_the_memory_of_each_connection() {
        let text = table(&of_connections());
        let busy = text.lines().rfind(|line| line.contains("grpc-native")).unwrap();
        for shown in ["20.0 µs", "5.00", "32.0", "40.0 KiB"] {
            assert!(busy.contains(shown), "{shown} in {text}");
        }
        assert!(legend(&of_connections()).contains("everything that came with it"));
    }

    #[test]
    fn a_mode_that_failed_has_dashes() {
        let mut row = sample_row("grpc-native", Cell::closed(64, 1), 4.0);
        (row.ops, row.errors, row.p99_us) = (0, 1, None);
        row.connections =
            Some(Connections { connections: 8, busy: 8, memory_bytes_each: None, descriptors_each: None });
        let text = table(&[row]);
        assert!(text.lines().any(|line| line.contains("grpc-native") && line.contains('–')), "{text}");
    }
}
