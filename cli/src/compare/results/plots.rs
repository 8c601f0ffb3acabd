//! Plots of the rows, as SVG.

use plotters::style::RGBColor;
use tonic_rdma_commands::units;

use super::row::{Ratio, Row};
use crate::compare::modes::mode::Mode;
use crate::compare::plan::cell::Cell;
use crate::measure::output::bars::{self, Bars, PlotError, Series};

/// A colour for each mode, in the order of [`Mode::ALL`]. The colours stay distinct for readers with red-green colour
/// blindness.
const COLOURS: [RGBColor; Mode::ALL.len()] = [
    RGBColor(0x88, 0x88, 0x88),
    RGBColor(0xbb, 0xbb, 0xbb),
    RGBColor(0x55, 0x66, 0x66),
    RGBColor(0x33, 0x77, 0xbb),
    RGBColor(0xdd, 0x66, 0x22),
    RGBColor(0xee, 0xaa, 0x44),
    RGBColor(0xbb, 0x22, 0x33),
    RGBColor(0xee, 0x77, 0x99),
    RGBColor(0x99, 0x77, 0xcc),
    RGBColor(0x66, 0x22, 0x88),
    RGBColor(0x22, 0x99, 0x88),
    RGBColor(0x22, 0x22, 0x22),
];

/// Returns the colour of `mode`.
pub(crate) fn colour(mode: Mode) -> RGBColor {
    let place = Mode::ALL.iter().position(|other| *other == mode);
    place.map_or(RGBColor(0, 0, 0), |place| COLOURS[place])
}

/// The quantity of a plot.
#[derive(Clone, Copy)]
pub(crate) struct Figure {
    pub(crate) title: &'static str,
    pub(crate) axis: &'static str,
    pub(crate) value: fn(&Row, &[Row]) -> Option<f64>,
    /// Whether the axis is logarithmic. Otherwise it begins at zero.
    pub(crate) logarithmic: bool,
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

/// Returns the plots of `rows`.
pub(crate) fn figures(rows: &[Row]) -> &'static [Figure] {
    if is_open_loop(rows) { &OPEN_LOOP } else { &CLOSED_LOOP }
}

fn is_open_loop(rows: &[Row]) -> bool {
    rows.iter().any(|row| row.rate.is_some())
}

/// Returns the name of a cell below its bars.
fn label(cell: &Cell) -> String {
    match (cell.rate, cell.inflight) {
        (Some(rate), _) => format!("{} at {}", cell.load.label(), units::count(rate)),
        (None, 1) => cell.load.label(),
        (None, calls) => format!("{} × {calls}", cell.load.label()),
    }
}

/// Draws a figure: a group of bars for each cell, with a bar for each mode.
pub(crate) fn draw(figure: &Figure, rows: &[Row]) -> Result<String, PlotError> {
    let cells = cells(rows);
    bars::draw(&Bars {
        title: figure.title,
        x_axis: if is_open_loop(rows) {
            "payload at operations offered each second"
        } else {
            "payload × calls in flight"
        },
        y_axis: figure.axis,
        logarithmic: figure.logarithmic,
        groups: cells.iter().map(label).collect(),
        series: series(figure, rows, &cells),
    })
}

/// Returns the cells in the order of the rows.
fn cells(rows: &[Row]) -> Vec<Cell> {
    let mut cells = Vec::new();
    for row in rows {
        if !cells.contains(&row.cell) {
            cells.push(row.cell);
        }
    }
    cells
}

/// Returns the bars of a figure: one for each mode that has rows, in each of `cells`.
fn series(figure: &Figure, rows: &[Row], cells: &[Cell]) -> Vec<Series> {
    let of = |mode: Mode| rows.iter().filter(move |row| row.mode == mode.name());
    let shown = Mode::ALL.into_iter().zip(COLOURS).filter(|(mode, _)| of(*mode).next().is_some());
    shown
        .map(|(mode, colour)| {
            let value = |cell: &Cell| (figure.value)(of(mode).find(|row| row.cell == *cell)?, rows);
            Series { name: mode.name(), colour, values: cells.iter().map(value).collect() }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::super::row::sample_row;
    use super::*;
    use crate::compare::plan::cell::Load;
    use crate::workload::{Mix, Workload};

    fn assert_shown(rows: &[Row], texts: &[&str]) {
        for figure in figures(rows) {
            let svg = draw(figure, rows).unwrap();
            for text in texts.iter().chain([&figure.axis]) {
                assert!(svg.contains(text), "{text:?} is missing in {}", figure.title);
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

    #[test]
    fn no_rows_give_an_empty_plot() {
        for figure in CLOSED_LOOP.iter().chain(&OPEN_LOOP) {
            assert_eq!(draw(figure, &[]).unwrap(), "");
        }
    }
}
