//! Draws the calibration as SVG: both times by size, and the threshold.

use plotters::prelude::*;
use tonic_rdma::internal::tuner::Calibration;
use tonic_rdma_commands::units;

use super::curve;

const WIDTH: u32 = 860;
const HEIGHT: u32 = 420;
/// Colours that stay distinct for readers with red-green colour blindness.
const EAGER: RGBColor = RGBColor(0x33, 0x77, 0xbb);
const RENDEZVOUS: RGBColor = RGBColor(0xdd, 0x66, 0x22);
const THRESHOLD: RGBColor = RGBColor(0x88, 0x88, 0x88);

/// The reason why there is no plot.
#[derive(Debug, thiserror::Error)]
pub(super) enum PlotError {
    #[error("nothing was measured")]
    Empty,
    #[error(transparent)]
    Drawing(#[from] DrawingAreaErrorKind<std::io::Error>),
}

/// Draws a calibration.
pub(super) fn draw(calibration: &Calibration) -> Result<String, PlotError> {
    let mut svg = String::new();
    draw_into(calibration, &mut svg)?;
    Ok(svg)
}

fn draw_into(calibration: &Calibration, svg: &mut String) -> Result<(), PlotError> {
    let curve = curve(calibration);
    let (Some(first), Some(last)) = (curve.first(), curve.last()) else { return Err(PlotError::Empty) };
    let times = || curve.iter().flat_map(|(_, eager, rendezvous)| [*eager, *rendezvous]);
    let (least, most) = (times().fold(f64::MAX, f64::min), times().fold(0.0, f64::max));
    let device = &calibration.key().device;
    let area = SVGBackend::with_string(svg, (WIDTH, HEIGHT)).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .caption(format!("A message on {device}, both ends' work (lower is better)"), ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(48)
        .y_label_area_size(72)
        .build_cartesian_2d(
            (first.0..last.0 * 1.05).log_scale().base(2.0),
            (least * 0.7..most * 1.4).log_scale(),
        )?;
    chart
        .configure_mesh()
        .x_labels(curve.len())
        .x_label_formatter(&|bytes| units::size(*bytes as u64))
        .y_label_formatter(&|micros| units::digits(*micros))
        .x_desc("size of the message")
        .y_desc("µs")
        .draw()?;
    for (name, colour, rendezvous) in [("eager", EAGER, false), ("rendezvous", RENDEZVOUS, true)] {
        let points =
            curve.iter().map(|&(bytes, eager, other)| (bytes, if rendezvous { other } else { eager }));
        chart
            .draw_series(LineSeries::new(points, colour.stroke_width(2)).point_size(3))?
            .label(name)
            .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 12, y + 5)], colour.filled()));
    }
    if let Some(threshold) = calibration.threshold() {
        let line = [(threshold as f64, least * 0.7), (threshold as f64, most * 1.4)];
        chart
            .draw_series(LineSeries::new(line, THRESHOLD.stroke_width(1)))?
            .label(format!("threshold: {}", units::size(threshold as u64)))
            .legend(|(x, y)| Rectangle::new([(x, y - 1), (x + 12, y + 1)], THRESHOLD.filled()));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK.mix(0.3))
        .draw()?;
    area.present()?;
    Ok(())
}
