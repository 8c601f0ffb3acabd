//! Plots of the rows, as SVG.

use plotters::prelude::*;

use super::cell::Cell;
use super::mode::Mode;
use super::results::{Ratio, Row};
use crate::units;

/// Least width of a plot, and height, in pixels.
const WIDTH: u32 = 860;
const HEIGHT: u32 = 420;
/// One for each mode, in the order of [`Mode::ALL`]: told apart without telling red from green.
const COLOURS: [RGBColor; Mode::ALL.len()] = [
    RGBColor(0x88, 0x88, 0x88),
    RGBColor(0x33, 0x77, 0xbb),
    RGBColor(0xdd, 0x66, 0x22),
    RGBColor(0xee, 0xaa, 0x44),
    RGBColor(0x22, 0x22, 0x22),
];

/// What a plot shows of a row.
#[derive(Clone, Copy)]
pub(crate) struct Figure {
    pub(crate) title: &'static str,
    pub(crate) axis: &'static str,
    pub(crate) value: fn(&Row, &[Row]) -> Option<f64>,
    /// Logarithmic axis; otherwise from zero.
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

/// The plots of an open loop: what load does to latency, and who keeps up.
const OPEN_LOOP: [Figure; 5] = [
    MEDIAN,
    Figure {
        title: "Latency under load: 99 % of operations were faster (lower is better)",
        axis: "p99 in µs",
        value: |row, _| Some(row.p99_us),
        logarithmic: true,
    },
    Figure {
        title: "Latency under load: 99.9 % of operations were faster (lower is better)",
        axis: "p99.9 in µs",
        value: |row, _| Some(row.p999_us),
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

/// The plots that show `rows`.
pub(crate) fn figures(rows: &[Row]) -> &'static [Figure] {
    if is_open_loop(rows) { &OPEN_LOOP } else { &CLOSED_LOOP }
}

fn is_open_loop(rows: &[Row]) -> bool {
    rows.iter().any(|row| row.rate.is_some())
}

/// A width at which the names beneath the bars don't touch.
fn width(cells: &[Cell]) -> u32 {
    const CHARACTER: usize = 6;
    const MARGINS: usize = 96;
    let longest = cells.iter().map(|cell| label(cell).chars().count()).max().unwrap_or(0);
    let names = cells.len().saturating_mul((longest + 2) * CHARACTER) + MARGINS;
    u32::try_from(names).unwrap_or(WIDTH).max(WIDTH)
}

/// Name of a cell beneath its bars.
fn label(cell: &Cell) -> String {
    match (cell.rate, cell.inflight) {
        (Some(rate), _) => format!("{} at {}", cell.load.label(), units::count(rate)),
        (None, 1) => cell.load.label(),
        (None, calls) => format!("{} × {calls}", cell.load.label()),
    }
}

/// Draws a figure: bars by cell, one for each mode.
pub(crate) fn draw(figure: &Figure, rows: &[Row]) -> Result<String, String> {
    let mut svg = String::new();
    draw_into(figure, rows, &mut svg).map_err(|error| error.to_string())?;
    Ok(svg)
}

/// Cells in the order of the rows.
fn cells(rows: &[Row]) -> Vec<Cell> {
    let mut cells = Vec::new();
    for row in rows {
        if !cells.contains(&row.cell) {
            cells.push(row.cell);
        }
    }
    cells
}

fn draw_into(figure: &Figure, rows: &[Row], svg: &mut String) -> Result<(), Box<dyn std::error::Error>> {
    let cells = cells(rows);
    let values = rows.iter().filter_map(|row| (figure.value)(row, rows)).filter(|value| *value > 0.0);
    let (least, most) =
        values.fold((f64::MAX, 0.0_f64), |(least, most), value| (least.min(value), most.max(value)));
    if most <= 0.0 {
        return Ok(());
    }
    // A logarithmic axis is drawn as the logarithm, so that bars can stand on its foot.
    let scale = |value: f64| if figure.logarithmic { value.log10() } else { value };
    let foot = if figure.logarithmic { least.log10().floor() } else { 0.0 };
    let top = if figure.logarithmic { most.log10().ceil().max(foot + 1.0) } else { most * 1.15 };

    let area = SVGBackend::with_string(svg, (width(&cells), HEIGHT)).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .caption(figure.title, ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(48)
        .y_label_area_size(72)
        .build_cartesian_2d(0.0..cells.len() as f64, foot..top)?;
    let label = |x: &f64| {
        let cell = cells.get(x.floor().max(0.0) as usize).filter(|_| (x.fract() - 0.5).abs() < 1e-6);
        cell.map(label).unwrap_or_default()
    };
    let value = |y: &f64| units::digits(if figure.logarithmic { 10_f64.powf(*y) } else { *y });
    chart
        .configure_mesh()
        .disable_x_mesh()
        .x_labels(cells.len() * 2 + 1)
        .x_label_formatter(&label)
        .y_label_formatter(&value)
        .x_desc(if is_open_loop(rows) {
            "payload at operations offered each second"
        } else {
            "payload × calls in flight"
        })
        .y_desc(figure.axis)
        .draw()?;
    let of = |mode: Mode| rows.iter().filter(move |row| row.mode == mode.name());
    let shown = || Mode::ALL.into_iter().zip(COLOURS).filter(|(mode, _)| of(*mode).next().is_some());
    // Bars stand side by side in the middle of their cell.
    let room = 0.96 / shown().count().max(4) as f64;
    let margin = (1.0 - room * shown().count() as f64) / 2.0;
    for (index, (mode, colour)) in shown().enumerate() {
        let of_mode: Vec<&Row> = of(mode).collect();
        let bars = of_mode.iter().filter_map(|row| {
            let height = (figure.value)(row, rows).filter(|value| *value > 0.0)?;
            let cell = cells.iter().position(|cell| *cell == row.cell)? as f64;
            let left = cell + margin + room * (index as f64 + 0.04);
            Some(Rectangle::new([(left, foot), (left + 0.92 * room, scale(height))], colour.filled()))
        });
        chart
            .draw_series(bars)?
            .label(mode.name())
            .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 12, y + 5)], colour.filled()));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK.mix(0.3))
        .draw()?;
    area.present()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::super::cell::Load;
    use super::super::results::sample_row;
    use super::*;
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
    fn workloads_and_rates_have_their_names_beneath_the_bars() {
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
    fn nothing_to_show_is_no_error() {
        for figure in CLOSED_LOOP.iter().chain(&OPEN_LOOP) {
            assert_eq!(draw(figure, &[]), Ok(String::new()));
        }
    }
}
