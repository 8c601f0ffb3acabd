//! Plots as SVG: lines over an axis that begins at zero.

use std::error::Error;

use plotters::prelude::*;

const WIDTH: u32 = 860;
const HEIGHT: u32 = 420;

/// Colours that stay distinct for readers with red-green colour blindness.
pub(crate) const FIRST: RGBColor = RGBColor(0x33, 0x77, 0xbb);
pub(crate) const SECOND: RGBColor = RGBColor(0xdd, 0x66, 0x22);
pub(crate) const GREY: RGBColor = RGBColor(0x88, 0x88, 0x88);

pub(crate) const COLOURS: [RGBColor; 5] =
    [FIRST, SECOND, RGBColor(0x33, 0x99, 0x66), RGBColor(0xaa, 0x44, 0x99), RGBColor(0x99, 0x77, 0x11)];

/// A plot.
#[derive(Debug)]
pub(crate) struct Plot<'a> {
    pub(crate) title: &'a str,
    pub(crate) x_axis: &'a str,
    pub(crate) y_axis: &'a str,
    pub(crate) lines: Vec<Line>,
    /// Whether each point has a mark. Lines of many points have none.
    pub(crate) marks: bool,
}

/// A line.
#[derive(Debug)]
pub(crate) struct Line {
    pub(crate) name: String,
    pub(crate) colour: RGBColor,
    pub(crate) points: Vec<(f64, f64)>,
}

/// The error of a plot that could not be drawn.
#[derive(Debug, thiserror::Error)]
#[error("can't draw the plot")]
pub(crate) struct PlotError(#[source] Box<dyn Error + Send + Sync>);

/// Draws the plot. Values that are not finite are left out.
pub(crate) fn draw(plot: &Plot<'_>) -> Result<String, PlotError> {
    let mut svg = String::new();
    draw_into(plot, &mut svg).map_err(PlotError)?;
    Ok(svg)
}

fn draw_into(plot: &Plot<'_>, svg: &mut String) -> Result<(), Box<dyn Error + Send + Sync>> {
    let points =
        || plot.lines.iter().flat_map(|line| &line.points).filter(|(x, y)| x.is_finite() && y.is_finite());
    let most = points().fold((1.0_f64, f64::MIN_POSITIVE), |(x, y), point| (x.max(point.0), y.max(point.1)));
    let area = SVGBackend::with_string(svg, (WIDTH, HEIGHT)).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .caption(plot.title, ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(48)
        .y_label_area_size(72)
        .build_cartesian_2d(0.0..most.0 * 1.05, 0.0..most.1 * 1.1)?;
    let label =
        |value: &f64| if value.fract() == 0.0 { format!("{value:.0}") } else { format!("{value:.2}") };
    chart
        .configure_mesh()
        .x_labels(12)
        .x_label_formatter(&label)
        .y_label_formatter(&label)
        .x_desc(plot.x_axis)
        .y_desc(plot.y_axis)
        .draw()?;
    for line in &plot.lines {
        let colour = line.colour;
        let points = line.points.iter().copied().filter(|(x, y)| x.is_finite() && y.is_finite());
        chart
            .draw_series(LineSeries::new(points, colour.stroke_width(2)).point_size(if plot.marks {
                3
            } else {
                0
            }))?
            .label(&line.name)
            .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 12, y + 5)], colour.filled()));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::LowerRight)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK.mix(0.3))
        .draw()?;
    area.present()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plot_names_its_axes_and_lines() {
        let line = |name: &str, points: &[(f64, f64)]| Line {
            name: name.to_owned(),
            colour: FIRST,
            points: points.to_vec(),
        };
        let lines = vec![line("one", &[(1.0, 900.0), (2.0, 1700.0), (3.0, f64::NAN)]), line("empty", &[])];
        let plot = Plot { title: "title", x_axis: "across", y_axis: "up", lines, marks: true };
        let svg = draw(&plot).unwrap();
        for text in ["title", "across", "up", "one", "empty", "1000"] {
            assert!(svg.contains(text), "{text}");
        }
        assert!(!svg.contains("NaN"));
        assert!(draw(&Plot { lines: Vec::new(), ..plot }).unwrap().contains("title"));
    }
}
