//! Bar plots as SVG: groups of bars side by side. Reports have no other plots.

use std::error::Error;

use plotters::prelude::*;
use tonic_rdma_commands::units;

/// Least width of a plot, and its height, in pixels.
const WIDTH: u32 = 860;
const HEIGHT: u32 = 420;

/// Height of a line of the legend, space below it, and left edge of its lines, in pixels.
const LINE: u32 = 20;
const MARGIN: u32 = 8;
const LEFT: u32 = 84;

/// A bar plot: groups side by side, with at most one bar of each series in a group.
#[derive(Debug)]
pub(crate) struct Bars<'a> {
    pub(crate) title: &'a str,
    pub(crate) x_axis: &'a str,
    pub(crate) y_axis: &'a str,
    /// Whether the axis is logarithmic. Otherwise it begins at zero.
    pub(crate) logarithmic: bool,
    /// Names below the groups.
    pub(crate) groups: Vec<String>,
    pub(crate) series: Vec<Series>,
}

/// Bars of one colour: a value for each group that has one.
#[derive(Debug)]
pub(crate) struct Series {
    pub(crate) name: &'static str,
    pub(crate) colour: RGBColor,
    pub(crate) values: Vec<Option<f64>>,
}

/// Draws the plot. Without a value above zero the result is empty.
pub(crate) fn draw(bars: &Bars<'_>) -> Result<String, PlotError> {
    let mut svg = String::new();
    draw_into(bars, &mut svg).map_err(PlotError)?;
    Ok(svg)
}

/// The error of a plot that could not be drawn.
#[derive(Debug, thiserror::Error)]
#[error("can't draw a plot")]
pub(crate) struct PlotError(#[source] Box<dyn Error + Send + Sync>);

/// The vertical axis.
struct Axis {
    logarithmic: bool,
    foot: f64,
    top: f64,
}

impl Axis {
    /// Makes an axis with room for all values, if any value is above zero.
    fn of(bars: &Bars<'_>) -> Option<Self> {
        let values = bars.series.iter().flat_map(|series| series.values.iter().flatten().copied());
        let (least, most) = values
            .filter(|value| *value > 0.0)
            .fold((f64::MAX, 0.0_f64), |(least, most), value| (least.min(value), most.max(value)));
        let logarithmic = bars.logarithmic;
        let foot = if logarithmic { least.log10().floor() } else { 0.0 };
        let top = if logarithmic { most.log10().ceil().max(foot + 1.0) } else { most * 1.05 };
        (most > 0.0).then_some(Self { logarithmic, foot, top })
    }

    /// Returns the height of a value. A logarithmic axis is drawn as the logarithm, so that bars can stand on its foot.
    fn height(&self, value: f64) -> f64 {
        if self.logarithmic { value.log10() } else { value }
    }

    fn value(&self, height: f64) -> f64 {
        if self.logarithmic { 10_f64.powf(height) } else { height }
    }
}

/// Returns a width at which the names below the bars don't touch.
fn width(groups: &[String]) -> u32 {
    const CHARACTER: usize = 6;
    const MARGINS: usize = 96;
    let longest = groups.iter().map(|name| name.chars().count()).max().unwrap_or(0);
    let names = groups.len().saturating_mul((longest + 2) * CHARACTER) + MARGINS;
    u32::try_from(names).unwrap_or(WIDTH).max(WIDTH)
}

/// Returns the place of each series in the legend: the line, and the distance from the left.
fn legend(series: &[Series], width: u32) -> Vec<(&Series, u32, i32)> {
    const CHARACTER: usize = 8;
    const SWATCH: usize = 42;
    let (mut line, mut x, mut places) = (0, LEFT, Vec::new());
    for each in series {
        let room = (each.name.len() * CHARACTER + SWATCH) as u32;
        if x > LEFT && x + room > width {
            (line, x) = (line + 1, LEFT);
        }
        places.push((each, line, x as i32));
        x += room;
    }
    places
}

fn draw_into(bars: &Bars<'_>, svg: &mut String) -> Result<(), Box<dyn Error + Send + Sync>> {
    let Some(axis) = Axis::of(bars) else { return Ok(()) };
    let groups = &bars.groups;
    let width = width(groups);
    let legend = legend(&bars.series, width);
    let lines = legend.iter().map(|(_, line, _)| line + 1).max().unwrap_or(0);
    let area = SVGBackend::with_string(svg, (width, HEIGHT + lines * LINE + MARGIN)).into_drawing_area();
    area.fill(&WHITE)?;
    // The legend is below the plot, where no bar is.
    let (plot, names) = area.split_vertically(HEIGHT);
    let mut chart = ChartBuilder::on(&plot)
        .caption(bars.title, ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(48)
        .y_label_area_size(72)
        .build_cartesian_2d(0.0..groups.len() as f64, axis.foot..axis.top)?;
    let name = |x: &f64| {
        let group = groups.get(x.floor().max(0.0) as usize).filter(|_| (x.fract() - 0.5).abs() < 1e-6);
        group.cloned().unwrap_or_default()
    };
    chart
        .configure_mesh()
        .disable_x_mesh()
        .x_labels(groups.len() * 2 + 1)
        .x_label_formatter(&name)
        .y_label_formatter(&|y: &f64| units::digits(axis.value(*y)))
        .x_desc(bars.x_axis)
        .y_desc(bars.y_axis)
        .draw()?;
    // Bars stand side by side in the middle of their group.
    let room = 0.96 / bars.series.len().max(4) as f64;
    let margin = (1.0 - room * bars.series.len() as f64) / 2.0;
    for (index, series) in bars.series.iter().enumerate() {
        let colour = series.colour;
        let rectangles = series.values.iter().enumerate().filter_map(|(group, value)| {
            let value = value.filter(|value| *value > 0.0)?;
            let left = group as f64 + margin + room * (index as f64 + 0.04);
            let corners = [(left, axis.foot), (left + 0.92 * room, axis.height(value))];
            Some(Rectangle::new(corners, colour.filled()))
        });
        chart.draw_series(rectangles)?;
    }
    for (series, line, x) in legend {
        let y = (line * LINE) as i32;
        names.draw(&Rectangle::new([(x, y + 4), (x + 12, y + 14)], series.colour.filled()))?;
        names.draw(&Text::new(series.name, (x + 18, y + 3), ("sans-serif", 13)))?;
    }
    area.present()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    #[test]
    fn the_legend_is_below_the_plot_and_within_its_width() {
        let series: Vec<Series> =
            (0..10).map(|_| Series { name: "grpc-rdma-gather", colour: BLACK, values: Vec::new() }).collect();
        let places = legend(&series, WIDTH);
        for (index, (series, line, x)) in places.iter().enumerate() {
            let end = *x as u32 + (series.name.len() * 8 + 18) as u32;
            assert!(end <= WIDTH, "{end}");
            let clash = |(_, l, other): &(&Series, u32, i32)| l == line && (other - x).unsigned_abs() < 150;
            assert!(!places[..index].iter().any(clash));
        }
        // Bars end at the foot of the plot, above the legend.
        let one = Series { name: "one", colour: RGBColor(1, 2, 3), values: vec![Some(1000.0)] };
        let groups = vec!["largest".to_owned()];
        let bars = Bars { title: "", x_axis: "", y_axis: "", logarithmic: false, groups, series: vec![one] };
        let svg = draw(&bars).unwrap();
        let rectangles: Vec<(u32, u32)> = svg
            .split("<rect ")
            .skip(1)
            .filter(|rectangle| rectangle.contains("#010203"))
            .map(|rectangle| {
                let number = |name: &str| {
                    let text = rectangle.split(&format!(" {name}=\"")).nth(1).unwrap();
                    text.split('"').next().unwrap().parse().unwrap()
                };
                (number("y"), number("height"))
            })
            .collect();
        let (bar, swatch) = (rectangles[0], rectangles[1]);
        assert!(bar.0 + bar.1 <= HEIGHT && swatch.0 >= HEIGHT, "{rectangles:?}");
    }

    #[test]
    fn bars_have_values_and_names() {
        let series = |name, values: &[Option<f64>]| Series { name, colour: BLACK, values: values.to_vec() };
        let mut bars = Bars {
            title: "title",
            x_axis: "across",
            y_axis: "up",
            logarithmic: false,
            groups: vec!["first".to_owned(), "second".to_owned()],
            series: vec![series("one", &[Some(3.0), None]), series("two", &[Some(0.0), Some(5.0)])],
        };
        for logarithmic in [false, true] {
            bars.logarithmic = logarithmic;
            let svg = draw(&bars).unwrap();
            for text in ["title", "across", "up", "first", "second", "one", "two"] {
                assert!(svg.contains(text), "{text}");
            }
        }
        bars.series.clear();
        assert_eq!(draw(&bars).unwrap(), "");
    }
}
