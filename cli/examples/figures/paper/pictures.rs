//! The pictures of the paper's figures, with our values.

use plotters::style::RGBColor;
use tonic_rdma_commands::units;

use super::{speed_up, time_ratio};
use crate::bars::{self, Bars, Series};
use crate::columns::Row;
use crate::error::FigureError;
use crate::page::Figure;

/// The modes, in the colours of the command's reports.
const MODES: [(&str, RGBColor); 4] = [
    ("grpc-tcp", RGBColor(0x88, 0x88, 0x88)),
    ("grpc-rdma", RGBColor(0xdd, 0x66, 0x22)),
    ("rdma-cp", RGBColor(0x33, 0x77, 0xbb)),
    ("rdma-zerocp", RGBColor(0x22, 0x22, 0x22)),
];

/// Returns the colour of a mode.
pub(super) fn colour(mode: &str) -> RGBColor {
    let found = MODES.into_iter().find(|(name, _)| *name == mode);
    found.map_or(RGBColor(0xbb, 0x22, 0x33), |(_, colour)| colour)
}

/// What a picture shows of each cell, and the name of the cell.
struct Subject {
    title: &'static str,
    x_axis: &'static str,
    y_axis: &'static str,
    logarithmic: bool,
    value: fn(&[Row<'_>], &str) -> Option<f64>,
    name: fn(&Row<'_>) -> String,
    shows: fn(&Row<'_>) -> bool,
}

/// Draws the picture of the figure called `name`, or returns `None` if this figure has no picture.
pub(crate) fn picture(name: &str, figure: &Figure) -> Result<Option<String>, FigureError> {
    let Some(subject) = subject(name) else { return Ok(None) };
    let mut cells = figure.chosen()?;
    // The picture has the first run alone, and the table has all.
    let run = cells.first().map(|cell| cell[0].run);
    cells.retain(|cell| Some(cell[0].run) == run && (subject.shows)(&cell[0]));
    let series = |(name, colour)| {
        let values: Vec<_> = cells.iter().map(|cell| (subject.value)(cell, name)).collect();
        values.iter().any(Option::is_some).then_some(Series { name, colour, values })
    };
    let bars = Bars {
        title: subject.title,
        x_axis: subject.x_axis,
        y_axis: subject.y_axis,
        logarithmic: subject.logarithmic,
        groups: cells.iter().map(|cell| (subject.name)(&cell[0])).collect(),
        series: MODES.into_iter().filter_map(series).collect(),
    };
    Ok(Some(bars::draw(&bars)?))
}

fn subject(name: &str) -> Option<Subject> {
    Some(match name {
        "paper-8" => Subject {
            title: "One tensor: speed against grpc-tcp (higher is better)",
            x_axis: "bytes of the tensor",
            y_axis: "× grpc-tcp",
            logarithmic: true,
            value: |cell, mode| time_ratio(cell, mode, "grpc-tcp"),
            name: |row| units::size(row.value["bytes"].as_u64().unwrap_or(0)),
            shows: |_| true,
        },
        "paper-9" => Subject {
            title: "Mini-batches a second against grpc-tcp, computing as a wait (higher is better)",
            x_axis: "model, batch",
            y_axis: "× grpc-tcp",
            logarithmic: false,
            value: |cell, mode| speed_up(cell, mode, "grpc-tcp"),
            name: |row| format!("{} {}", text(row, "model"), text(row, "batch")),
            // Up to 32 the computing takes the same time.
            shows: |row| row.number("batch").is_some_and(|batch| batch >= 32.0),
        },
        "paper-11" => Subject {
            title: "Mini-batches a second of all workers against one that only computes (higher is better)",
            x_axis: "model, workers",
            y_axis: "× local",
            logarithmic: false,
            value: |cell, mode| cell.iter().find(|row| row.mode() == mode)?.number("times_local"),
            name: |row| format!("{} {}", text(row, "model"), text(row, "workers")),
            shows: |_| true,
        },
        "paper-12" => Subject {
            title: "Time of a mini-batch (lower is better)",
            x_axis: "model, computing",
            y_axis: "ms",
            logarithmic: false,
            value: |cell, mode| cell.iter().find(|row| row.mode() == mode)?.number("p50_ms"),
            name: |row| format!("{} {}", text(row, "model"), text(row, "compute")),
            shows: |_| true,
        },
        _ => return None,
    })
}

/// Returns a field of a row as text.
fn text(row: &Row<'_>, name: &str) -> String {
    match &row.value[name] {
        serde_json::Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}
