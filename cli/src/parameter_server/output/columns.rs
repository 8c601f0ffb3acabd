//! The columns of the table.

use tonic_rdma_commands::table::{dash, times};
use tonic_rdma_commands::units;

use super::row::TrainingRow;
use crate::parameter_server::mode::TransferMode;

/// A column: its heading, and the text of a row.
struct Column {
    heading: &'static str,
    text: fn(&TrainingRow, &[TrainingRow]) -> String,
}

/// Returns the columns that `rows` need: those of servers and computing only if there is something to show.
fn columns(rows: &[TrainingRow]) -> Vec<Column> {
    let column = |heading, text| Column { heading, text };
    let mut columns = vec![
        column("mode", |row, _| row.mode.to_string()),
        column("model", |row, _| row.model.to_owned()),
        column("workers", |row, _| row.workers.to_string()),
    ];
    if rows.iter().any(|row| row.servers != 1) {
        columns.push(column("servers", |row, _| row.servers.to_string()));
    }
    let computes = rows.iter().any(|row| row.compute_ms.is_some());
    if computes {
        columns.push(column("batch", |row, _| row.batch.map_or_else(dash, |batch| batch.to_string())));
        columns.push(column("computing", |row, _| {
            let text = |millis: f64| format!("{} {}", row.compute.name(), units::micros(millis * 1e3));
            row.compute_ms.map_or_else(dash, text)
        }));
    }
    columns.extend([
        column("each way", |row, _| format!("{} in {}", units::rough_size(row.bytes), row.variables)),
        column("mini-batches/s", |row, _| measured(row, units::count(row.minibatches_per_s))),
        column("p50", |row, _| measured(row, units::micros(row.p50_ms * 1e3))),
        column("GB/s", |row, _| measured(row, units::digits(row.gbytes_per_s))),
        column("CPU/mini-batch", |row, _| measured(row, units::micros(row.cpu_ms_per_minibatch * 1e3))),
    ]);
    if computes {
        columns.push(column("× local", |row, _| times(row.times_local)));
    }
    columns.extend([
        column("× grpc-tcp", |row, rows| times(row.times(TransferMode::GrpcTcp, rows))),
        column("× grpc-rdma", |row, rows| times(row.times(TransferMode::GrpcRdma, rows))),
    ]);
    columns
}

/// Returns the headings of the table for `rows`.
pub(crate) fn headings(rows: &[TrainingRow]) -> Vec<&'static str> {
    columns(rows).iter().map(|column| column.heading).collect()
}

/// Returns groups of rows, one for each cell and load, as texts.
pub(crate) fn groups(rows: &[TrainingRow]) -> Vec<Vec<Vec<String>>> {
    let columns = columns(rows);
    let fields = |row: &TrainingRow| columns.iter().map(|column| (column.text)(row, rows)).collect();
    let cells = rows.chunk_by(TrainingRow::is_beside);
    cells.map(|cell| cell.iter().map(fields).collect()).collect()
}

fn measured(row: &TrainingRow, text: String) -> String {
    if row.skipped.is_none() { text } else { dash() }
}
