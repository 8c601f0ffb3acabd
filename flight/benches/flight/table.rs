//! The results: a table, and JSON.

use std::collections::BTreeMap;

use tonic_rdma_commands::Named as _;
use tonic_rdma_commands::statistics::median;
use tonic_rdma_commands::table::{columns, times};
use tonic_rdma_flight::Placement;

use super::client::Measured;
use super::options::{Cell, Path};

pub(crate) type Rounds = BTreeMap<Cell, Vec<Measured>>;

/// A row of the table.
struct Row {
    cell: Cell,
    mib_per_second: f64,
    /// The throughput of our path divided by the better one of the stock paths.
    ratio: Option<f64>,
    placement: Placement,
}

impl Row {
    fn all(measured: &Rounds) -> Vec<Self> {
        let row = |(&cell, rounds): (&Cell, &Vec<Measured>)| {
            let speed = |rounds: &Vec<Measured>| median(rounds.iter().map(|once| once.mib_per_second));
            let mib_per_second = speed(rounds);
            let stock = [Path::Stock, Path::StockSplit]
                .into_iter()
                .filter_map(|path| measured.get(&Cell { path, ..cell }).map(speed))
                .reduce(f64::max);
            let ratio = stock.filter(|_| cell.path == Path::Ours).map(|stock| mib_per_second / stock);
            Self { cell, mib_per_second, ratio, placement: rounds[rounds.len() - 1].placement }
        };
        measured.iter().map(row).collect()
    }

    /// Returns the percentage of bodies that arrived aligned.
    fn aligned(&self) -> f64 {
        100.0 * self.placement.aligned as f64 / self.placement.bodies as f64
    }

    /// Returns the number of bodies of a stream that the decoder copied.
    fn copies(&self) -> u64 {
        self.placement.bodies - self.placement.aligned
    }
}

pub(crate) fn print(measured: &Rounds) {
    let headings = ["runtime", "", "path", "bytes", "MiB/s", "× stock", "aligned %", "realigned", "in place"];
    let row = |row: Row| {
        let Cell { runtime, direction, bytes, path } = row.cell;
        vec![
            runtime.to_string(),
            direction.name().to_owned(),
            path.name().to_owned(),
            bytes.to_string(),
            format!("{:.0}", row.mib_per_second),
            row.ratio.map_or_else(String::new, |ratio| times(Some(ratio))),
            format!("{:.0}", row.aligned()),
            row.copies().to_string(),
            format!("{}/{}", row.placement.in_place, row.placement.buffers),
        ]
    };
    println!("{}", columns(&headings, 3, Row::all(measured).into_iter().map(row)));
}

pub(crate) fn json(measured: &Rounds) -> Vec<serde_json::Value> {
    let object = |row: &Row| {
        let Cell { runtime, direction, bytes, path } = row.cell;
        serde_json::json!({
            "runtime": runtime.to_string(),
            "direction": direction.name(),
            "batch_bytes": bytes,
            "path": path.name(),
            "mib_per_second": row.mib_per_second,
            "ratio_to_stock": row.ratio,
            "aligned_percent": row.aligned(),
            "copies_to_realign": row.copies(),
            "realigned_bytes": row.placement.realigned_bytes,
            "buffers": row.placement.buffers,
            "buffers_in_place": row.placement.in_place,
            "rounds": measured[&row.cell].iter().map(|once| once.mib_per_second).collect::<Vec<_>>(),
        })
    };
    Row::all(measured).iter().map(object).collect()
}
