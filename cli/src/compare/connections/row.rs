//! The rows of `--connections`.

use serde::Serialize;

use super::footprint::Footprint;
use crate::compare::modes::mode::Mode;
use crate::compare::plan::cell::Cell;
use crate::compare::results::row::Row;

/// The figures of one mode with so many connections.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct ConnectionRow {
    /// Open connections, and how many of them make calls. The others are idle.
    pub(crate) connections: usize,
    pub(crate) busy: usize,
    /// Memory and descriptors of both processes for each connection, beyond those of the first one. With one
    /// connection: everything that came with it. Absent if it could not be measured, because the connections failed.
    pub(crate) memory_bytes_each: Option<u64>,
    pub(crate) descriptors_each: Option<u64>,
    /// The calls of all busy connections. `inflight` is the number of calls in flight on each of them.
    #[serde(flatten)]
    pub(crate) row: Row,
}

impl ConnectionRow {
    /// Makes a row of `row`, measured with `busy` of `connections` connections, each of which takes `each`.
    pub(crate) fn new(connections: usize, busy: usize, each: Option<Footprint>, row: Row) -> Self {
        let memory_bytes_each = each.map(|each| each.memory);
        let descriptors_each = each.map(|each| each.descriptors);
        Self { connections, busy, memory_bytes_each, descriptors_each, row }
    }

    /// Returns the place of the row in the table: rows to compare with one another follow one another.
    pub(crate) fn group(&self) -> (Cell, usize, usize) {
        (self.row.cell, self.connections, self.busy)
    }

    /// Returns the median latency as a multiple of the mode's own with one connection.
    pub(crate) fn times_one(&self, rows: &[Self]) -> Option<f64> {
        let one = |other: &&Self| {
            other.connections == 1 && other.row.mode == self.row.mode && other.row.cell == self.row.cell
        };
        let one = rows.iter().find(one)?.row.p50_us;
        (one > 0.0 && self.row.p50_us > 0.0).then(|| self.row.p50_us / one)
    }

    /// Returns how many times better the median latency is than that of grpc-tcp with as many connections.
    pub(crate) fn times_tcp(&self, rows: &[Self]) -> Option<f64> {
        let tcp = |other: &&Self| other.row.mode == Mode::GrpcTcp.name() && other.group() == self.group();
        let tcp = rows.iter().find(tcp)?.row.p50_us;
        (tcp > 0.0 && self.row.p50_us > 0.0).then(|| tcp / self.row.p50_us)
    }

    /// Describes the errors in one line.
    pub(crate) fn describe_errors(&self) -> String {
        let first = self.row.first_error.as_deref().unwrap_or("unknown");
        let plural = if self.row.errors == 1 { "error" } else { "errors" };
        let Self { connections, busy, row, .. } = self;
        format!(
            "{} at {} on {busy} of {connections} connections: {} {plural}, the first: {first}",
            row.mode,
            row.cell.label(),
            row.errors
        )
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;
    use crate::compare::results::row::sample_row;

    fn row(mode: &'static str, connections: usize, busy: usize, p50_us: f64) -> ConnectionRow {
        let each = Footprint { memory: 4096, descriptors: 2 };
        ConnectionRow::new(connections, busy, Some(each), sample_row(mode, Cell::closed(64, 1), p50_us))
    }

    #[test]
    fn rows_are_compared_with_one_connection_and_with_tcp() {
        let rows = [
            row("grpc-tcp", 1, 1, 80.0),
            row("grpc-native", 1, 1, 4.0),
            row("grpc-tcp", 8, 8, 400.0),
            row("grpc-native", 8, 8, 20.0),
            row("grpc-native", 8, 1, 5.0),
        ];
        assert_eq!((rows[3].times_one(&rows), rows[3].times_tcp(&rows)), (Some(5.0), Some(20.0)));
        assert_eq!((rows[4].times_one(&rows), rows[4].times_tcp(&rows)), (Some(1.25), None));
    }

    #[test]
    fn a_row_is_flat_in_the_json() {
        let json = serde_json::to_value(row("grpc-native", 8, 1, 5.0)).unwrap();
        assert_eq!(
            (&json["mode"], &json["connections"], &json["busy"]),
            (&"grpc-native".into(), &8.into(), &1.into())
        );
        assert_eq!((&json["memory_bytes_each"], &json["bytes"]), (&4096.into(), &64.into()));
    }
}
