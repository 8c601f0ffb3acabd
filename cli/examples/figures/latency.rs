//! Latency as bars, for README.

use plotters::style::RGBColor;
use tonic_rdma_commands::units;

use crate::bars::{self, Bars, Series};
use crate::error::FigureError;
use crate::page::Figure;

/// The modes in the drawing. The colours stay distinct for readers with red-green colour blindness.
const MODES: [(&str, RGBColor); 7] = [
    ("grpc-tcp", RGBColor(0x88, 0x88, 0x88)),
    ("grpc-tcp-busy", RGBColor(0xbb, 0xbb, 0xbb)),
    ("grpc-rdma", RGBColor(0xdd, 0x66, 0x22)),
    ("grpc-rdma-gather", RGBColor(0xee, 0xaa, 0x44)),
    ("grpc-native", RGBColor(0xbb, 0x22, 0x33)),
    ("grpc-native-gather", RGBColor(0xee, 0x77, 0x99)),
    ("rdma-zerocp", RGBColor(0x66, 0x22, 0x88)),
];

/// Draws the medians of the cells in `figure`.
pub(crate) fn draw(figure: &Figure) -> Result<String, FigureError> {
    let cells = figure.chosen()?;
    let group = |cell: &Vec<crate::columns::Row<'_>>| {
        let row = cell[0].value;
        let payload = units::size(row["bytes"].as_u64().unwrap_or(0));
        match row["inflight"].as_u64() {
            Some(1) | None => payload,
            Some(calls) => format!("{payload} × {calls}"),
        }
    };
    let series = |(name, colour)| {
        let value = |cell: &Vec<crate::columns::Row<'_>>| {
            cell.iter().find(|row| row.value["mode"] == name)?.value["p50_us"].as_f64()
        };
        let values: Vec<_> = cells.iter().map(value).collect();
        values.iter().any(Option::is_some).then_some(Series { name, colour, values })
    };
    let bars = Bars {
        title: "Latency: median of one operation (lower is better)",
        x_axis: "payload × calls in flight",
        y_axis: "p50 in µs",
        logarithmic: true,
        groups: cells.iter().map(group).collect(),
        series: MODES.into_iter().filter_map(series).collect(),
    };
    Ok(bars::draw(&bars)?)
}
