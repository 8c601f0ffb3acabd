//! A mode that takes part in a run: its connection and its state.

use std::time::Duration;

use hdrhistogram::Histogram;
use tonic_rdma_commands::{Context as _, Failure};

use crate::compare::modes::Caller;
use crate::compare::modes::call_error::CallError;
use crate::compare::modes::mode::Mode;
use crate::compare::operations::{Operations, Position};
use crate::compare::plan::cell::{Cell, Direction};
use crate::compare::results::row::Row;

/// A turn that takes longer than this plus the time of its bytes at [`SLOWEST`] (bytes a second) is stuck.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);
const SLOWEST: f64 = 20e6;

/// A mode with its connection.
#[derive(Debug)]
pub(crate) struct Participant {
    pub(crate) mode: Mode,
    pub(crate) caller: Caller,
    /// Number of operations begun in this cell after the warm-up.
    pub(crate) position: Position,
    /// Whether a call got no answer, or all calls have failed for a while. The connection is not used again.
    pub(crate) given_up: bool,
    /// Number of consecutive turns in which every call failed.
    failed_turns: u32,
    /// Whether the mode can't take part in this cell.
    skips: bool,
}

impl Participant {
    pub(crate) fn new(mode: Mode, caller: Caller) -> Self {
        Self { mode, caller, position: Position::default(), given_up: false, failed_turns: 0, skips: false }
    }

    /// Returns whether the mode sends nothing in this cell.
    pub(crate) fn is_idle(&self) -> bool {
        self.given_up || self.skips
    }

    /// Prepares for a cell's operations. A mode that can't prepare skips the cell, and its row has the reason.
    pub(crate) async fn prepare(&mut self, operations: &Operations, cell: Cell, tally: &mut Tally) {
        tally.skipped = cell.beyond(self.mode);
        self.skips = tally.skipped.is_some();
        if self.is_idle() {
            return;
        }
        let inflight = if cell.rate.is_some() { 1 } else { cell.concurrency().0 };
        let patience = patience(cell, inflight);
        let error = match tokio::time::timeout(patience, self.caller.prepare(operations, inflight)).await {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error,
            Err(_) => CallError::NoAnswer(patience),
        };
        self.skips = true;
        tally.error(1, error.to_string());
    }

    /// Releases everything that was prepared. A mode whose release takes too long is not used again.
    pub(crate) async fn release(&mut self, cell: Cell) {
        self.given_up |= tokio::time::timeout(patience(cell, 1), self.caller.release()).await.is_err();
    }

    /// Counts consecutive turns in which all calls failed, for example after the loss of the device. The mode is given
    /// up after three such turns.
    pub(crate) fn count(&mut self, turn: &TurnOutcome) {
        const TURNS: u32 = 3;
        self.failed_turns = if turn.failed() { self.failed_turns + 1 } else { 0 };
        self.given_up |= self.failed_turns >= TURNS;
    }
}

/// Returns the time to wait for operations before they count as lost.
pub(crate) fn patience(cell: Cell, operations: usize) -> Duration {
    PATIENCE + Duration::from_secs_f64(cell.load.bytes() as f64 * operations as f64 / SLOWEST)
}

/// The outcome of one turn.
#[derive(Debug, Default)]
pub(crate) struct TurnOutcome {
    /// The latency of each operation that succeeded.
    pub(crate) latencies: Vec<Duration>,
    /// Bytes and messages of these operations.
    pub(crate) bytes: u64,
    pub(crate) messages: u64,
    pub(crate) errors: u64,
    pub(crate) first_error: Option<String>,
    /// Errors about wrong content.
    pub(crate) mismatches: u64,
    /// CPU time that the load generator spent waiting until the next operation was due.
    pub(crate) waiting: Duration,
    /// Operations of an open loop that were sent.
    pub(crate) sent: u64,
    /// Waiting time of each operation that was given up before it was sent.
    pub(crate) unsent: Vec<Duration>,
    /// Operations without an answer at the end of the offering.
    pub(crate) backlog: u64,
}

impl TurnOutcome {
    pub(crate) fn success(&mut self, latency: Duration, bytes: u64, messages: u64) {
        self.latencies.push(latency);
        self.bytes += bytes;
        self.messages += messages;
    }

    pub(crate) fn error(&mut self, count: u64, what: String) {
        self.errors += count;
        self.first_error.get_or_insert(what);
    }

    /// Adds the calls of `other`, which were made at the same time.
    pub(crate) fn merge(&mut self, other: Self) {
        let Self { latencies, bytes, messages, errors, first_error, mismatches, .. } = other;
        self.latencies.extend(latencies);
        self.bytes += bytes;
        self.messages += messages;
        self.errors += errors;
        self.first_error = self.first_error.take().or(first_error);
        self.mismatches += mismatches;
    }

    /// Counts an operation that failed.
    pub(crate) fn call_error(&mut self, error: &CallError) {
        self.mismatches += u64::from(error.is_mismatch());
        self.error(1, error.to_string());
    }

    /// Returns whether there were calls and all of them failed.
    pub(crate) fn failed(&self) -> bool {
        self.latencies.is_empty() && self.errors > 0
    }
}

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
        let latencies = Histogram::new_with_bounds(1, MAX_LATENCY, 3).context("can't make a histogram")?;
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
            mode,
            workload: cell.load.name(),
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
            connections: None,
            cell,
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

    use super::*;
    use crate::compare::modes::grpc::client::{CallSettings, GrpcCaller};
    use crate::compare::plan::cell::Direction;
    use crate::workload::Workload;

    fn participant() -> Participant {
        let nowhere = tonic::transport::Endpoint::from_static("http://127.0.0.1:1").connect_lazy();
        Participant::new(
            Mode::GrpcTcp,
            Caller::Grpc(GrpcCaller::new(nowhere, Mode::GrpcTcp, CallSettings::default())),
        )
    }

    #[tokio::test]
    async fn a_mode_skips_only_the_cells_that_it_can_t_carry() {
        let operations = Operations::new(Workload::Size(64), 1, false).unwrap();
        let mut participant = participant();
        for (bytes, skipped) in [(64, false), (3 << 30, true), (2047 << 20, false)] {
            let cell = Cell::closed(bytes, 1);
            let mut tally = Tally::new().unwrap();
            participant.prepare(&operations, cell, &mut tally).await;
            let row = tally.row(Mode::GrpcTcp, cell, Direction::Up);
            assert_eq!((row.skipped.is_some(), participant.is_idle(), row.errors), (skipped, skipped, 0));
        }
    }

    #[tokio::test]
    async fn a_mode_whose_calls_all_fail_is_given_up() {
        let mut participant = participant();
        let failed = || TurnOutcome { errors: 1, ..TurnOutcome::default() };
        let mixed =
            || TurnOutcome { latencies: vec![Duration::from_nanos(1)], errors: 5, ..TurnOutcome::default() };
        for turn in
            [failed(), failed(), mixed(), failed(), failed(), TurnOutcome::default(), failed(), failed()]
        {
            participant.count(&turn);
            assert!(!participant.given_up);
        }
        participant.count(&failed());
        assert!(participant.given_up);
    }
}

#[cfg(test)]
mod tally_tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

    use super::*;
    use crate::workload::Workload;

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
        let cell = Cell { load: Workload::Size(64), inflight: 8, rate: Some(10.0) };
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
        let cell = Cell { load: Workload::Size(64), inflight: 8, rate: Some(1000.0) };
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
