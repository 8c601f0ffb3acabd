//! The measuring: short turns of each mode, again and again, so that drift affects all modes alike.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::task::JoinSet;
use tokio::time::error::Elapsed;
use tonic_rdma_commands::{Failure, cores};
use tonic_rdma_payload::seeded::mix;
use tonic_rdma_proto::transfer::Check;

use crate::compare::modes::Caller;
use crate::compare::modes::call_error::CallError;
use crate::compare::modes::grpc::client::GrpcCaller;
use crate::compare::operations::{Done, Operations, Position};
use crate::compare::plan::Plan;
use crate::compare::plan::cell::Cell;
use crate::compare::results::row::{Checks, Row};
use crate::compare::turns::open_loop::{self, OfferedLoad, poisson_arrivals};
use crate::compare::turns::participant::{PATIENCE, Participant, Tally, TurnOutcome, patience};

/// The largest operation for which an uncounted operation precedes each turn. Without this operation, a mode that had
/// slept would count its wake-up.
const LEAD_IN: u64 = 4 << 20;

/// Measures cell after cell.
#[derive(Debug)]
pub(crate) struct Meter<'a> {
    pub(crate) plan: &'a Plan,
    pub(crate) participants: Vec<Participant>,
    /// A separate connection for requests of the server's CPU time.
    pub(crate) control: GrpcCaller,
    pub(crate) progress: ProgressBar,
    pub(crate) checks: Checks,
    /// Whether each process has a core of its own.
    pub(crate) pinned: bool,
    /// Whether receivers of any mode consume payloads.
    pub(crate) consumed: bool,
}

/// Returns the result of a turn's begin or end. A timeout becomes [`CallError::NoAnswer`].
fn answered<T>(result: Result<Result<T, CallError>, Elapsed>) -> Result<T, CallError> {
    result.unwrap_or(Err(CallError::NoAnswer(PATIENCE)))
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

    /// Measures all modes in one cell, and returns a row for each.
    async fn cell(&mut self, cell: Cell) -> Result<Vec<Row>, Failure> {
        let operations = Operations::new(cell.load, seed(cell), self.consumed)?;
        let mut tallies = Vec::new();
        for _ in &self.participants {
            tallies.push(Tally::new()?);
        }
        for (participant, tally) in tallies.iter_mut().enumerate() {
            self.announce(cell, participant);
            self.participants[participant].prepare(&operations, cell, tally).await;
            self.check_every_byte(participant, &operations, cell, 0, tally).await;
            self.warm_up(participant, &operations, cell, tally).await;
            // The warm-up does not count in the sequence of operations.
            self.participants[participant].position = Position::default();
        }
        let planned = self.plan.rounds(cell);
        for round in 0..planned {
            for participant in self.plan.order(round) {
                let tally = &mut tallies[participant];
                // A mode with long operations uses its time up in fewer rounds, and skips the remaining rounds.
                if round < self.plan.min_rounds() || tally.wall < self.plan.duration {
                    self.announce(cell, participant);
                    self.timed_turn(participant, &operations, cell, round, tally).await?;
                }
                self.progress.inc(1);
            }
        }
        for (participant, tally) in tallies.iter_mut().enumerate() {
            self.check_every_byte(participant, &operations, cell, 1, tally).await;
            self.participants[participant].release(cell).await;
        }
        let row = |(participant, tally): (&Participant, &Tally)| {
            tally.row(participant.mode, cell, self.plan.direction)
        };
        Ok(self.participants.iter().zip(&tallies).map(row).collect())
    }

    /// Begins a mode's turn. Returns false after a failure; the caller must not end the turn then.
    async fn begin(&mut self, participant: usize, check: Check, tally: &mut Tally) -> bool {
        let participant = &mut self.participants[participant];
        let begun = answered(tokio::time::timeout(PATIENCE, participant.caller.begin(check)).await);
        if let Err(error) = &begun {
            participant.count(&TurnOutcome { errors: 1, ..TurnOutcome::default() });
            tally.error(1, error.to_string());
        }
        begun.is_ok()
    }

    /// Ends a mode's turn, so that other modes have theirs.
    async fn end(&mut self, participant: usize, tally: &mut Tally) {
        let participant = &mut self.participants[participant];
        match answered(tokio::time::timeout(PATIENCE, participant.caller.end()).await) {
            Ok(messages) => self.checks.every_byte += messages,
            Err(error) => {
                self.checks.mismatches += u64::from(error.is_mismatch());
                tally.error(1, error.to_string());
            }
        }
    }

    fn announce(&self, cell: Cell, participant: usize) {
        self.progress.set_message(format!("{}  {}", cell.label(), self.participants[participant].mode));
    }

    /// Makes a turn that does not count. In an open loop one caller makes it, because the bound may be thousands.
    async fn warm_up(&mut self, participant: usize, operations: &Operations, cell: Cell, tally: &mut Tally) {
        let length = (self.plan.duration / 10).min(Duration::from_millis(100));
        let concurrency = if cell.rate.is_some() { (1, 1) } else { cell.concurrency() };
        if self.participants[participant].is_idle() || !self.begin(participant, Check::Stamps, tally).await {
            return;
        }
        tally.add_errors(self.closed_turn(participant, operations, cell, concurrency, length).await);
        self.end(participant, tally).await;
    }

    /// Makes one operation outside the measured time. The receiver checks every byte of it.
    async fn check_every_byte(
        &mut self,
        participant: usize,
        operations: &Operations,
        cell: Cell,
        turn: usize,
        tally: &mut Tally,
    ) {
        if self.participants[participant].is_idle() || !self.begin(participant, Check::All, tally).await {
            return;
        }
        let patience = patience(cell, 1);
        let operation = operations.take(turn);
        self.checks.every_byte += operation.messages();
        let caller = &mut self.participants[participant].caller;
        match tokio::time::timeout(patience, caller.run(&operation, Check::All, 1)).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => {
                self.checks.mismatches += u64::from(error.is_mismatch());
                tally.error(1, error.to_string());
            }
            Err(_) => {
                self.participants[participant].given_up = true;
                tally.error(1, CallError::NoAnswer(patience).to_string());
            }
        }
        self.end(participant, tally).await;
    }

    /// Makes a turn whose calls, wall time and CPU time count.
    async fn timed_turn(
        &mut self,
        participant: usize,
        operations: &Operations,
        cell: Cell,
        round: u32,
        tally: &mut Tally,
    ) -> Result<(), Failure> {
        if self.participants[participant].is_idle() || !self.begin(participant, Check::Stamps, tally).await {
            return Ok(());
        }
        if cell.load.bytes() <= LEAD_IN {
            tally.add_errors(self.closed_turn(participant, operations, cell, (1, 1), Duration::ZERO).await);
        }
        let offer = cell.rate.map(|rate| self.offer(cell, rate, round));
        let cpu = cpu_time(&mut self.control).await?;
        let start = Instant::now();
        let turn = match &offer {
            Some(offer) => self.open_turn(participant, operations, cell, offer).await,
            None => {
                let length = self.plan.slice(cell);
                self.closed_turn(participant, operations, cell, cell.concurrency(), length).await
            }
        };
        let wall = start.elapsed();
        let cpu = cpu_time(&mut self.control).await?.saturating_sub(cpu);
        self.end(participant, tally).await;
        self.checks.stamps += turn.messages + turn.errors;
        self.participants[participant].count(&turn);
        tally.add(turn, wall, cpu);
        Ok(())
    }

    /// Returns the load that is offered to every mode in this round.
    fn offer(&self, cell: Cell, rate: f64, round: u32) -> OfferedLoad {
        let length = self.plan.slice(cell);
        let schedule = poisson_arrivals(rate, length, mix(u64::from(round)) ^ rate.to_bits());
        let (bound, width) = cell.concurrency();
        let first = round as usize * schedule.len();
        OfferedLoad { schedule, length, first, bound, width, yields: !self.pinned }
    }

    /// Makes a turn with `concurrency.0` callers, each with `concurrency.1` calls at once.
    async fn closed_turn(
        &mut self,
        participant: usize,
        operations: &Operations,
        cell: Cell,
        concurrency: (usize, usize),
        length: Duration,
    ) -> TurnOutcome {
        let (mut turn, mut missing) = (TurnOutcome::default(), 0);
        let participant = &mut self.participants[participant];
        if participant.is_idle() {
            return turn;
        }
        let patience = length + patience(cell, concurrency.0);
        let (caller, position) = (&participant.caller, &participant.position);
        let run = run(caller, operations, position, concurrency, length, &mut turn, &mut missing);
        if tokio::time::timeout(patience, run).await.is_err() {
            participant.given_up = true;
            turn.error(missing, CallError::NoAnswer(patience).to_string());
        }
        self.checks.mismatches += turn.mismatches;
        turn
    }

    /// Makes a turn in which operations begin at the times of `offer`.
    async fn open_turn(
        &mut self,
        participant: usize,
        operations: &Operations,
        cell: Cell,
        offer: &OfferedLoad,
    ) -> TurnOutcome {
        let participant = &mut self.participants[participant];
        let patience = offer.length * 2 + patience(cell, offer.bound);
        let mut turn = TurnOutcome::default();
        let run = open_loop::run(&participant.caller, operations, offer, &mut turn);
        if tokio::time::timeout(patience, run).await.is_err() {
            participant.given_up = true;
            let missing = turn.sent - turn.latencies.len() as u64 - turn.errors;
            turn.error(missing, CallError::NoAnswer(patience).to_string());
        }
        self.checks.mismatches += turn.mismatches;
        turn
    }
}

/// Returns the CPU time of both processes since they started. `control` is a connection of its own.
pub(crate) async fn cpu_time(control: &mut GrpcCaller) -> Result<Duration, Failure> {
    let failed = || Failure::run("can't ask the server process for its CPU time");
    match tokio::time::timeout(PATIENCE, control.usage()).await {
        Ok(Ok(server)) => Ok(server + cores::cpu_time()),
        Ok(Err(error)) => Err(failed().because(error)),
        Err(_) => Err(failed().because(CallError::NoAnswer(PATIENCE))),
    }
}

/// Returns the seed of a cell. Cells have different seeds, so that remains of an earlier cell never pass a check.
pub(crate) fn seed(cell: Cell) -> u64 {
    let rate = cell.rate.map_or(0, |rate| mix(rate.to_bits()));
    mix(cell.load.bytes() ^ ((cell.inflight as u64) << 40)) ^ rate
}

/// Keeps `callers` operations in flight until `length` is over, each with `width` calls at once. Every caller makes at
/// least one operation. If this future is dropped, `turn` has the results so far. `missing` counts the callers that
/// have not ended.
pub(crate) async fn run(
    caller: &Caller,
    operations: &Operations,
    position: &Position,
    (callers, width): (usize, usize),
    length: Duration,
    turn: &mut TurnOutcome,
    missing: &mut u64,
) {
    let end = Instant::now() + length;
    let (caller, operations, position) = (caller.clone(), operations.clone(), Arc::clone(position));
    if callers == 1 && stays_in_block_on(&caller) {
        *missing = 1;
        let ended = match caller {
            Caller::Placement(caller) => caller.keep_sending(operations, position, 1, end).await,
            caller => keep_calling(caller, operations, position, width, end).await,
        };
        *missing = 0;
        return count(ended, turn);
    }
    let mut under_way = JoinSet::new();
    if let Caller::Placement(caller) = caller {
        under_way.spawn(caller.keep_sending(operations, position, callers, end));
    } else {
        for _ in 0..callers {
            let (caller, operations, position) = (caller.clone(), operations.clone(), Arc::clone(&position));
            under_way.spawn(keep_calling(caller, operations, position, width, end));
        }
    }
    *missing = under_way.len() as u64;
    while let Some(ended) = under_way.join_next().await {
        *missing -= 1;
        match ended {
            Ok(ended) => count(ended, turn),
            Err(crash) => turn.error(1, crash.to_string()),
        }
    }
}

/// Returns whether a single caller makes its calls in the future that `block_on` was given, and not in a task of its
/// own.
///
/// In a multi-thread runtime that future runs on the main thread, which is no worker. A program whose `#[tokio::main]`
/// function calls, waits for the answer, and calls again makes its calls there. A caller that polls is a task even
/// there, on a worker of its own. In a runtime of one thread all callers are tasks, which makes next to no difference.
fn stays_in_block_on(caller: &Caller) -> bool {
    let polls = matches!(caller, Caller::Placement(caller) if !caller.awaits());
    !polls && Handle::current().runtime_flavor() == RuntimeFlavor::MultiThread
}

fn count((done, error): (Vec<Done>, Option<CallError>), turn: &mut TurnOutcome) {
    for (latency, bytes, messages) in done {
        turn.success(latency, bytes, messages);
    }
    if let Some(error) = error {
        turn.call_error(&error);
    }
}

/// Makes calls one after the other until `end`, at least one. An error ends the loop, so that a broken connection does
/// not cause a busy loop.
async fn keep_calling(
    mut caller: Caller,
    operations: Operations,
    position: Position,
    width: usize,
    end: Instant,
) -> (Vec<Done>, Option<CallError>) {
    let mut done = Vec::new();
    loop {
        let operation = operations.take(position.fetch_add(1, Ordering::Relaxed));
        match caller.run(&operation, Check::Stamps, width).await {
            Ok(latency) => done.push((latency, operation.bytes(), operation.messages())),
            Err(error) => return (done, Some(error)),
        }
        if Instant::now() >= end {
            return (done, None);
        }
    }
}
