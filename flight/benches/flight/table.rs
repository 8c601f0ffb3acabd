//! The results: a table, and JSON.

use std::collections::BTreeMap;

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
            let mib_per_second = median(rounds);
            let stock = [Path::Stock, Path::StockSplit]
                .into_iter()
                .filter_map(|path| measured.get(&Cell { path, ..cell }).map(|rounds| median(rounds)))
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
    println!(
        "{:<14} {:<5} {:>10} {:<11} {:>9} {:>8} {:>10} {:>10} {:>9}",
        "runtime", "", "bytes", "path", "MiB/s", "× stock", "aligned %", "realigned", "in place"
    );
    for row in Row::all(measured) {
        let ratio = row.ratio.map_or_else(String::new, |ratio| format!("{ratio:.2}"));
        let Cell { runtime, direction, bytes, path } = row.cell;
        let in_place = format!("{}/{}", row.placement.in_place, row.placement.buffers);
        println!(
            "{runtime:<14} {:<5} {bytes:>10} {:<11} {:>9.0} {ratio:>8} {:>10.0} {:>10} {in_place:>9}",
            direction.name(),
            path.name(),
            row.mib_per_second,
            row.aligned(),
            row.copies(),
        );
    }
}

pub(crate) fn json(measured: &Rounds) -> String {
    let object = |row: &Row| {
        let Cell { runtime, direction, bytes, path } = row.cell;
        serde_json::json!({
            "runtime": runtime.name(),
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
    let rows: Vec<_> = Row::all(measured).iter().map(object).collect();
    format!("{:#}\n", serde_json::Value::from(rows))
}

fn median(rounds: &[Measured]) -> f64 {
    let mut speeds: Vec<f64> = rounds.iter().map(|once| once.mib_per_second).collect();
    speeds.sort_by(f64::total_cmp);
    speeds[speeds.len() / 2]
}
