//! The plot: latency and bus bandwidth by size, as SVG.

use std::error::Error;

use plotters::coord::Shift;
use plotters::prelude::*;
use tonic_rdma_commands::units;

use crate::choices::Named;
use crate::report::Row;

const WIDTH: u32 = 860;
const HEIGHT: u32 = 420;
/// Colours that stay distinct for readers with red-green colour blindness.
const COLOURS: [RGBColor; 8] = [
    RGBColor(0x33, 0x77, 0xbb),
    RGBColor(0xdd, 0x66, 0x22),
    RGBColor(0x22, 0x99, 0x88),
    RGBColor(0x66, 0x22, 0x88),
    RGBColor(0xee, 0xaa, 0x44),
    RGBColor(0x88, 0x88, 0x88),
    RGBColor(0x99, 0x77, 0xcc),
    RGBColor(0x22, 0x22, 0x22),
];

/// The reason why there is no plot.
#[derive(Debug, thiserror::Error)]
pub(super) enum PlotError {
    #[error("no row has a size and a time above zero")]
    Empty,
    #[error(transparent)]
    Drawing(#[from] Box<dyn Error + Send + Sync>),
}

/// One line: its name, and the points from size to value.
type Line = (String, Vec<(f64, f64)>);

/// Draws the rows.
pub(super) fn draw(rows: &[Row]) -> Result<String, PlotError> {
    let latency = lines(rows, |row| row.p50_us);
    let bandwidth = lines(rows, |row| row.bus_gbytes_per_s);
    if latency.is_empty() {
        return Err(PlotError::Empty);
    }
    let mut svg = String::new();
    draw_into(&mut svg, &latency, &bandwidth)?;
    Ok(svg)
}

fn draw_into(
    svg: &mut String,
    latency: &[Line],
    bandwidth: &[Line],
) -> Result<(), Box<dyn Error + Send + Sync>> {
    let area = SVGBackend::with_string(svg, (WIDTH, 2 * HEIGHT)).into_drawing_area();
    area.fill(&WHITE)?;
    let (above, below) = area.split_vertically(HEIGHT);
    chart(&above, "Latency of the slowest rank, median (lower is better)", "µs", latency)?;
    // A single rank moves nothing, so it has no bandwidth.
    chart(&below, "Bus bandwidth, 2(N-1)/N · size / latency (higher is better)", "GB/s", bandwidth)?;
    area.present()?;
    Ok(())
}

/// Returns a line for each combination of ranks, algorithm, type and operand. Its name has what differs among the rows.
fn lines(rows: &[Row], value: fn(&Row) -> f64) -> Vec<Line> {
    let differs = |key: fn(&Row) -> &'static str| rows.iter().any(|row| key(row) != key(&rows[0]));
    let keys: [fn(&Row) -> &'static str; 3] =
        [|row| row.algorithm.name(), |row| row.kind.name(), |row| row.operand.name()];
    let shown: Vec<_> = keys.into_iter().filter(|key| differs(*key)).collect();
    let name = |row: &Row| {
        let mut name = format!("{} ranks", row.ranks);
        shown.iter().for_each(|key| name.push_str(&format!(", {}", key(row))));
        name
    };
    let mut lines: Vec<Line> = Vec::new();
    for row in rows.iter().filter(|row| row.bytes > 0 && value(row) > 0.0) {
        let (name, point) = (name(row), (row.bytes as f64, value(row)));
        match lines.iter_mut().find(|(other, _)| *other == name) {
            Some((_, points)) => points.push(point),
            None => lines.push((name, vec![point])),
        }
    }
    for (_, points) in &mut lines {
        points.sort_by(|(one, _), (other, _)| one.total_cmp(other));
    }
    lines
}

fn chart(
    area: &DrawingArea<SVGBackend<'_>, Shift>,
    title: &str,
    unit: &str,
    lines: &[Line],
) -> Result<(), Box<dyn Error + Send + Sync>> {
    let points = || lines.iter().flat_map(|(_, points)| points.iter().copied());
    let bounds = |value: fn((f64, f64)) -> f64| {
        points()
            .map(value)
            .fold((f64::MAX, 0.0_f64), |(least, most), value| (least.min(value), most.max(value)))
    };
    let ((least_x, most_x), (least_y, most_y)) = (bounds(|point| point.0), bounds(|point| point.1));
    if most_x == 0.0 {
        return Ok(());
    }
    let mut chart = ChartBuilder::on(area)
        .caption(title, ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(48)
        .y_label_area_size(72)
        .build_cartesian_2d(
            (least_x * 0.8..most_x * 1.25).log_scale().base(2.0),
            (least_y * 0.7..most_y * 1.4).log_scale(),
        )?;
    chart
        .configure_mesh()
        .x_labels(12)
        .x_label_formatter(&|bytes| units::size(bytes.round() as u64))
        .y_label_formatter(&|value| units::digits(*value))
        .x_desc("size")
        .y_desc(unit)
        .draw()?;
    for (index, (name, points)) in lines.iter().enumerate() {
        let colour = COLOURS[index % COLOURS.len()];
        chart
            .draw_series(LineSeries::new(points.iter().copied(), colour.stroke_width(2)).point_size(3))?
            .label(name.clone())
            .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 12, y + 5)], colour.filled()));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK.mix(0.3))
        .draw()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::choices::Algorithm;
    use crate::report::sample;

    #[test]
    fn lines_are_named_by_what_differs() {
        let rows = [
            sample(2, 1 << 20, Algorithm::Ring, 100.0),
            sample(2, 8, Algorithm::Ring, 1.0),
            sample(4, 8, Algorithm::Auto, 2.0),
        ];
        let found = lines(&rows, |row| row.p50_us);
        assert_eq!(found[0], ("2 ranks, ring".to_owned(), vec![(8.0, 1.0), (1048576.0, 100.0)]));
        assert_eq!((found.len(), found[1].0.as_str()), (2, "4 ranks, auto"));
        let svg = draw(&rows).unwrap();
        for text in ["2 ranks, ring", "4 ranks, auto", "Bus bandwidth", "µs", "GB/s"] {
            assert!(svg.contains(text), "{text}");
        }
        let alone = lines(&rows[..1], |row| row.p50_us);
        assert_eq!(alone[0].0, "2 ranks");
    }

    #[test]
    fn rows_without_time_or_size_make_no_plot() {
        assert!(matches!(draw(&[]), Err(PlotError::Empty)));
        assert!(matches!(draw(&[sample(2, 0, Algorithm::Auto, 3.0)]), Err(PlotError::Empty)));
        // A single rank has a latency, and no bandwidth.
        assert!(draw(&[sample(1, 8, Algorithm::Auto, 3.0)]).unwrap().contains("1 ranks"));
    }
}
