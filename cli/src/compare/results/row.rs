//! The rows of a run: figures of each mode in each cell.

use serde::Serialize;
use tonic_rdma_commands::{Failure, units};

use crate::compare::modes::mode::Mode;
use crate::compare::plan::cell::{Cell, Direction};

/// The figures of one mode in one cell.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) mode: Mode,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) workload: Option<&'static str>,
    /// Payload of an operation; the average of a workload's operations.
    pub(crate) bytes: u64,
    pub(crate) inflight: usize,
    /// The direction of the payload.
    pub(crate) direction: Direction,
    /// Operations offered each second in an open loop.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) rate: Option<f64>,
    pub(crate) ops: u64,
    pub(crate) errors: u64,
    /// Operations of an open loop that were given up before they were sent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) unsent: Option<u64>,
    /// Whether the mode fell behind the rate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) saturated: Option<bool>,
    pub(crate) p50_us: f64,
    /// Absent if fewer than 100 operations were timed, because none of them is the slowest of a hundred.
    pub(crate) p99_us: Option<f64>,
    /// Absent if fewer than 1000 operations were timed.
    pub(crate) p999_us: Option<f64>,
    pub(crate) ops_per_s: f64,
    pub(crate) gbytes_per_s: f64,
    pub(crate) cpu_us_per_op: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) first_error: Option<String>,
    /// The reason why the mode was not measured in this cell.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) skipped: Option<String>,
    /// With `--connections`: those that were open, and what they occupied.
    #[serde(flatten)]
    pub(crate) connections: Option<Connections>,
    #[serde(skip)]
    pub(crate) cell: Cell,
}

/// The connections of a mode.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Connections {
    /// Open connections, and how many of them make calls: `inflight` is the number of calls in flight on each of these.
    /// The others are idle.
    pub(crate) connections: usize,
    pub(crate) busy: usize,
    /// Memory and descriptors of both processes for each connection, beyond those of the first one. With one
    /// connection: everything that came with it. Absent if it could not be measured, because the connections failed.
    pub(crate) memory_bytes_each: Option<u64>,
    pub(crate) descriptors_each: Option<u64>,
}

impl Row {
    /// Returns whether both rows are compared with each other: modes in the same cell, with as many connections.
    pub(crate) fn is_beside(&self, other: &Self) -> bool {
        let numbers = |row: &Self| row.connections.map(|of| (of.connections, of.busy));
        self.cell == other.cell && numbers(self) == numbers(other)
    }

    /// Returns the median latency as a multiple of the mode's own with one connection.
    pub(crate) fn times_one(&self, rows: &[Self]) -> Option<f64> {
        let is_one = |row: &&Self| {
            (row.mode, row.cell) == (self.mode, self.cell)
                && row.connections.is_some_and(|of| of.connections == 1)
        };
        let one = rows.iter().find(is_one)?.p50_us;
        (one > 0.0 && self.p50_us > 0.0).then(|| self.p50_us / one)
    }

    /// Describes the errors in one line.
    pub(crate) fn describe_errors(&self) -> String {
        let first = self.first_error.as_deref().unwrap_or("unknown");
        let plural = if self.errors == 1 { "error" } else { "errors" };
        let on = self.connections.map(|of| format!(" on {} of {} connections", of.busy, of.connections));
        let (on, cell) = (on.unwrap_or_default(), self.cell.label());
        format!("{} at {cell}{on}: {} {plural}, the first: {first}", self.mode, self.errors)
    }
}

/// The number of checks of content, and of wrong contents.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct Checks {
    /// Messages whose every byte was checked.
    pub(crate) every_byte: u64,
    /// Messages whose stamps at sampled offsets were checked.
    pub(crate) stamps: u64,
    /// Messages with wrong content.
    pub(crate) mismatches: u64,
}

impl Checks {
    pub(crate) fn add(&mut self, other: Self) {
        self.every_byte += other.every_byte;
        self.stamps += other.stamps;
        self.mismatches += other.mismatches;
    }

    /// Describes the result.
    pub(crate) fn summary(&self) -> String {
        let Self { every_byte, stamps, mismatches } = self;
        let verdict = match mismatches {
            0 => "all as sent".to_owned(),
            wrong => format!("{wrong} WRONG"),
        };
        format!("{verdict} (every byte of {every_byte} messages, sampled words of {stamps})")
    }
}

/// A row compared with `grpc-tcp` in the same cell: how many times better. `None` if there is nothing to compare with.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Ratio {
    /// p50 of grpc-tcp divided by p50 of this row.
    pub(crate) latency: Option<f64>,
    /// Operations per second of this row divided by those of grpc-tcp.
    pub(crate) throughput: Option<f64>,
}

impl Ratio {
    /// Compares `row` with the `grpc-tcp` row of its cell among `rows`.
    pub(crate) fn of(row: &Row, rows: &[Row]) -> Self {
        let is_base = |other: &&Row| other.mode == Mode::GrpcTcp && other.is_beside(row);
        let Some(base) = rows.iter().find(is_base) else {
            return Self::default();
        };
        let ratio = |over: f64, under: f64| (over > 0.0 && under > 0.0).then(|| over / under);
        // The latency of a saturated mode grows with the length of the run.
        let settled = [base, row].iter().all(|row| row.saturated != Some(true));
        Self {
            latency: ratio(base.p50_us, row.p50_us).filter(|_| settled),
            throughput: ratio(row.ops_per_s, base.ops_per_s),
        }
    }
}

/// Fails if a mode that uses RDMA has less than `least` times the throughput of grpc-tcp in the same cell, and names
/// each such mode. Cells that one of the two modes can't carry are not compared.
pub(crate) fn check_ratios(least: f64, rows: &[Row]) -> Result<(), Failure> {
    let short = |row: &Row| {
        let ratio = Ratio::of(row, rows).throughput.filter(|ratio| *ratio < least)?;
        Some(format!("{} at {}: {} times", row.mode, row.cell.label(), units::digits(ratio)))
    };
    let short: Vec<String> = rows.iter().filter(|row| row.mode.uses_rdma()).filter_map(short).collect();
    if short.is_empty() {
        return Ok(());
    }
    let short = short.join("; ");
    Err(Failure::run(format!("less than {least} times the throughput of grpc-tcp: {short}")))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
pub(crate) fn sample_row(mode: &'static str, cell: Cell, p50_us: f64) -> Row {
    let ops_per_s = 1e6 / p50_us * cell.inflight as f64;
    Row {
        mode: clap::ValueEnum::from_str(mode, false).unwrap(),
        workload: cell.load.name(),
        bytes: cell.load.bytes(),
        inflight: cell.inflight,
        direction: Direction::Up,
        rate: cell.rate,
        ops: 1000,
        errors: 0,
        unsent: cell.rate.map(|_| 0),
        saturated: cell.rate.map(|rate| ops_per_s < rate),
        p50_us,
        p99_us: Some(p50_us * 2.0),
        p999_us: Some(p50_us * 3.0),
        ops_per_s,
        gbytes_per_s: ops_per_s * cell.load.bytes() as f64 / 1e9,
        cpu_us_per_op: p50_us,
        first_error: None,
        skipped: None,
        connections: None,
        cell,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

    use super::*;

    fn of_connections(mode: &'static str, connections: usize, busy: usize, p50_us: f64) -> Row {
        let each = Some(4096);
        let of = Connections { connections, busy, memory_bytes_each: each, descriptors_each: Some(2) };
        Row { connections: Some(of), ..sample_row(mode, Cell::closed(64, 1), p50_us) }
    }

    #[test]
    fn rows_are_compared_with_one_connection_and_with_tcp() {
        let rows = [
            of_connections("grpc-tcp", 1, 1, 80.0),
            of_connections("grpc-native", 1, 1, 4.0),
            of_connections("grpc-tcp", 8, 8, 400.0),
            of_connections("grpc-native", 8, 8, 20.0),
            of_connections("grpc-native", 8, 1, 5.0),
        ];
        let times = |row: &Row| (row.times_one(&rows), Ratio::of(row, &rows).latency);
        assert_eq!(times(&rows[3]), (Some(5.0), Some(20.0)));
        assert_eq!(times(&rows[4]), (Some(1.25), None));
    }

    #[test]
    fn connections_are_flat_in_the_json() {
        let json = serde_json::to_value(of_connections("grpc-native", 8, 1, 5.0)).unwrap();
        assert_eq!(
            (&json["mode"], &json["connections"], &json["busy"]),
            (&"grpc-native".into(), &8.into(), &1.into())
        );
        assert_eq!((&json["memory_bytes_each"], &json["bytes"]), (&4096.into(), &64.into()));
        let json = serde_json::to_value(sample_row("grpc-tcp", Cell::closed(64, 1), 5.0)).unwrap();
        assert!(json.get("connections").is_none() && json.get("busy").is_none(), "{json}");
    }

    #[test]
    fn a_mode_below_the_ratio_is_named_with_cell_and_ratio() {
        let (small, large) = (Cell::closed(64, 1), Cell::closed(1 << 20, 8));
        let rows = [
            sample_row("grpc-tcp", small, 100.0),
            sample_row("grpc-uds", small, 1000.0),
            sample_row("grpc-rdma", small, 200.0),
            sample_row("rdma-zerocp", small, 1.0),
            sample_row("memcpy", small, 1000.0),
            sample_row("grpc-tcp", large, 100.0),
            sample_row("grpc-rdma", large, 50.0),
            sample_row("rdma-zerocp-await", large, 10_000.0),
        ];
        // A mode that is half as fast is not below one half.
        check_ratios(0.5, &rows[..5]).unwrap();
        let failure = check_ratios(0.5, &rows).unwrap_err().to_string();
        assert!(failure.ends_with("grpc-tcp: rdma-zerocp-await at 1 MiB × 8: 0.0100 times"), "{failure}");
        let failure = check_ratios(2.5, &rows).unwrap_err().to_string();
        assert!(failure.contains("grpc-rdma at 64 B × 1: 0.50 times; grpc-rdma at 1 MiB × 8: 2.00 times"));
        assert!(!failure.contains("uds") && !failure.contains("memcpy"), "{failure}");
    }

    #[test]
    fn skipped_cells_are_not_compared() {
        let cell = Cell::closed(3 << 30, 1);
        let mut tcp = sample_row("grpc-tcp", cell, 100.0);
        (tcp.ops, tcp.ops_per_s, tcp.p50_us) = (0, 0.0, 0.0);
        check_ratios(0.5, &[tcp, sample_row("rdma-zerocp", cell, 1e9)]).unwrap();
    }

    #[test]
    fn ratios_compare_rows_of_the_same_cell() {
        let rows = [
            sample_row("grpc-tcp", Cell::closed(64, 1), 80.0),
            sample_row("grpc-uds", Cell::closed(64, 1), 40.0),
            sample_row("grpc-uds", Cell::closed(64, 2), 1.0),
        ];
        assert_eq!(Ratio::of(&rows[0], &rows), Ratio { latency: Some(1.0), throughput: Some(1.0) });
        assert_eq!(Ratio::of(&rows[1], &rows), Ratio { latency: Some(2.0), throughput: Some(2.0) });
        assert_eq!(Ratio::of(&rows[2], &rows), Ratio::default());
    }

    #[test]
    fn latencies_of_a_saturated_mode_are_not_compared() {
        let cell = Cell { rate: Some(20_000.0), ..Cell::closed(64, 1) };
        let rows = [sample_row("grpc-tcp", cell, 80.0), sample_row("grpc-rdma", cell, 10.0)];
        assert_eq!(Ratio::of(&rows[1], &rows), Ratio { latency: None, throughput: Some(8.0) });
    }

    #[test]
    fn wrong_content_is_in_capital_letters() {
        let checks = Checks { every_byte: 1, stamps: 2, mismatches: 2 };
        assert!(checks.summary().contains("2 WRONG"));
    }

    #[test]
    fn rows_without_a_rate_have_no_fields_of_open_loops() {
        let json = serde_json::to_value(sample_row("grpc-tcp", Cell::closed(64, 1), 80.0)).unwrap();
        let mut names: Vec<_> = json.as_object().unwrap().keys().cloned().collect();
        names.sort();
        let before =
            ["cpu_us_per_op", "direction", "errors", "gbytes_per_s", "inflight", "mode", "ops", "ops_per_s"];
        let percentiles = ["p50_us", "p999_us", "p99_us"];
        assert_eq!(names, ["bytes"].into_iter().chain(before).chain(percentiles).collect::<Vec<_>>());
    }
}
