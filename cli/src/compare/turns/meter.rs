//! The measuring: short turns of each mode, again and again, so that drift affects all modes alike. And the closed loop, in which an
//! operation begins when one has ended.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::task::JoinSet;
use tonic_rdma_commands::{Context as _, Failure, cores};
use tonic_rdma_payload::seeded::mix;
use tonic_rdma_proto::transfer::Check;

use crate::compare::modes::Caller;
use crate::compare::modes::call_error::CallError;
use crate::compare::modes::grpc::client::GrpcCaller;
use crate::compare::operations::{Done, Operations, Position};
use crate::compare::plan::Plan;
use crate::compare::plan::budget::MIN_ROUNDS;
use crate::compare::plan::cell::Cell;
use crate::compare::results::row::{Checks, Row};
use crate::compare::turns::participant::{Measured, PATIENCE, Participant, TurnOutcome, within};

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
        let of = Measured { plan: self.plan, cell, operations, pinned: self.pinned };
        let announce = |progress: &ProgressBar, participant: &Participant| {
            progress.set_message(format!("{}  {}", cell.label(), participant.mode));
        };
        for participant in &mut self.participants {
            announce(&self.progress, participant);
            participant.prepare(&of).await?;
            participant.check_every_byte(&of, 0).await;
            participant.warm_up(&of).await;
        }
        for round in 0..self.plan.rounds(cell) {
            for index in self.plan.order(round) {
                let participant = &mut self.participants[index];
                // A mode with long operations uses its time up in fewer rounds, and skips the remaining rounds.
                if round < MIN_ROUNDS || participant.tally.wall < self.plan.duration {
                    announce(&self.progress, participant);
                    participant.timed_turn(&of, round, &mut self.control).await?;
                }
                self.progress.inc(1);
            }
        }
        let mut rows = Vec::new();
        for participant in &mut self.participants {
            participant.check_every_byte(&of, 1).await;
            participant.release(cell).await;
            self.checks.add(participant.tally.checks());
            rows.push(participant.tally.row(participant.mode, cell, self.plan.direction));
        }
        Ok(rows)
    }
}

/// Returns the CPU time of both processes since they started. `control` is a connection of its own.
pub(crate) async fn cpu_time(control: &mut GrpcCaller) -> Result<Duration, Failure> {
    let server = within(PATIENCE, control.usage()).await;
    Ok(server.context("can't ask the server process for its CPU time")? + cores::cpu_time())
}

/// Returns the seed of a cell. Cells have different seeds, so that remains of an earlier cell never pass a check.
pub(crate) fn seed(cell: Cell) -> u64 {
    let rate = cell.rate.map_or(0, |rate| mix(rate.to_bits()));
    mix(cell.load.bytes() ^ ((cell.inflight as u64) << 40)) ^ rate
}

/// Keeps `concurrency.0` operations in flight until `length` is over, each with `concurrency.1` calls at once. Every caller makes at
/// least one operation. Operations without an answer after `patience` count as errors.
pub(crate) async fn closed_turn(
    caller: &Caller,
    operations: &Operations,
    position: &Position,
    concurrency: (usize, usize),
    (length, patience): (Duration, Duration),
) -> TurnOutcome {
    let (mut turn, mut missing) = (TurnOutcome::default(), 0);
    let running = run(caller, operations, position, concurrency, length, &mut turn, &mut missing);
    if tokio::time::timeout(patience, running).await.is_err() {
        turn.stuck(missing, patience);
    }
    turn
}

/// Makes the operations of a turn. If this future is dropped, `turn` has the results so far. `missing` counts the callers that
/// have not ended.
async fn run(
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
            Err(crash) => turn.counts.error(1, crash.to_string()),
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
        turn.counts.fail(&error);
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
