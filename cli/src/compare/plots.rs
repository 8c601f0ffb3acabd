//! Plots of the rows, as SVG.

use plotters::prelude::*;

use super::mode::Mode;
use super::results::{Ratio, Row};
use crate::units;

const WIDTH: u32 = 860;
const HEIGHT: u32 = 420;
/// One for each mode, in the order of [`Mode::ALL`]: told apart without telling red from green.
const COLOURS: [RGBColor; 3] =
    [RGBColor(0x88, 0x88, 0x88), RGBColor(0x33, 0x77, 0xbb), RGBColor(0xdd, 0x66, 0x22)];

/// What a plot shows of a row.
#[derive(Clone, Copy)]
pub(crate) struct Figure {
    pub(crate) title: &'static str,
    pub(crate) axis: &'static str,
    pub(crate) value: fn(&Row, &[Row]) -> Option<f64>,
    /// Logarithmic axis; otherwise from zero.
    pub(crate) logarithmic: bool,
}

/// The plots of a report.
pub(crate) const FIGURES: [Figure; 4] = [
    Figure {
        title: "Latency: median of one call (lower is better)",
        axis: "p50 in µs",
        value: |row, _| Some(row.p50_us),
        logarithmic: true,
    },
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
    Figure {
        title: "CPU time of both processes for a call (lower is better)",
        axis: "µs",
        value: |row, _| Some(row.cpu_us_per_op),
        logarithmic: true,
    },
];

/// Draws a figure: bars by cell, one for each mode.
pub(crate) fn draw(figure: &Figure, rows: &[Row]) -> Result<String, String> {
    let mut svg = String::new();
    draw_into(figure, rows, &mut svg).map_err(|error| error.to_string())?;
    Ok(svg)
}

/// Cells in the order of the rows.
fn cells(rows: &[Row]) -> Vec<(u64, usize)> {
    let mut cells = Vec::new();
    for row in rows {
        if !cells.contains(&(row.bytes, row.inflight)) {
            cells.push((row.bytes, row.inflight));
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

    let area = SVGBackend::with_string(svg, (WIDTH, HEIGHT)).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .caption(figure.title, ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(48)
        .y_label_area_size(72)
        .build_cartesian_2d(0.0..cells.len() as f64, foot..top)?;
    let label = |x: &f64| {
        let cell = cells.get(x.floor().max(0.0) as usize).filter(|_| (x.fract() - 0.5).abs() < 1e-6);
        cell.map_or(String::new(), |(bytes, inflight)| match inflight {
            1 => units::size(*bytes),
            calls => format!("{} × {calls}", units::size(*bytes)),
        })
    };
    let value = |y: &f64| units::digits(if figure.logarithmic { 10_f64.powf(*y) } else { *y });
    chart
        .configure_mesh()
        .disable_x_mesh()
        .x_labels(cells.len() * 2 + 1)
        .x_label_formatter(&label)
        .y_label_formatter(&value)
        .x_desc("payload × calls in flight")
        .y_desc(figure.axis)
        .draw()?;
    for (index, (mode, colour)) in Mode::ALL.iter().zip(COLOURS).enumerate() {
        let of_mode: Vec<&Row> = rows.iter().filter(|row| row.mode == mode.name()).collect();
        if of_mode.is_empty() {
            continue;
        }
        let bars = of_mode.iter().filter_map(|row| {
            let height = (figure.value)(row, rows).filter(|value| *value > 0.0)?;
            let cell = cells.iter().position(|cell| *cell == (row.bytes, row.inflight))? as f64;
            let left = cell + 0.14 + 0.24 * index as f64;
            Some(Rectangle::new([(left, foot), (left + 0.22, scale(height))], colour.filled()))
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

    use super::super::results::sample_row;
    use super::*;

    #[test]
    fn every_figure_names_its_axes_and_modes() {
        let rows = [
            sample_row("grpc-tcp", 64, 1, 80.0),
            sample_row("grpc-rdma", 64, 1, 12.0),
            sample_row("grpc-tcp", 1 << 20, 1, 700.0),
        ];
        for figure in &FIGURES {
            let svg = draw(figure, &rows).unwrap();
            for text in ["grpc-tcp", "grpc-rdma", "payload × calls in flight", figure.axis, "1 MiB"] {
                assert!(svg.contains(text), "{text:?} is missing in {}", figure.title);
            }
        }
    }

    #[test]
    fn nothing_to_show_is_no_error() {
        for figure in &FIGURES {
            assert_eq!(draw(figure, &[]), Ok(String::new()));
        }
    }
}
