//! Plots as SVG: lines and bars, on axes with a linear or a logarithmic scale.

use std::error::Error;

use plotters::coord::Shift;
use plotters::prelude::*;

use crate::units;

pub use plotters::style::RGBColor;

/// Least width of a plot, and its height without the legend, in pixels.
const WIDTH: u32 = 860;
const HEIGHT: u32 = 420;
/// Height of a line of the legend, space below it, and left edge of its lines, in pixels.
const LINE: u32 = 20;
const MARGIN: u32 = 8;
const LEFT: u32 = 84;

/// The colours of series, which stay distinct for readers with red-green colour blindness.
pub const COLOURS: [RGBColor; 12] = [
    RGBColor(0x33, 0x77, 0xbb),
    RGBColor(0xdd, 0x66, 0x22),
    RGBColor(0x22, 0x99, 0x88),
    RGBColor(0x66, 0x22, 0x88),
    RGBColor(0xee, 0xaa, 0x44),
    RGBColor(0x88, 0x88, 0x88),
    RGBColor(0x99, 0x77, 0xcc),
    RGBColor(0x22, 0x22, 0x22),
    RGBColor(0xbb, 0x22, 0x33),
    RGBColor(0xee, 0x77, 0x99),
    RGBColor(0xbb, 0xbb, 0xbb),
    RGBColor(0x55, 0x66, 0x66),
];

/// Returns the colour of the series with this number.
pub fn colour(number: usize) -> RGBColor {
    COLOURS[number % COLOURS.len()]
}

/// The error of a plot that could not be drawn.
#[derive(Debug, thiserror::Error)]
#[error("can't draw the plot")]
pub struct PlotError(#[source] Box<dyn Error + Send + Sync>);

/// The scale of an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// From zero on.
    Linear,
    /// Powers of ten. Values that are not above zero are left out.
    Log,
    /// Powers of two, with the names of sizes in bytes. Values that are not above zero are left out.
    Sizes,
}

/// An axis: its name and its scale.
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "the text above says it")]
pub struct Axis<'a> {
    pub name: &'a str,
    pub scale: Scale,
}

/// A plot of some series, whose legend stands below it.
#[derive(Debug)]
pub struct Plot<'a> {
    /// The text above the plot.
    pub title: &'a str,
    /// The vertical axis.
    pub y: Axis<'a>,
    /// What the plot shows.
    pub content: Content<'a>,
}

/// The content of a plot.
#[derive(Debug)]
pub enum Content<'a> {
    /// Lines over a horizontal axis.
    Lines {
        /// The horizontal axis.
        x: Axis<'a>,
        /// Points from left to right.
        lines: Vec<Series<(f64, f64)>>,
        /// Whether each point has a mark. Lines of many points have none.
        marks: bool,
    },
    /// Groups of bars side by side, with at most one bar of each series in a group.
    Bars {
        /// The name of the groups' row.
        x: &'a str,
        /// Names below the groups.
        groups: Vec<String>,
        /// A value for each group, in which 0 is no bar.
        bars: Vec<Series<f64>>,
    },
}

/// A series of one colour.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "the names say it")]
pub struct Series<T> {
    pub name: String,
    pub colour: RGBColor,
    pub values: Vec<T>,
}

impl<T> Series<T> {
    /// Makes a series with the colour of this number.
    pub fn new(name: impl Into<String>, number: usize, values: Vec<T>) -> Self {
        Self { name: name.into(), colour: colour(number), values }
    }
}

impl Scale {
    /// Returns where a value is drawn. Logarithmic axes are linear axes of the logarithm, so that bars can
    /// stand on them.
    fn position(self, value: f64) -> Option<f64> {
        let position = match self {
            Self::Linear => value,
            Self::Log => value.log10(),
            Self::Sizes => value.log2(),
        };
        position.is_finite().then_some(position)
    }

    fn label(self, position: f64) -> String {
        match self {
            Self::Linear => units::digits(position),
            Self::Log => units::digits(10_f64.powf(position)),
            // Other positions have no size that people name.
            Self::Sizes if position.fract() != 0.0 => String::new(),
            Self::Sizes => units::size(position.exp2().round() as u64),
        }
    }

    /// Returns the ends of an axis that has room for all values, if there is any.
    fn ends(self, values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
        let positions = values.filter_map(|value| self.position(value));
        let ends = positions
            .fold((f64::MAX, f64::MIN), |(least, most), position| (least.min(position), most.max(position)));
        let (least, most) = if ends.0 > ends.1 { return None } else { ends };
        match self {
            Self::Linear => (most > 0.0).then_some((0.0, most * 1.08)),
            Self::Log => Some((least.floor(), most.ceil().max(least.floor() + 1.0))),
            Self::Sizes => Some((least - 0.3, most + 0.3)),
        }
    }
}

type Drawn = Result<(), Box<dyn Error + Send + Sync>>;

/// Draws plots, one below the other. A plot without any value that its axes can show is left out; the result
/// is empty if all are.
///
/// # Errors
///
/// Fails if plotters can't draw.
pub fn draw(plots: &[Plot<'_>]) -> Result<String, PlotError> {
    let mut svg = String::new();
    let shown: Vec<_> = plots.iter().filter_map(|plot| Some((plot, Frame::of(plot)?))).collect();
    if !shown.is_empty() {
        draw_all(&shown, &mut svg).map_err(PlotError)?;
    }
    Ok(svg)
}

/// The ends of the axes, and the legend.
struct Frame<'a> {
    x: (f64, f64),
    y: (f64, f64),
    legend: Vec<Entry<'a>>,
    width: u32,
    height: u32,
}

/// An entry of the legend: the name, the colour, the line, and the distance from the left.
type Entry<'a> = (&'a str, RGBColor, u32, u32);

impl<'a> Frame<'a> {
    fn of(plot: &'a Plot<'_>) -> Option<Self> {
        let scale = plot.y.scale;
        let (x, y, width, names): (_, _, _, Vec<_>) = match &plot.content {
            Content::Lines { x, lines, .. } => {
                let points = || lines.iter().flat_map(|line| line.values.iter().copied());
                let y = scale.ends(points().map(|(_, y)| y))?;
                (x.scale.ends(points().map(|(x, _)| x))?, y, WIDTH, names(lines))
            }
            Content::Bars { groups, bars, .. } => {
                let values = bars.iter().flat_map(|bar| bar.values.iter().copied());
                let y = scale.ends(values.filter(|value| *value > 0.0))?;
                ((0.0, groups.len() as f64), y, width(groups), names(bars))
            }
        };
        let legend = legend(names, width);
        let lines = legend.iter().map(|(_, _, line, _)| line + 1).max().unwrap_or(0);
        Some(Self { x, y, legend, width, height: HEIGHT + lines * LINE + MARGIN })
    }
}

fn names<T>(series: &[Series<T>]) -> Vec<(&str, RGBColor)> {
    series.iter().map(|series| (series.name.as_str(), series.colour)).collect()
}

/// Returns a width at which the names below the bars don't touch.
fn width(groups: &[String]) -> u32 {
    const CHARACTER: usize = 6;
    const MARGINS: usize = 96;
    let longest = groups.iter().map(|name| name.chars().count()).max().unwrap_or(0);
    let names = groups.len().saturating_mul((longest + 2) * CHARACTER) + MARGINS;
    u32::try_from(names).unwrap_or(WIDTH).max(WIDTH)
}

fn legend(names: Vec<(&str, RGBColor)>, width: u32) -> Vec<Entry<'_>> {
    const CHARACTER: usize = 8;
    const SWATCH: usize = 42;
    let (mut line, mut x, mut entries) = (0, LEFT, Vec::new());
    for (name, colour) in names {
        let room = (name.chars().count() * CHARACTER + SWATCH) as u32;
        if x > LEFT && x + room > width {
            (line, x) = (line + 1, LEFT);
        }
        entries.push((name, colour, line, x));
        x += room;
    }
    entries
}

fn draw_all(plots: &[(&Plot<'_>, Frame<'_>)], svg: &mut String) -> Drawn {
    let width = plots.iter().map(|(_, frame)| frame.width).max().unwrap_or(WIDTH);
    let height = plots.iter().map(|(_, frame)| frame.height).sum();
    let mut rest = SVGBackend::with_string(svg, (width, height)).into_drawing_area();
    rest.fill(&WHITE)?;
    for (plot, frame) in plots {
        let (area, below) = rest.split_vertically(frame.height);
        draw_one(plot, frame, &area)?;
        rest = below;
    }
    rest.present()?;
    Ok(())
}

fn draw_one(plot: &Plot<'_>, frame: &Frame<'_>, area: &DrawingArea<SVGBackend<'_>, Shift>) -> Drawn {
    let scale = plot.y.scale;
    // The legend is below the plot, where nothing is drawn.
    let (above, below) = area.split_vertically(HEIGHT);
    let mut chart = ChartBuilder::on(&above)
        .caption(plot.title, ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(48)
        .y_label_area_size(72)
        .build_cartesian_2d(frame.x.0..frame.x.1, frame.y.0..frame.y.1)?;
    let y_label = |position: &f64| scale.label(*position);
    match &plot.content {
        Content::Lines { x, lines, marks } => {
            let x_label = |position: &f64| x.scale.label(*position);
            let mut mesh = chart.configure_mesh();
            mesh.x_labels(12).x_label_formatter(&x_label).y_label_formatter(&y_label);
            mesh.x_desc(x.name).y_desc(plot.y.name).draw()?;
            for line in lines {
                let point =
                    |(at, value): &(f64, f64)| Some((x.scale.position(*at)?, scale.position(*value)?));
                let style = line.colour.stroke_width(2);
                let points = LineSeries::new(line.values.iter().filter_map(point), style);
                chart.draw_series(points.point_size(if *marks { 3 } else { 0 }))?;
            }
        }
        Content::Bars { x, groups, bars } => {
            let x_label = |position: &f64| {
                let group = groups.get(position.floor().max(0.0) as usize);
                group.filter(|_| (position.fract() - 0.5).abs() < 1e-6).cloned().unwrap_or_default()
            };
            let mut mesh = chart.configure_mesh();
            mesh.disable_x_mesh().x_labels(groups.len() * 2 + 1).x_label_formatter(&x_label);
            mesh.y_label_formatter(&y_label).x_desc(*x).y_desc(plot.y.name).draw()?;
            // Bars stand side by side in the middle of their group.
            let room = 0.96 / bars.len().max(4) as f64;
            let margin = (1.0 - room * bars.len() as f64) / 2.0;
            for (index, series) in bars.iter().enumerate() {
                let rectangles = series.values.iter().enumerate().filter_map(|(group, value)| {
                    let top = scale.position(*value).filter(|_| *value > 0.0)?;
                    let left = group as f64 + margin + room * (index as f64 + 0.04);
                    let corners = [(left, frame.y.0), (left + 0.92 * room, top)];
                    Some(Rectangle::new(corners, series.colour.filled()))
                });
                chart.draw_series(rectangles)?;
            }
        }
    }
    for (name, colour, line, x) in &frame.legend {
        let (x, y) = (*x as i32, (line * LINE) as i32);
        below.draw(&Rectangle::new([(x, y + 4), (x + 12, y + 14)], colour.filled()))?;
        below.draw(&Text::new(*name, (x + 18, y + 3), ("sans-serif", 13)))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    fn bars(scale: Scale, bars: Vec<Series<f64>>) -> Plot<'static> {
        let groups = vec!["first".to_owned(), "second".to_owned()];
        let content = Content::Bars { x: "across", groups, bars };
        Plot { title: "title", y: Axis { name: "up", scale }, content }
    }

    fn lines(scale: Scale, lines: Vec<Series<(f64, f64)>>) -> Plot<'static> {
        let x = Axis { name: "across", scale: Scale::Sizes };
        Plot {
            title: "title",
            y: Axis { name: "up", scale },
            content: Content::Lines { x, lines, marks: true },
        }
    }

    #[test]
    fn the_legend_is_below_the_plot_and_within_its_width() {
        let entries = legend(vec![("grpc-rdma-gather", BLACK); 10], WIDTH);
        for (index, (name, _, line, x)) in entries.iter().enumerate() {
            assert!(x + (name.len() * 8 + 18) as u32 <= WIDTH, "{x}");
            let clash = |(_, _, l, other): &Entry<'_>| l == line && other.abs_diff(*x) < 150;
            assert!(!entries[..index].iter().any(clash));
        }
        // Bars end at the foot of the plot, above the legend.
        let one = Series { name: "one".to_owned(), colour: RGBColor(1, 2, 3), values: vec![1000.0] };
        let svg = draw(&[bars(Scale::Linear, vec![one])]).unwrap();
        let number = |rectangle: &str, name: &str| -> u32 {
            let text = rectangle.split(&format!(" {name}=\"")).nth(1).unwrap();
            text.split('"').next().unwrap().parse().unwrap()
        };
        let rectangles: Vec<(u32, u32)> = svg
            .split("<rect ")
            .skip(1)
            .filter(|rectangle| rectangle.contains("#010203"))
            .map(|rectangle| (number(rectangle, "y"), number(rectangle, "height")))
            .collect();
        let (bar, swatch) = (rectangles[0], rectangles[1]);
        assert!(bar.0 + bar.1 <= HEIGHT && swatch.0 >= HEIGHT, "{rectangles:?}");
    }

    #[test]
    fn plots_name_their_axes_series_and_groups() {
        for scale in [Scale::Linear, Scale::Log] {
            let two = vec![Series::new("one", 0, vec![3.0, 0.0]), Series::new("two", 1, vec![0.0, 5.0])];
            let svg = draw(&[bars(scale, two)]).unwrap();
            for text in ["title", "across", "up", "first", "second", "one", "two", "#3377BB", "#DD6622"] {
                assert!(svg.contains(text), "{text}");
            }
            let points = vec![(64.0, 3.0), (4096.0, 1700.0), (8192.0, f64::NAN)];
            let two = vec![Series::new("some", 0, points), Series::new("none", 1, Vec::new())];
            let svg = draw(&[lines(scale, two)]).unwrap();
            for text in ["title", "across", "up", "some", "none", "64 B", "1 KiB", "1000"] {
                assert!(svg.contains(text), "{text}");
            }
            assert!(!svg.contains("NaN"));
        }
    }

    #[test]
    fn plots_stand_one_below_the_other_and_empty_ones_are_left_out() {
        let one = || Series::new("one", 0, vec![3.0, 4.0]);
        let height =
            |svg: &str| svg.split(" height=\"").nth(1).unwrap().split('"').next().unwrap().parse::<u32>();
        let single = draw(&[bars(Scale::Log, vec![one()])]).unwrap();
        let both = draw(&[bars(Scale::Log, vec![one()]), bars(Scale::Linear, vec![one()])]).unwrap();
        assert_eq!(height(&both).unwrap(), 2 * height(&single).unwrap());
        let nothing =
            [bars(Scale::Linear, vec![Series::new("one", 0, vec![0.0])]), lines(Scale::Log, Vec::new())];
        assert_eq!(draw(&nothing).unwrap(), "");
    }
}
