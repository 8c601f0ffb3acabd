//! The plot: step and transfer time of each mode, as SVG.

use std::error::Error;

use plotters::coord::Shift;
use plotters::prelude::*;
use tonic_rdma_commands::units::digits;

use super::Results;

const WIDTH: u32 = 860;
const HEIGHT: u32 = 360;
/// Colours that stay distinct for readers with red-green colour blindness.
const COLOURS: [RGBColor; 5] = [
    RGBColor(0x88, 0x88, 0x88),
    RGBColor(0xee, 0xaa, 0x44),
    RGBColor(0xdd, 0x66, 0x22),
    RGBColor(0x33, 0x77, 0xbb),
    RGBColor(0x22, 0x99, 0x88),
];

type Failed = Box<dyn Error + Send + Sync>;

/// Draws the times of all modes.
pub(super) fn draw(results: &Results) -> Result<String, Failed> {
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, (WIDTH, 2 * HEIGHT)).into_drawing_area();
        area.fill(&WHITE)?;
        let (above, below) = area.split_vertically(HEIGHT);
        let bars = |value: fn(&super::ModeRow) -> f64| -> Vec<(&str, f64)> {
            results.modes.iter().map(|row| (row.mode.as_str(), value(row) / 1000.0)).collect()
        };
        let title = format!("{}, {} parts: ", results.model, results.parts);
        chart(&above, &format!("{title}time of a step (lower is better)"), &bars(|row| row.step_us))?;
        chart(
            &below,
            &format!("{title}transfer time of a step (lower is better)"),
            &bars(|row| row.transfer_us),
        )?;
        area.present()?;
    }
    Ok(svg)
}

fn chart(area: &DrawingArea<SVGBackend<'_>, Shift>, title: &str, bars: &[(&str, f64)]) -> Result<(), Failed> {
    let top = bars.iter().map(|(_, value)| *value).fold(0.0_f64, f64::max);
    if top <= 0.0 {
        return Ok(());
    }
    let mut chart = ChartBuilder::on(area)
        .caption(title, ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(32)
        .y_label_area_size(72)
        .build_cartesian_2d(0.0..bars.len() as f64, 0.0..top * 1.12)?;
    let name = |x: &f64| {
        let bar = bars.get(x.floor().max(0.0) as usize).filter(|_| (x.fract() - 0.5).abs() < 1e-6);
        bar.map(|(name, _)| (*name).to_owned()).unwrap_or_default()
    };
    chart
        .configure_mesh()
        .disable_x_mesh()
        .x_labels(bars.len() * 2 + 1)
        .x_label_formatter(&name)
        .y_label_formatter(&|value| digits(*value))
        .y_desc("ms")
        .draw()?;
    for (index, (_, value)) in bars.iter().enumerate() {
        let (left, colour) = (index as f64 + 0.2, COLOURS[index % COLOURS.len()]);
        let corners = [(left, 0.0), (left + 0.6, *value)];
        let label = Text::new(digits(*value), (left + 0.24, *value + top * 0.06), ("sans-serif", 13));
        chart.draw_series([Rectangle::new(corners, colour.filled())])?;
        chart.draw_series([label])?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    #[test]
    fn bars_have_names_and_values() {
        let mut results = super::super::sample();
        let svg = draw(&results).unwrap();
        for text in ["<svg", "grpc-tcp", "rdma-zerocp", "transfer time", "3.40", "0.10"] {
            assert!(svg.contains(text), "{text}");
        }
        results.modes.clear();
        assert!(draw(&results).unwrap().contains("<svg"));
    }
}
