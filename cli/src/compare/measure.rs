//! The measuring itself: short turns of each mode, again and again, so that drift hits all alike.

use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use indicatif::ProgressBar;
use tokio::task::JoinSet;
use tonic_rdma_proto::transfer::Check;

use super::client::{CallError, Caller};
use super::content::Payloads;
use super::cores;
use super::mode::Mode;
use super::plan::{Cell, Plan};
use super::results::{Checks, Row};
use crate::failure::Failure;

/// Longest latency that is told apart: longer ones count as this.
const MAX_LATENCY: u64 = 600_000_000_000;

/// A turn that takes longer than this, and than its bytes would at [`SLOWEST`], is stuck.
const PATIENCE: Duration = Duration::from_secs(30);
const SLOWEST: f64 = 20e6;

/// Calls up to this size lead each turn in without being counted, so that no mode pays for having slept.
const LEAD_IN: u64 = 4 << 20;

/// One mode's connection.
#[derive(Debug)]
pub(crate) struct Lane {
    pub(crate) mode: Mode,
    pub(crate) caller: Caller,
    /// A call got no answer, or none has succeeded for a while: the connection is not used again.
    given_up: bool,
    /// Turns in a row in which every call failed.
    failed_turns: u32,
}

impl Lane {
    pub(crate) fn new(mode: Mode, caller: Caller) -> Self {
        Self { mode, caller, given_up: false, failed_turns: 0 }
    }
}

impl Lane {
    /// A mode all of whose calls fail, as when its device is gone, is not tried for ever.
    fn count(&mut self, turn: &Turn) {
        const TURNS: u32 = 3;
        let failed = turn.latencies.is_empty() && turn.errors > 0;
        self.failed_turns = if failed { self.failed_turns + 1 } else { 0 };
        self.given_up |= self.failed_turns >= TURNS;
    }
}

/// What is known of one mode in one cell.
#[derive(Debug)]
struct Tally {
    latencies: Histogram<u64>,
    errors: u64,
    first_error: Option<String>,
    wall: Duration,
    cpu: Duration,
}

/// What one turn brought.
#[derive(Debug, Default)]
struct Turn {
    latencies: Vec<u64>,
    errors: u64,
    first_error: Option<String>,
}

/// Measures cell after cell.
#[derive(Debug)]
pub(crate) struct Meter<'a> {
    pub(crate) plan: &'a Plan,
    pub(crate) lanes: Vec<Lane>,
    /// A connection of its own for asking the serving process what CPU time it used.
    pub(crate) control: Caller,
    pub(crate) progress: ProgressBar,
    pub(crate) checks: Checks,
}

impl Meter<'_> {
    /// Measures every cell of the plan.
    pub(crate) async fn run(&mut self) -> Result<Vec<Row>, Failure> {
        let plan = self.plan;
        let mut rows = Vec::new();
        for cell in &plan.cells {
            rows.extend(self.cell(*cell).await?);
        }
        Ok(rows)
    }

    /// Measures all modes in one cell: a row for each.
    async fn cell(&mut self, cell: Cell) -> Result<Vec<Row>, Failure> {
        let payloads = payloads(cell)?;
        let mut tallies = Vec::new();
        for _ in &self.lanes {
            tallies.push(Tally::new()?);
        }
        for (lane, tally) in tallies.iter_mut().enumerate() {
            self.announce(cell, lane);
            self.check_every_byte(lane, &payloads, 0, tally).await;
            self.turn(lane, &payloads, cell, self.warm_up()).await.count_errors(tally);
        }
        for round in 0..self.plan.rounds() {
            for lane in self.plan.order(round) {
                self.announce(cell, lane);
                self.timed_turn(lane, &payloads, cell, &mut tallies[lane]).await?;
                self.progress.inc(1);
            }
            let rounds = round + 1;
            if rounds >= self.plan.min_rounds()
                && tallies.iter().all(|tally| tally.wall >= self.plan.duration)
            {
                let left = u64::from(self.plan.rounds() - rounds) * self.lanes.len() as u64;
                self.progress.inc(left);
                break;
            }
        }
        for (lane, tally) in tallies.iter_mut().enumerate() {
            self.check_every_byte(lane, &payloads, 1, tally).await;
        }
        Ok(self.lanes.iter().zip(&tallies).map(|(lane, tally)| tally.row(lane.mode, cell)).collect())
    }

    fn announce(&self, cell: Cell, lane: usize) {
        self.progress.set_message(format!("{}  {}", cell.label(), self.lanes[lane].mode));
    }

    fn warm_up(&self) -> Duration {
        (self.plan.duration / 10).min(Duration::from_millis(100))
    }

    /// One call outside the timed part, of which the server looks at every byte.
    async fn check_every_byte(&mut self, lane: usize, payloads: &Payloads, turn: usize, tally: &mut Tally) {
        let lane = &mut self.lanes[lane];
        if lane.given_up {
            return;
        }
        let patience = patience(payloads.size() as u64, 1);
        self.checks.every_byte += 1;
        let call = lane.caller.put(payloads.take(turn), Check::All);
        match tokio::time::timeout(patience, call).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => {
                self.checks.count(&error);
                tally.error(1, error.to_string());
            }
            Err(_) => {
                lane.given_up = true;
                tally.error(1, no_answer(patience));
            }
        }
    }

    /// A turn whose calls, wall time and CPU time count.
    async fn timed_turn(
        &mut self,
        lane: usize,
        payloads: &Payloads,
        cell: Cell,
        tally: &mut Tally,
    ) -> Result<(), Failure> {
        if self.lanes[lane].given_up {
            return Ok(());
        }
        if cell.bytes <= LEAD_IN {
            self.turn(lane, payloads, Cell { inflight: 1, ..cell }, Duration::ZERO).await.count_errors(tally);
        }
        let cpu = self.cpu_time().await?;
        let start = Instant::now();
        let turn = self.turn(lane, payloads, cell, self.plan.slice()).await;
        tally.wall += start.elapsed();
        tally.cpu += self.cpu_time().await?.saturating_sub(cpu);
        for latency in &turn.latencies {
            tally.latencies.saturating_record(*latency);
        }
        self.checks.stamps += turn.latencies.len() as u64 + turn.errors;
        self.lanes[lane].count(&turn);
        turn.count_errors(tally);
        Ok(())
    }

    /// CPU time of both processes since they started.
    async fn cpu_time(&mut self) -> Result<Duration, Failure> {
        let usage = tokio::time::timeout(PATIENCE, self.control.usage()).await;
        match usage {
            Ok(Ok(server)) => Ok(server + cores::cpu_time()),
            Ok(Err(error)) => {
                Err(Failure::run(format!("can't ask the server process for its CPU time: {error}")))
            }
            Err(_) => Err(Failure::run(format!("the server process: {}", no_answer(PATIENCE)))),
        }
    }

    /// Keeps `cell.inflight` calls under way until `length` is over; each caller makes one call at least.
    async fn turn(&mut self, lane: usize, payloads: &Payloads, cell: Cell, length: Duration) -> Turn {
        let mut turn = Turn::default();
        let lane = &mut self.lanes[lane];
        if lane.given_up {
            return turn;
        }
        let patience = length + patience(cell.bytes, cell.inflight);
        let end = Instant::now() + length;
        let mut callers = JoinSet::new();
        for first in 0..cell.inflight {
            callers.spawn(keep_calling(lane.caller.clone(), payloads.clone(), first, end));
        }
        let collect = async {
            while let Some(ended) = callers.join_next().await {
                match ended {
                    Ok((latencies, error)) => {
                        turn.latencies.extend(latencies);
                        if let Some(error) = error {
                            self.checks.count(&error);
                            turn.error(1, error.to_string());
                        }
                    }
                    Err(crash) => turn.error(1, crash.to_string()),
                }
            }
        };
        if tokio::time::timeout(patience, collect).await.is_err() {
            lane.given_up = true;
            turn.error(callers.len() as u64, no_answer(patience));
        }
        turn
    }
}

/// Calls one after the other until `end`, at least once; an error ends it, so that a broken connection can't spin.
async fn keep_calling(
    mut caller: Caller,
    payloads: Payloads,
    first: usize,
    end: Instant,
) -> (Vec<u64>, Option<CallError>) {
    let mut latencies = Vec::new();
    loop {
        match caller.put(payloads.take(first + latencies.len()), Check::Stamps).await {
            Ok(latency) => latencies.push(u64::try_from(latency.as_nanos()).unwrap_or(MAX_LATENCY)),
            Err(error) => return (latencies, Some(error)),
        }
        if Instant::now() >= end {
            return (latencies, None);
        }
    }
}

fn payloads(cell: Cell) -> Result<Payloads, Failure> {
    let len = usize::try_from(cell.bytes)
        .map_err(|_| Failure::usage(format!("{} does not fit this machine's addresses", cell.label())))?;
    // Cells differ in their seeds too, so that nothing left over from the cell before can pass.
    Ok(Payloads::new(len, super::content::mix(cell.bytes ^ ((cell.inflight as u64) << 40))))
}

/// How long to wait for calls before they count as lost.
fn patience(bytes: u64, inflight: usize) -> Duration {
    PATIENCE + Duration::from_secs_f64(bytes as f64 * inflight as f64 / SLOWEST)
}

fn no_answer(patience: Duration) -> String {
    format!("no answer within {} s", patience.as_secs())
}

impl Turn {
    fn error(&mut self, count: u64, what: String) {
        self.errors += count;
        self.first_error.get_or_insert(what);
    }

    fn count_errors(self, tally: &mut Tally) {
        if let Some(error) = self.first_error {
            tally.error(self.errors, error);
        }
    }
}

impl Tally {
    fn new() -> Result<Self, Failure> {
        let latencies = Histogram::new_with_bounds(1, MAX_LATENCY, 3)
            .map_err(|error| Failure::run(format!("can't make a histogram: {error}")))?;
        let (wall, cpu) = (Duration::ZERO, Duration::ZERO);
        Ok(Self { latencies, errors: 0, first_error: None, wall, cpu })
    }

    fn error(&mut self, count: u64, what: String) {
        self.errors += count;
        self.first_error.get_or_insert(what);
    }

    fn row(&self, mode: Mode, cell: Cell) -> Row {
        let ops = self.latencies.len();
        let per = |total: f64, parts: f64| if parts > 0.0 { total / parts } else { 0.0 };
        let micros = |quantile| match ops {
            0 => 0.0,
            _ => self.latencies.value_at_quantile(quantile) as f64 / 1e3,
        };
        let ops_per_s = per(ops as f64, self.wall.as_secs_f64());
        Row {
            mode: mode.name(),
            bytes: cell.bytes,
            inflight: cell.inflight,
            ops,
            errors: self.errors,
            p50_us: micros(0.5),
            p99_us: micros(0.99),
            ops_per_s,
            gbytes_per_s: ops_per_s * cell.bytes as f64 / 1e9,
            cpu_us_per_op: per(self.cpu.as_secs_f64() * 1e6, ops as f64),
            first_error: self.first_error.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

    use super::*;
    use crate::compare::encode::Encode;

    #[test]
    fn a_row_counts_what_was_tallied() {
        let mut tally = Tally::new().unwrap();
        for latency in [1_000, 2_000, 3_000, 50_000] {
            tally.latencies.record(latency).unwrap();
        }
        tally.wall = Duration::from_millis(2);
        tally.cpu = Duration::from_micros(40);
        tally.error(2, "first".to_owned());
        tally.error(1, "second".to_owned());
        let row = tally.row(Mode::GrpcUds, Cell { bytes: 1000, inflight: 2 });
        assert_eq!((row.ops, row.errors, row.first_error.as_deref()), (4, 3, Some("first")));
        assert!((row.p50_us - 2.0).abs() < 0.01 && (row.p99_us - 50.0).abs() < 0.1);
        assert!((row.ops_per_s - 2000.0).abs() < 1e-6 && (row.gbytes_per_s - 0.002).abs() < 1e-9);
        assert!((row.cpu_us_per_op - 10.0).abs() < 1e-9);
    }

    #[tokio::test]
    async fn a_mode_whose_calls_all_fail_is_given_up() {
        let nowhere = tonic::transport::Endpoint::from_static("http://127.0.0.1:1").connect_lazy();
        let mut lane = Lane::new(Mode::GrpcTcp, Caller::new(nowhere, Mode::GrpcTcp, Encode::Copy));
        let failed = || Turn { errors: 1, ..Turn::default() };
        let mixed = || Turn { latencies: vec![1], errors: 5, ..Turn::default() };
        for turn in [failed(), failed(), mixed(), failed(), failed(), Turn::default(), failed(), failed()] {
            lane.count(&turn);
            assert!(!lane.given_up);
        }
        lane.count(&failed());
        assert!(lane.given_up);
    }

    #[test]
    fn a_mode_that_never_answered_has_figures_that_are_numbers() {
        let row = Tally::new().unwrap().row(Mode::GrpcTcp, Cell { bytes: 64, inflight: 1 });
        assert_eq!([row.p50_us, row.p99_us, row.ops_per_s, row.gbytes_per_s, row.cpu_us_per_op], [0.0; 5]);
    }
}
