//! The picture of README: the program with default settings, as bars on linear scales. Its colours are in a
//! style sheet, so that it suits light and dark pages; the library of the other pictures has none.

use std::fmt::Write as _;

use tonic_rdma_commands::{Failure, units};

use crate::page::{Figure, Row, of_mode};

/// The bars of a panel from top to bottom: the mode, its name, and the class of its colour.
const BARS: [(&str, &str, &str); 4] = [
    ("grpc-tcp", "TCP", "tcp"),
    ("grpc-uds", "Unix socket", "tcp"),
    ("grpc-rdma", "drop-in", "ours"),
    ("grpc-native", "native calls", "ours"),
];

/// The payloads, from left to right. One call is in flight.
const PAYLOADS: [u64; 2] = [64, 1 << 20];

/// A value in microseconds.
type Value = fn(&Row<'_>) -> Option<f64>;

/// What the panels show, from top to bottom.
const SHOWN: [(&str, Value); 2] =
    [("latency of a call (p50)", |row| row.p50()), ("CPU time per call, both processes", |row| row.cpu())];

const STYLE: &str = "\
.card{fill:#ffffff;stroke:#d1d9e0}.axis{stroke:#818b98}.tcp{fill:#afb8c1}.ours{fill:#0969da}\
text{fill:#1f2328;font:13px -apple-system,'Segoe UI','Noto Sans',Helvetica,Arial,sans-serif}.title{font-weight:600}.quiet{fill:#59636e}\
@media(prefers-color-scheme:dark){.card{fill:#0d1117;stroke:#3d444d}.axis{stroke:#656c76}.tcp{fill:#59636e}.ours{fill:#4493f8}\
text{fill:#f0f6fc}.quiet{fill:#9198a1}}";

const WIDTH: usize = 840;
const PANEL: usize = WIDTH / 2;
/// The height of a bar with the space below it.
const STEP: usize = 24;
/// The longest bar, and where bars begin.
const LONGEST: f64 = 220.0;
const BEGIN: usize = 112;

/// Draws the bars of the cells that `figure` has. Returns nothing if it has none of them.
pub(crate) fn draw(figure: &Figure) -> Result<Option<String>, Failure> {
    let cells = figure.cells()?;
    let mut panels = String::new();
    let mut bottom = 0;
    for (column, bytes) in PAYLOADS.into_iter().enumerate() {
        let Some(cell) =
            cells.iter().find(|cell| cell[0].is_of(bytes, 1) && cell[0].number("rate").is_none())
        else {
            continue;
        };
        let mut top = 34;
        for (title, value) in SHOWN {
            let bars =
                BARS.iter().filter_map(|bar| Some((bar, value(&of_mode(cell, bar.0)?)?))).collect::<Vec<_>>();
            let size = units::size(bytes);
            _ = writeln!(
                panels,
                "<text class=\"title\" x=\"{}\" y=\"{top}\">{size}: {title}</text>",
                column * PANEL + 16
            );
            panel(&mut panels, column * PANEL, top, &bars);
            top += (BARS.len() + 1) * STEP + 26;
        }
        bottom = top - 24;
    }
    let height = bottom + 26;
    let caption =
        "One call at a time, default settings, one host. Shorter is better; each panel has its own scale.";
    Ok((!panels.is_empty()).then(|| {
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" role=\"img\" \
             aria-label=\"Latency and CPU time per call: {}\">\n<style>{STYLE}</style>\n\
             <rect class=\"card\" x=\"0.5\" y=\"0.5\" width=\"{}\" height=\"{}\" rx=\"8\"/>\n{panels}\
             <text class=\"quiet\" x=\"16\" y=\"{}\">{caption}</text>\n</svg>\n",
            BARS.map(|(_, name, _)| name).join(", "),
            WIDTH - 1,
            height - 1,
            height - 16,
        )
    }))
}

/// Draws the bars of one panel below its title at `top`.
fn panel(out: &mut String, left: usize, top: usize, bars: &[(&(&str, &str, &str), f64)]) {
    let most = bars.iter().map(|(_, value)| *value).fold(f64::MIN_POSITIVE, f64::max);
    let x = left + BEGIN;
    for (index, ((_, name, class), value)) in bars.iter().enumerate() {
        let y = top + 12 + index * STEP;
        let width = (value / most * LONGEST).max(1.0);
        let end = x as f64 + width + 6.0;
        let label = units::micros(*value);
        _ = writeln!(
            out,
            "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{name}</text>\
             <rect class=\"{class}\" x=\"{x}\" y=\"{y}\" width=\"{width:.1}\" height=\"16\"/>\
             <text x=\"{end:.1}\" y=\"{}\">{label}</text>",
            x - 8,
            y + 13,
            y + 13,
        );
    }
    let (from, to) = (top + 8, top + 12 + bars.len() * STEP - 4);
    _ = writeln!(out, "<path class=\"axis\" d=\"M{x} {from}V{to}\"/>");
}
