//! The sum of the outcomes of one mode's turns in one cell.

use std::time::Duration;

use hdrhistogram::Histogram;
use tonic_rdma_commands::Failure;

use super::outcome::TurnOutcome;
use crate::compare::modes::mode::Mode;
use crate::compare::plan::cell::Cell;
use crate::compare::plan::direction::Direction;
use crate::compare::results::row::Row;

/// The longest latency that is recorded, in nanoseconds. A longer latency counts as this value.
const MAX_LATENCY: u64 = 600_000_000_000;

/// The sum of one mode's turns in one cell.
#[derive(Debug)]
pub(crate) struct Tally {
    latencies: Histogram<u64>,
    ops: u64,
    bytes: u64,
    errors: u64,
    first_error: Option<String>,
    /// Time of all timed turns, and CPU time that both processes used in it.
    pub(crate) wall: Duration,
    pub(crate) cpu: Duration,
    /// The reason why the mode could not take part.
    pub(crate) skipped: Option<String>,
    turns: u64,
    offered: u64,
    unsent: u64,
    backlog: u64,
}

impl Tally {
    pub(crate) fn new() -> Result<Self, Failure> {
        let latencies = Histogram::new_with_bounds(1, MAX_LATENCY, 3)
            .map_err(|error| Failure::run("can't make a histogram").because(error))?;
        Ok(Self {
            latencies,
            ops: 0,
            bytes: 0,
            errors: 0,
            first_error: None,
            wall: Duration::ZERO,
            cpu: Duration::ZERO,
            skipped: None,
            turns: 0,
            offered: 0,
            unsent: 0,
            backlog: 0,
        })
    }

    pub(crate) fn error(&mut self, count: u64, what: String) {
        self.errors += count;
        self.first_error.get_or_insert(what);
    }

    /// Adds the errors of a turn, timed or not.
    pub(crate) fn add_errors(&mut self, turn: TurnOutcome) {
        if let Some(error) = turn.first_error {
            self.error(turn.errors, error);
        }
    }

    /// Adds a timed turn.
    pub(crate) fn add(&mut self, turn: TurnOutcome, wall: Duration, cpu: Duration) {
        // Operations that were never sent would have taken longer than they had waited. Figures without them would be
        // too good.
        for latency in turn.latencies.iter().chain(&turn.unsent) {
            self.latencies.saturating_record(u64::try_from(latency.as_nanos()).unwrap_or(MAX_LATENCY));
        }
        self.ops += turn.latencies.len() as u64;
        self.bytes += turn.bytes;
        self.wall += wall;
        self.cpu += cpu.saturating_sub(turn.waiting);
        self.turns += 1;
        self.offered += turn.sent + turn.unsent.len() as u64;
        self.unsent += turn.unsent.len() as u64;
        self.backlog += turn.backlog;
        self.add_errors(turn);
    }

    /// Returns whether the mode fell behind the offered rate: an operation was not sent at all, more than one in twenty
    /// had no answer when the offering ended (up to four in each turn are no sign of it), or the turns took twice as
    /// long.
    fn saturated(&self, rate: f64) -> bool {
        const HANDFUL: u64 = 4;
        let achieved = self.ops as f64 / self.wall.as_secs_f64().max(1e-9);
        self.unsent > 0
            || self.backlog > (self.offered / 20).max(HANDFUL * self.turns)
            || achieved < rate / 2.0
    }

    /// Returns the row of `mode` in `cell`, for payloads that went in `direction`.
    pub(crate) fn row(&self, mode: Mode, cell: Cell, direction: Direction) -> Row {
        let per = |total: f64, parts: f64| if parts > 0.0 { total / parts } else { 0.0 };
        let micros = |quantile| match self.ops {
            0 => 0.0,
            _ => self.latencies.value_at_quantile(quantile) as f64 / 1e3,
        };
        let wall = self.wall.as_secs_f64();
        Row {
            mode: mode.name(),
            workload: cell.load.workload(),
            bytes: cell.load.bytes(),
            inflight: cell.inflight,
            direction,
            rate: cell.rate,
            ops: self.ops,
            errors: self.errors,
            unsent: cell.rate.map(|_| self.unsent),
            saturated: cell.rate.map(|rate| self.saturated(rate)),
            p50_us: micros(0.5),
            p99_us: (self.latencies.len() >= 100).then(|| micros(0.99)),
            p999_us: (self.latencies.len() >= 1000).then(|| micros(0.999)),
            ops_per_s: per(self.ops as f64, wall),
            gbytes_per_s: per(self.bytes as f64 / 1e9, wall),
            cpu_us_per_op: per(self.cpu.as_secs_f64() * 1e6, self.ops as f64),
            first_error: self.first_error.clone(),
            skipped: self.skipped.clone(),
            cell,
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

    use super::*;
    use crate::compare::plan::cell::Load;

    fn millis(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    #[test]
    fn a_row_counts_what_was_tallied() {
        let mut tally = Tally::new().unwrap();
        let mut turn = TurnOutcome::default();
        for micros in [1, 2, 3, 50] {
            turn.success(Duration::from_micros(micros), 1000, 1);
        }
        turn.waiting = Duration::from_micros(10);
        tally.add(turn, millis(2), Duration::from_micros(50));
        tally.error(2, "first".to_owned());
        tally.error(1, "second".to_owned());
        let row = tally.row(Mode::GrpcUds, Cell::closed(1000, 2), Direction::Up);
        assert_eq!((row.ops, row.errors, row.first_error.as_deref()), (4, 3, Some("first")));
        assert!((row.p50_us - 2.0).abs() < 0.01 && row.p99_us.is_none());
        assert!((row.ops_per_s - 2000.0).abs() < 1e-6 && (row.gbytes_per_s - 0.002).abs() < 1e-9);
        assert!((row.cpu_us_per_op - 10.0).abs() < 1e-9);
        assert_eq!((row.rate, row.saturated, row.unsent), (None, None, None));
    }

    #[test]
    fn a_mode_without_answers_has_figures_of_zero() {
        let row = Tally::new().unwrap().row(Mode::GrpcTcp, Cell::closed(64, 1), Direction::Up);
        assert_eq!([row.p50_us, row.ops_per_s, row.gbytes_per_s, row.cpu_us_per_op], [0.0; 4]);
    }

    #[test]
    fn percentiles_of_too_few_operations_are_absent() {
        let row = |operations: u64| {
            let (mut tally, mut turn) = (Tally::new().unwrap(), TurnOutcome::default());
            (1..=operations).for_each(|micros| turn.success(Duration::from_micros(micros), 64, 1));
            tally.add(turn, millis(1), millis(1));
            tally.row(Mode::GrpcTcp, Cell::closed(64, 1), Direction::Up)
        };
        assert_eq!((row(99).p99_us, row(99).p999_us, row(999).p999_us), (None, None, None));
        assert!(row(100).p99_us.is_some_and(|p99| (p99 - 99.0).abs() < 0.1));
        assert!(row(1000).p999_us.is_some_and(|p999| (p999 - 999.0).abs() < 1.0));
        let json = serde_json::to_value(row(99)).unwrap();
        assert!(json["p99_us"].is_null() && json["p50_us"].is_f64(), "{json}");
    }

    #[test]
    fn few_operations_that_take_far_too_long_are_saturation() {
        let cell = Cell { load: Load::Size(64), inflight: 8, rate: Some(10.0) };
        let row = |wall| {
            let mut tally = Tally::new().unwrap();
            let mut turn = TurnOutcome { sent: 1, backlog: 1, ..TurnOutcome::default() };
            turn.success(wall, 64, 1);
            tally.add(turn, wall, wall);
            tally.row(Mode::GrpcTcp, cell, Direction::Up)
        };
        assert_eq!(row(millis(120)).saturated, Some(false));
        assert_eq!(row(millis(900)).saturated, Some(true));
    }

    #[test]
    fn falling_behind_is_saturation_and_unsent_operations_count_by_their_wait() {
        let cell = Cell { load: Load::Size(64), inflight: 8, rate: Some(1000.0) };
        let row = |backlog, unsent: Vec<Duration>| {
            let mut tally = Tally::new().unwrap();
            let mut turn =
                TurnOutcome { sent: 1000 - unsent.len() as u64, backlog, unsent, ..TurnOutcome::default() };
            for _ in 0..900 {
                turn.success(millis(1), 64, 1);
            }
            tally.add(turn, millis(1000), millis(10));
            tally.row(Mode::GrpcTcp, cell, Direction::Up)
        };
        assert_eq!(row(50, Vec::new()).saturated, Some(false));
        assert_eq!(row(51, Vec::new()).saturated, Some(true));
        let behind = row(10, vec![millis(500); 100]);
        assert_eq!((behind.saturated, behind.unsent, behind.ops), (Some(true), Some(100), 900));
        assert!(behind.p99_us > Some(499_000.0) && (behind.ops_per_s - 900.0).abs() < 1e-6);
    }
}
