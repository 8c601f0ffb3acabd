//! The pictures of README and of the paper's figures, with our values.

use tonic_rdma_commands::plot::{Axis, Content, Plot, Scale, Series, draw};
use tonic_rdma_commands::{Context as _, Failure, units};

use crate::bars;
use crate::page::{Figure, Row, SETTINGS, of_mode};
use crate::paper::{middle, received, shares, speed_ups, time_ratios};

/// The modes of pictures, and the numbers of their colours.
const MODES: [(&str, usize); 12] = [
    ("grpc-tcp", 5),
    ("grpc-tcp-tuned", 10),
    ("grpc-tcp-busy", 10),
    ("grpc-rdma", 1),
    ("grpc-rdma-tuned", 4),
    ("grpc-rdma-gather", 4),
    ("grpc-native", 8),
    ("grpc-native-gather", 9),
    ("rdma-cp", 6),
    ("rdma-zerocp", 3),
    ("rdma-dynamic", 0),
    ("rdma-named", 11),
];

const UNDRAWN: &str = "can't draw the picture";

/// Returns the number of the colour of a mode.
fn colour(mode: &str) -> usize {
    MODES.iter().find(|(name, _)| *name == mode).map_or(0, |(_, colour)| *colour)
}

/// What a picture shows of each cell, and the name of the cell.
struct Subject {
    file: &'static str,
    title: &'static str,
    x_axis: &'static str,
    y_axis: &'static str,
    logarithmic: bool,
    value: fn(&[Row<'_>], &str) -> Option<f64>,
    name: fn(&Row<'_>) -> String,
    shows: fn(&Row<'_>) -> bool,
}

/// Draws the pictures of the figure called `name`. Returns their files and contents.
pub(crate) fn pictures(name: &str, figure: &Figure) -> Result<Vec<(String, String)>, Failure> {
    match name {
        "paper-10" => return curves(name, figure),
        "defaults" => {
            return Ok(bars::draw(figure)?.map(|svg| ("defaults.svg".into(), svg)).into_iter().collect());
        }
        _ => {}
    }
    let Some(subject) = subject(name) else { return Ok(Vec::new()) };
    let mut cells = figure.chosen()?;
    // The picture has the first run alone, and the table has all.
    let run = cells.first().map(|cell| cell[0].run);
    cells.retain(|cell| Some(cell[0].run) == run && (subject.shows)(&cell[0]));
    let series = |(mode, colour): (&str, usize)| {
        let values: Vec<_> = cells.iter().map(|cell| (subject.value)(cell, mode)).collect();
        let bars = values.iter().map(|value| value.unwrap_or(0.0)).collect();
        values.iter().any(Option::is_some).then(|| Series::new(mode, colour, bars))
    };
    let is_shown = |(mode, _): &(&str, usize)| name != "headline" || *mode != "grpc-tcp-tuned";
    let bars = MODES.into_iter().filter(is_shown).filter_map(series).collect();
    let groups = cells.iter().map(|cell| (subject.name)(&cell[0])).collect();
    let scale = if subject.logarithmic { Scale::Log } else { Scale::Linear };
    let content = Content::Bars { x: subject.x_axis, groups, bars };
    let plot = Plot { title: subject.title, y: Axis { name: subject.y_axis, scale }, content };
    Ok(vec![(subject.file.to_owned(), svg(plot)?)])
}

/// Draws a plot, with other colours on dark pages.
fn svg(plot: Plot<'_>) -> Result<String, Failure> {
    const STYLE: &str = "<style>@media(prefers-color-scheme:dark){[fill='#FFFFFF']{fill:#0d1117}\
        [fill='#000000']{fill:#f0f6fc}[stroke='#000000']{stroke:#f0f6fc}\
        [fill='#662288']{fill:#b23ae0}[stroke='#662288']{stroke:#b23ae0}}</style>";
    let svg = draw(&[plot]).context(UNDRAWN)?;
    // Markdown would end a picture at an empty line.
    Ok(svg.replacen(">\n", &format!(">\n{STYLE}\n"), 1).replace("\n\n", "\n"))
}

fn size(row: &Row<'_>) -> String {
    units::size(row.value["bytes"].as_u64().unwrap_or(0))
}

fn subject(name: &str) -> Option<Subject> {
    Some(match name {
        "headline" => Subject {
            file: "latency.svg",
            title: "Latency: median of one operation (lower is better)",
            x_axis: "payload × calls in flight",
            y_axis: "p50 in µs",
            logarithmic: true,
            value: |cell, mode| of_mode(cell, mode)?.p50(),
            name: |row| match row.number("inflight") {
                Some(calls) if calls > 1.0 => format!("{} × {calls}", size(row)),
                _ => size(row),
            },
            shows: |_| true,
        },
        "paper-8" => Subject {
            file: "paper-8.svg",
            title: "One tensor: speed against grpc-tcp (higher is better)",
            x_axis: "bytes of the tensor",
            y_axis: "× grpc-tcp",
            logarithmic: true,
            value: |cell, mode| middle(&time_ratios(cell, mode, "grpc-tcp")),
            name: size,
            shows: |_| true,
        },
        "paper-9" => Subject {
            file: "paper-9.svg",
            title: "Mini-batches a second against grpc-tcp, computing as a wait (higher is better)",
            x_axis: "model, batch",
            y_axis: "× grpc-tcp",
            logarithmic: false,
            value: |cell, mode| middle(&speed_ups(cell, mode, "grpc-tcp")),
            name: |row| format!("{} {}", row.field("model"), row.field("batch")),
            // Up to 32 the computing takes the same time.
            shows: |row| row.number("batch").is_some_and(|batch| batch >= 32.0),
        },
        "paper-11" => Subject {
            file: "paper-11.svg",
            title: "Mini-batches a second of all workers against one that only computes (higher is better)",
            x_axis: "model, workers",
            y_axis: "× local",
            logarithmic: false,
            value: |cell, mode| of_mode(cell, mode)?.number("times_local"),
            name: |row| format!("{} {}", row.field("model"), row.field("workers")),
            shows: |row| row.setting() == SETTINGS[0].1,
        },
        "paper-12" => Subject {
            file: "paper-12.svg",
            title: "Time of a mini-batch (lower is better)",
            x_axis: "model, computing",
            y_axis: "ms",
            logarithmic: false,
            value: |cell, mode| of_mode(cell, mode)?.number("p50_ms"),
            name: |row| format!("{} {}", row.field("model"), row.field("compute")),
            shows: |_| true,
        },
        _ => return None,
    })
}

/// Draws the paper's figure 7.
pub(crate) fn sizes() -> Result<String, Failure> {
    let names = ["of all variables", "of their bytes"];
    let line = |(index, points): (usize, _)| Series::new(names[index], 2 * index, points);
    let x = Axis { name: "bytes", scale: Scale::Sizes };
    let lines = shares().into_iter().enumerate().map(line).collect();
    let y = Axis { name: "% in larger variables", scale: Scale::Linear };
    let title = "Variables of the six models that are larger than a size";
    svg(Plot { title, y, content: Content::Lines { x, lines, marks: false } })
}

/// Draws what the rank receives that receives most, by the number of ranks: what Baidu's text says, and what was
/// counted, if it was.
pub(crate) fn reducers(figure: Option<&Figure>) -> Result<String, Failure> {
    let cells = figure.map_or_else(|| Ok(Vec::new()), Figure::cells)?;
    let said = |name, colour, operands: fn(f64) -> f64| {
        let ranks = (1..=8).map(f64::from);
        Series::new(name, colour, ranks.map(|ranks| (ranks, operands(ranks))).collect())
    };
    let counted = |(name, colour)| Series::new(name, colour, received(&cells, name));
    let mut lines = vec![
        said("one reducer: N − 1", 4, |ranks| ranks - 1.0),
        said("ring: 2 (N − 1) / N", 0, |ranks| 2.0 * (ranks - 1.0) / ranks),
    ];
    lines.extend([("naive", 1), ("ring", 3)].map(counted).into_iter().filter(|line| !line.values.is_empty()));
    let axis = |name| Axis { name, scale: Scale::Linear };
    let title = "What the rank receives that receives most (lower is better)";
    let content = Content::Lines { x: axis("ranks"), lines, marks: true };
    svg(Plot { title, y: axis("operands"), content })
}

/// Draws for each run how good the model is, by the time of the training. Returns the names and contents of
/// the files.
fn curves(name: &str, figure: &Figure) -> Result<Vec<(String, String)>, Failure> {
    let mut drawn = Vec::new();
    for cell in figure.cells()? {
        let [first, ..] = cell.as_slice() else { continue };
        let losses = first.value["of"] == "loss";
        let line = |row: &Row<'_>| {
            Series::new(row.mode(), colour(row.mode()), points(row, if losses { 1.0 } else { 100.0 }))
        };
        let title = if losses {
            format!("{}: cross entropy of tested texts (lower is better)", first.run)
        } else {
            format!("{}: accuracy on tested pictures (higher is better)", first.run)
        };
        let axis = |name| Axis { name, scale: Scale::Linear };
        let lines = cell.iter().map(line).collect();
        let x = axis("seconds of training, without tests");
        let y = axis(if losses { "cross entropy" } else { "% right" });
        let content = Content::Lines { x, lines, marks: true };
        let svg = svg(Plot { title: &title, y, content })?;
        drawn.push((format!("{name}-{}.svg", first.run), svg));
    }
    Ok(drawn)
}

fn points(row: &Row<'_>, factor: f64) -> Vec<(f64, f64)> {
    let points = row.value["points"].as_array().into_iter().flatten();
    points.filter_map(|point| Some((point[0].as_f64()?, point[1].as_f64()? * factor))).collect()
}
