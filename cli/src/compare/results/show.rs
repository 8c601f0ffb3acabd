//! What a run shows: the columns of its table, their explanation, and the plots.

use tonic_rdma_commands::plot::Series;
use tonic_rdma_commands::table::{dash, times};
use tonic_rdma_commands::{Failure, units};

use crate::compare::modes::mode::Mode;
use crate::compare::options::CompareOptions;
use crate::compare::plan::cell::Cell;
use crate::compare::results::facts::Facts;
use crate::compare::results::row::{Connections, Ratio, Row, check_ratios};
use crate::measure::report::{Bars, Column, Report, column};

/// Explains the columns of `--connections`.
const OF_CONNECTIONS: &str = "
busy: connections that make calls; the others are open and idle. in flight: calls at once on each busy connection.
p50 of one ×: the median as a multiple of the mode's own with one connection.
memory each: resident memory of both processes for each connection beyond the first, shared pages counted once; before the \
calls where one connection is busy, after them where all are. With one connection: everything that came with it.";

/// Writes all outputs that `options` ask for. Errors in rows, and a ratio below that of `--at-least`, are failures.
pub(crate) fn show(options: &CompareOptions, facts: &Facts, rows: &[Row]) -> Result<(), Failure> {
    report(facts, rows).show(options.json.as_deref(), options.report.as_deref())?;
    let errors: Vec<String> = rows.iter().filter(|row| row.errors > 0).map(Row::describe_errors).collect();
    match (errors.as_slice(), options.at_least) {
        ([], None) => Ok(()),
        ([], Some(least)) => check_ratios(least, rows),
        (errors, _) => Err(Failure::run(errors.join("; "))),
    }
}

fn report<'a>(facts: &'a Facts, rows: &'a [Row]) -> Report<'a, Facts, Row> {
    Report {
        title: "tonic-rdma compare",
        facts,
        lines: facts.lines(),
        plots: plots(rows),
        columns: columns(rows),
        rows,
        beside: Row::is_beside,
        legend: legend(rows),
    }
}

/// Returns the columns that `rows` need.
fn columns(rows: &[Row]) -> Vec<Column<Row>> {
    let column = column::<Row>;
    let (open_loop, of_connections) = (is_open_loop(rows), is_of_connections(rows));
    let mut columns =
        vec![column("mode", |row, _| row.mode.to_string()), column("size", |row, _| row.cell.load.label())];
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
    let has = |mode: Mode| rows.iter().any(|row| row.mode == mode);
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
    if rows.iter().any(|row| row.mode.carries_tensors()) {
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

/// The number of the colour of each mode, in the order of [`Mode::all`].
const COLOURS: [usize; 12] = [5, 10, 11, 0, 1, 4, 8, 9, 6, 3, 2, 7];

/// The quantity of a plot.
#[derive(Clone, Copy)]
struct Figure {
    title: &'static str,
    axis: &'static str,
    value: fn(&Row, &[Row]) -> Option<f64>,
    /// Whether the axis is logarithmic. Otherwise it begins at zero.
    logarithmic: bool,
}

const MEDIAN: Figure = Figure {
    title: "Latency: median of one operation (lower is better)",
    axis: "p50 in µs",
    value: |row, _| Some(row.p50_us),
    logarithmic: true,
};

const CPU: Figure = Figure {
    title: "CPU time of both processes for an operation (lower is better)",
    axis: "µs",
    value: |row, _| Some(row.cpu_us_per_op),
    logarithmic: true,
};

/// The plots of a closed loop.
const CLOSED_LOOP: [Figure; 4] = [
    MEDIAN,
    Figure {
        title: "Throughput against grpc-tcp (higher is better)",
        axis: "times grpc-tcp",
        value: |row, rows| Ratio::of(row, rows).throughput,
        logarithmic: false,
    },
    Figure {
        title: "Payload carried (higher is better)",
        axis: "GB/s",
        value: |row, _| Some(row.gbytes_per_s),
        logarithmic: true,
    },
    CPU,
];

/// The plots of an open loop: latency under load, and the share of operations that were carried.
const OPEN_LOOP: [Figure; 5] = [
    MEDIAN,
    Figure {
        title: "Latency under load: 99 % of operations were faster (lower is better)",
        axis: "p99 in µs",
        value: |row, _| row.p99_us,
        logarithmic: true,
    },
    Figure {
        title: "Latency under load: 99.9 % of operations were faster (lower is better)",
        axis: "p99.9 in µs",
        value: |row, _| row.p999_us,
        logarithmic: true,
    },
    Figure {
        title: "Operations carried of those offered (higher is better)",
        axis: "%",
        value: |row, _| row.rate.map(|rate| 100.0 * row.ops_per_s / rate),
        logarithmic: false,
    },
    CPU,
];

/// The plots of `--connections`, over their number: the quantity, and whether all connections are busy or one of them.
const CONNECTIONS: [(Figure, bool); 4] = [
    (Figure { title: "Latency: median, all connections busy (lower is better)", ..MEDIAN }, true),
    (
        Figure { title: "Latency: median on one connection, the others idle (lower is better)", ..MEDIAN },
        false,
    ),
    (
        Figure {
            title: "Operations a second, all connections busy (higher is better)",
            axis: "operations a second",
            value: |row, _| Some(row.ops_per_s),
            logarithmic: true,
        },
        true,
    ),
    (
        Figure {
            title: "Memory of each connection after calls on all of them (lower is better)",
            axis: "KiB",
            value: |row, _| Some(row.connections?.memory_bytes_each? as f64 / 1024.0),
            logarithmic: true,
        },
        true,
    ),
];

/// Returns the name of a cell below its bars.
fn label(cell: &Cell) -> String {
    match (cell.rate, cell.inflight) {
        (Some(rate), _) => format!("{} at {}", cell.load.label(), units::count(rate)),
        (None, 1) => cell.load.label(),
        (None, calls) => format!("{} × {calls}", cell.load.label()),
    }
}

/// Returns the plots of `rows`.
fn plots(rows: &[Row]) -> Vec<Bars> {
    if is_of_connections(rows) {
        let cells = rows.chunk_by(|one, next| one.cell == next.cell);
        return cells
            .flat_map(|cell| CONNECTIONS.iter().map(|curve| over_connections(curve, cell)))
            .collect();
    }
    let (figures, x_axis): (&[Figure], _) = match is_open_loop(rows) {
        true => (&OPEN_LOOP, "payload at operations offered each second"),
        false => (&CLOSED_LOOP, "payload × calls in flight"),
    };
    let plot = |figure: &Figure| {
        let all: Vec<&Row> = rows.iter().collect();
        let (title, group) = (figure.title.to_owned(), |row: &Row| label(&row.cell));
        bars((title, x_axis, figure.axis), figure.logarithmic, &all, group, |row| {
            (row.mode, (figure.value)(row, rows))
        })
    };
    figures.iter().map(plot).collect()
}

/// Plots a quantity of the rows of one cell over the number of connections.
fn over_connections((figure, all_busy): &(Figure, bool), rows: &[Row]) -> Bars {
    let is_shown = |of: Connections| of.busy == if *all_busy { of.connections } else { 1 };
    let shown: Vec<&Row> = rows.iter().filter(|row| row.connections.is_some_and(is_shown)).collect();
    let cell = rows.first().map(|row| row.cell.label()).unwrap_or_default();
    let title = format!("{cell}: {}", figure.title);
    let group = |row: &Row| row.connections.map(|of| of.connections.to_string()).unwrap_or_default();
    bars((title, "connections", figure.axis), figure.logarithmic, &shown, group, |row| {
        (row.mode, (figure.value)(row, rows))
    })
}

/// Makes a plot of title and axes with a group of bars for each name that `group` gives, in the order of `rows`, and
/// with a bar for each mode.
pub(crate) fn bars<R>(
    (title, x_axis, y_axis): (String, &'static str, &'static str),
    logarithmic: bool,
    rows: &[&R],
    group: impl Fn(&R) -> String,
    value: impl Fn(&R) -> (Mode, Option<f64>),
) -> Bars {
    let mut groups: Vec<String> = Vec::new();
    for name in rows.iter().map(|row| group(row)) {
        if !groups.contains(&name) {
            groups.push(name);
        }
    }
    let series = |(mode, colour): (&Mode, usize)| {
        let find = |name: &String| {
            let of_group = rows.iter().filter(|row| group(row) == *name);
            of_group.map(|row| value(row)).find(|(of, _)| of == mode)?.1
        };
        let values: Vec<Option<f64>> = groups.iter().map(find).collect();
        let bars = values.iter().map(|value| value.unwrap_or(0.0)).collect();
        values.iter().any(Option::is_some).then(|| Series::new(mode.name(), colour, bars))
    };
    let series = Mode::all().iter().zip(COLOURS).filter_map(series).collect();
    Bars { title, x_axis, y_axis, logarithmic, groups, series }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;
    use crate::compare::plan::cell::Load;
    use crate::compare::results::row::sample_row;
    use crate::workload::{Mix, Workload};

    fn table(rows: &[Row]) -> String {
        let (columns, legend) = (columns(rows), String::new());
        let beside = Row::is_beside;
        let report = Report {
            title: "",
            facts: &(),
            lines: Vec::new(),
            plots: Vec::new(),
            columns,
            rows,
            beside,
            legend,
        };
        report.text()
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
        let cell = Cell { load: Load::Workload(Workload::Mix(Mix::Skew)), inflight: 1, rate: Some(20_000.0) };
        let rows = [sample_row("grpc-tcp", cell, 80.0), sample_row("grpc-rdma", cell, 10.0)];
        let text = table(&rows);
        let tcp = text.lines().find(|line| line.contains("grpc-tcp")).unwrap_or_default();
        assert!(tcp.contains("skew") && tcp.contains("20.0 k") && tcp.contains("12.5 k saturated"), "{text}");
        let rdma = text.lines().find(|line| line.contains("grpc-rdma")).unwrap_or_default();
        assert!(rdma.contains("100 k") && !rdma.contains("saturated") && rdma.contains("30.0 µs"), "{text}");
        assert!(legend(&rows).contains("fell behind") && !legend(&rows[1..]).contains("fell behind"));
    }

    fn assert_shown(rows: &[Row], texts: &[&str]) {
        for plot in plots(rows) {
            let svg = plot.draw().unwrap();
            for text in texts.iter().chain([&plot.y_axis]) {
                assert!(svg.contains(text), "{text:?} is missing in {}", plot.title);
            }
        }
    }

    #[test]
    fn every_figure_names_its_axes_and_modes() {
        let rows = [
            sample_row("grpc-tcp", Cell::closed(64, 1), 80.0),
            sample_row("grpc-rdma", Cell::closed(64, 1), 12.0),
            sample_row("grpc-tcp", Cell::closed(1 << 20, 1), 700.0),
        ];
        assert_shown(&rows, &["grpc-tcp", "grpc-rdma", "payload × calls in flight", "1 MiB"]);
    }

    #[test]
    fn workloads_and_rates_have_their_names_below_the_bars() {
        let skew = Load::Workload(Workload::Mix(Mix::Skew));
        let cell = |rate| Cell { load: skew, inflight: 8, rate };
        assert_shown(&[sample_row("grpc-tcp", cell(None), 80.0)], &["skew × 8"]);
        let open = [
            sample_row("grpc-tcp", cell(Some(500.0)), 80.0),
            sample_row("grpc-tcp", cell(Some(1000.0)), 90.0),
        ];
        assert_shown(&open, &["skew at 500", "skew at 1000", "operations offered each second"]);
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

    #[test]
    fn every_curve_has_its_modes_and_counts() {
        let drawn = plots(&of_connections());
        assert_eq!(drawn.len(), CONNECTIONS.len());
        for svg in drawn.iter().map(|plot| plot.draw().unwrap()) {
            for text in ["64 B × 1", "connections", "grpc-native", "grpc-tcp"] {
                assert!(svg.contains(text), "{text} is missing");
            }
        }
    }

    #[test]
    fn no_rows_give_empty_plots() {
        assert!(plots(&[]).iter().all(|plot| plot.draw().unwrap().is_empty()));
    }
}
