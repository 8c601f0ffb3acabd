//! The rows of a run: figures of each mode in each cell.

use serde::Serialize;

use crate::compare::modes::mode::Mode;
use crate::compare::plan::cell::Cell;
use crate::compare::plan::direction::Direction;

/// The figures of one mode in one cell.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) mode: &'static str,
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
    #[serde(skip)]
    pub(crate) cell: Cell,
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
        let same_cell = |other: &&Row| other.cell == row.cell;
        let Some(base) = rows.iter().filter(same_cell).find(|other| other.mode == Mode::GrpcTcp.name())
        else {
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

/// Describes the errors of a row in one line.
pub(crate) fn describe_errors(row: &Row) -> String {
    let first = row.first_error.as_deref().unwrap_or("unknown");
    let plural = if row.errors == 1 { "error" } else { "errors" };
    format!("{} at {}: {} {plural}, the first: {first}", row.mode, row.cell.label(), row.errors)
}

#[cfg(test)]
pub(crate) fn sample_row(mode: &'static str, cell: Cell, p50_us: f64) -> Row {
    let ops_per_s = 1e6 / p50_us * cell.inflight as f64;
    Row {
        mode,
        workload: cell.load.workload(),
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
        cell,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

    use super::*;

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
