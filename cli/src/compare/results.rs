//! What a run found, in figures.

use serde::Serialize;

use super::client::CallError;
use super::mode::Mode;

/// One mode in one cell.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) mode: &'static str,
    pub(crate) bytes: u64,
    pub(crate) inflight: usize,
    pub(crate) ops: u64,
    pub(crate) errors: u64,
    pub(crate) p50_us: f64,
    pub(crate) p99_us: f64,
    pub(crate) ops_per_s: f64,
    pub(crate) gbytes_per_s: f64,
    pub(crate) cpu_us_per_op: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) first_error: Option<String>,
}

/// How often content was looked at, and how often it was wrong.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct Checks {
    /// Messages of which every byte was looked at.
    pub(crate) every_byte: u64,
    /// Messages of which stamps at sampled offsets were looked at.
    pub(crate) stamps: u64,
    /// Messages that were not what was sent.
    pub(crate) mismatches: u64,
}

impl Checks {
    /// Counts `error` if it is about content.
    pub(crate) fn count(&mut self, error: &CallError) {
        if matches!(error, CallError::Content { .. } | CallError::Length { .. }) {
            self.mismatches += 1;
        }
    }

    /// The result in words.
    pub(crate) fn summary(&self) -> String {
        let Self { every_byte, stamps, mismatches } = self;
        let verdict = match mismatches {
            0 => "all as sent".to_owned(),
            wrong => format!("{wrong} WRONG"),
        };
        format!("{verdict} (every byte of {every_byte} messages, sampled words of {stamps})")
    }
}

/// A row against `grpc-tcp` in the same cell: how many times better. `None` where there is nothing to compare with.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Ratio {
    /// p50 of grpc-tcp over p50 of this row.
    pub(crate) latency: Option<f64>,
    /// Operations per second of this row over those of grpc-tcp.
    pub(crate) throughput: Option<f64>,
}

impl Ratio {
    /// Compares `row` with its cell's `grpc-tcp` among `rows`.
    pub(crate) fn of(row: &Row, rows: &[Row]) -> Self {
        let same_cell = |other: &&Row| (other.bytes, other.inflight) == (row.bytes, row.inflight);
        let Some(base) = rows.iter().filter(same_cell).find(|other| other.mode == Mode::GrpcTcp.name())
        else {
            return Self::default();
        };
        let ratio = |over: f64, under: f64| (over > 0.0 && under > 0.0).then(|| over / under);
        Self { latency: ratio(base.p50_us, row.p50_us), throughput: ratio(row.ops_per_s, base.ops_per_s) }
    }
}

/// One line about a row with errors.
pub(crate) fn describe_errors(row: &Row) -> String {
    let cell = super::plan::Cell { bytes: row.bytes, inflight: row.inflight };
    let first = row.first_error.as_deref().unwrap_or("unknown");
    let plural = if row.errors == 1 { "error" } else { "errors" };
    format!("{} at {}: {} {plural}, the first: {first}", row.mode, cell.label(), row.errors)
}

#[cfg(test)]
pub(crate) fn sample_row(mode: &'static str, bytes: u64, inflight: usize, p50_us: f64) -> Row {
    let ops_per_s = 1e6 / p50_us * inflight as f64;
    Row {
        mode,
        bytes,
        inflight,
        ops: 1000,
        errors: 0,
        p50_us,
        p99_us: p50_us * 2.0,
        ops_per_s,
        gbytes_per_s: ops_per_s * bytes as f64 / 1e9,
        cpu_us_per_op: p50_us,
        first_error: None,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

    use super::*;

    #[test]
    fn ratios_say_how_many_times_better_in_the_same_cell() {
        let rows = [
            sample_row("grpc-tcp", 64, 1, 80.0),
            sample_row("grpc-uds", 64, 1, 40.0),
            sample_row("grpc-uds", 64, 2, 1.0),
        ];
        assert_eq!(Ratio::of(&rows[0], &rows), Ratio { latency: Some(1.0), throughput: Some(1.0) });
        assert_eq!(Ratio::of(&rows[1], &rows), Ratio { latency: Some(2.0), throughput: Some(2.0) });
        assert_eq!(Ratio::of(&rows[2], &rows), Ratio::default());
    }

    #[test]
    fn only_wrong_content_is_a_mismatch() {
        let mut checks = Checks::default();
        checks.count(&CallError::Content { offset: 1, sent: 2 });
        checks.count(&CallError::Length { sent: 2, arrived: 1 });
        checks.count(&CallError::Status(tonic::Status::unavailable("gone")));
        assert_eq!(checks.mismatches, 2);
        assert!(checks.summary().contains("2 WRONG"));
    }
}
