//! The table and the page of `--connections`.

use std::path::Path;

use tonic_rdma_commands::table::{dash, grid, times};
use tonic_rdma_commands::{Failure, units};

use super::row::ConnectionRow;
use crate::compare::modes::mode::Mode;
use crate::compare::results::facts::Facts;
use crate::compare::results::plots;
use crate::measure::output::bars::{self, Bars, PlotError, Series};
use crate::measure::output::page::Page;

const HEADINGS: [&str; 13] = [
    "mode",
    "size",
    "in flight",
    "connections",
    "busy",
    "p50",
    "p99",
    "ops/s",
    "CPU/op",
    "errors",
    "p50 of one ×",
    "better than grpc-tcp ×",
    "memory each",
];

const LEGEND: &str = "\
busy: connections that make calls; the others are open and idle. in flight: calls at once on each busy connection.
p50 of one ×: the median as a multiple of the mode's own with one connection. better than grpc-tcp ×: by p50, with as many \
connections.
memory each: resident memory of both processes for each connection beyond the first, shared pages counted once; before the \
calls where one connection is busy, after them where all are. With one connection: everything that came with it.";

/// Returns the table, with the explanation of its columns.
pub(crate) fn table(rows: &[ConnectionRow]) -> String {
    format!("{}\n\n{LEGEND}", grid(&HEADINGS, groups(rows)))
}

/// Writes the page to `directory`, as index.html.
pub(crate) fn write_page(directory: &Path, facts: &Facts, rows: &[ConnectionRow]) -> Result<(), Failure> {
    let page = Page {
        title: "tonic-rdma compare --connections",
        facts: facts.lines(),
        plots: plots(rows).map_err(|error| Failure::run("can't make the report").because(error))?,
        headings: HEADINGS.to_vec(),
        groups: groups(rows),
        legend: LEGEND.to_owned(),
    };
    page.write(directory)
}

/// Returns the rows as texts, in groups to compare.
fn groups(rows: &[ConnectionRow]) -> Vec<Vec<Vec<String>>> {
    let groups = rows.chunk_by(|one, next| one.group() == next.group());
    groups.map(|group| group.iter().map(|row| fields(row, rows)).collect()).collect()
}

fn fields(row: &ConnectionRow, rows: &[ConnectionRow]) -> Vec<String> {
    let figures = &row.row;
    let measured = |text: String| if figures.ops == 0 { dash() } else { text };
    vec![
        figures.mode.to_owned(),
        figures.cell.load.label(),
        figures.inflight.to_string(),
        row.connections.to_string(),
        row.busy.to_string(),
        measured(units::micros(figures.p50_us)),
        figures.p99_us.map_or_else(dash, units::micros),
        measured(units::count(figures.ops_per_s)),
        measured(units::micros(figures.cpu_us_per_op)),
        figures.errors.to_string(),
        times(row.times_one(rows)),
        times(row.times_tcp(rows)),
        row.memory_bytes_each.map_or_else(dash, units::rough_size),
    ]
}

/// A quantity over the number of connections.
struct Curve {
    title: &'static str,
    axis: &'static str,
    /// Whether the rows are those in which all connections are busy, or those in which one of them is.
    all_busy: bool,
    value: fn(&ConnectionRow) -> Option<f64>,
}

const CURVES: [Curve; 4] = [
    Curve {
        title: "Latency: median, all connections busy (lower is better)",
        axis: "p50 in µs",
        all_busy: true,
        value: |row| Some(row.row.p50_us),
    },
    Curve {
        title: "Latency: median on one connection, the others idle (lower is better)",
        axis: "p50 in µs",
        all_busy: false,
        value: |row| Some(row.row.p50_us),
    },
    Curve {
        title: "Operations a second, all connections busy (higher is better)",
        axis: "operations a second",
        all_busy: true,
        value: |row| Some(row.row.ops_per_s),
    },
    Curve {
        title: "Memory of each connection after calls on all of them (lower is better)",
        axis: "KiB",
        all_busy: true,
        value: |row| row.memory_bytes_each.map(|bytes| bytes as f64 / 1024.0),
    },
];

/// Draws the curves of each size and number of calls in flight.
fn plots(rows: &[ConnectionRow]) -> Result<Vec<String>, PlotError> {
    let cells = rows.chunk_by(|one, next| one.row.cell == next.row.cell);
    let drawn = cells.flat_map(|cell| CURVES.iter().map(move |curve| draw(curve, cell)));
    // A plot without a value is empty.
    drawn.filter(|plot| plot.as_ref().map_or(true, |svg| !svg.is_empty())).collect()
}

fn draw(curve: &Curve, rows: &[ConnectionRow]) -> Result<String, PlotError> {
    let shown: Vec<&ConnectionRow> =
        rows.iter().filter(|row| row.busy == if curve.all_busy { row.connections } else { 1 }).collect();
    let mut counts: Vec<usize> = shown.iter().map(|row| row.connections).collect();
    counts.dedup();
    let series = |mode: Mode| {
        let of = |count: &usize| {
            let row = shown.iter().find(|row| row.row.mode == mode.name() && row.connections == *count);
            row.and_then(|row| (curve.value)(row))
        };
        let values: Vec<Option<f64>> = counts.iter().map(of).collect();
        let colour = plots::colour(mode);
        values.iter().any(Option::is_some).then_some(Series { name: mode.name(), colour, values })
    };
    let label = rows.first().map(|row| row.row.cell.label()).unwrap_or_default();
    bars::draw(&Bars {
        title: &format!("{label}: {}", curve.title),
        x_axis: "connections",
        y_axis: curve.axis,
        logarithmic: true,
        groups: counts.iter().map(usize::to_string).collect(),
        series: Mode::ALL.into_iter().filter_map(series).collect(),
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::super::footprint::Footprint;
    use super::*;
    use crate::compare::plan::cell::Cell;
    use crate::compare::results::row::sample_row;

    fn rows() -> Vec<ConnectionRow> {
        let row = |mode, connections, busy, p50_us| {
            let each = Footprint { memory: 40 << 10, descriptors: 2 };
            ConnectionRow::new(connections, busy, Some(each), sample_row(mode, Cell::closed(64, 1), p50_us))
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
        let text = table(&rows());
        let busy = text.lines().rfind(|line| line.contains("grpc-native")).unwrap();
        for shown in ["20.0 µs", "5.00", "32.0", "40.0 KiB"] {
            assert!(busy.contains(shown), "{shown} in {text}");
        }
        assert!(text.contains("everything that came with it"));
    }

    #[test]
    fn a_mode_that_failed_has_dashes() {
        let mut row = sample_row("grpc-native", Cell::closed(64, 1), 4.0);
        (row.ops, row.errors, row.p99_us) = (0, 1, None);
        let text = table(&[ConnectionRow::new(8, 8, None, row)]);
        assert!(text.lines().any(|line| line.contains("grpc-native") && line.contains('–')), "{text}");
    }

    #[test]
    fn every_curve_has_its_modes_and_counts() {
        let drawn = plots(&rows()).unwrap();
        assert_eq!(drawn.len(), CURVES.len());
        for svg in drawn {
            for text in ["64 B × 1", "connections", "grpc-native", "grpc-tcp"] {
                assert!(svg.contains(text), "{text} is missing");
            }
        }
    }
}
