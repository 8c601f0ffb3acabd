//! Measures each cell by short trials of all modes, round after round, so that drift affects all modes alike.
//! Adds up the outcomes of a mode's trials, and decides whether the mode fell behind the offered rate. The
//! plan has the number and the order of the trials (`Plan::rounds`, `Plan::order`).
//!
//! ```text
//!  meter ─→ participant (a mode and its connection)
//!    │ a closed loop: operations begin when one has ended; open_loop (with its arrivals): when they are due
//!    └─→ outcome of a trial ─→ tally of a mode in a cell ─→ row
//! ```

pub(crate) mod open_loop;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use indicatif::ProgressBar;
use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::task::JoinSet;
use tonic_rdma::unstable::Processors;
use tonic_rdma_commands::cores::Usage;
use tonic_rdma_commands::payload::seeded::mix;
use tonic_rdma_commands::{Context as _, Failure};
use tonic_rdma_proto::transfer::Check;

use crate::compare::modes::Caller;
use crate::compare::modes::call_error::CallError;
use crate::compare::modes::grpc::client::GrpcCaller;
use crate::compare::modes::mode::{Contender, Mode};
use crate::compare::operations::{Done, Operations, Position};
use crate::compare::plan::{Cell, Direction, MIN_ROUNDS, Plan};
use crate::compare::results::{Checks, Ratios, Row};
use crate::compare::runs::Runs;
use crate::compare::trials::open_loop::{OfferedLoad, poisson_arrivals};
use crate::measure::transport::RESTED;

/// Measures cell after cell.
#[derive(Debug)]
pub(crate) struct Meter<'a> {
    pub(crate) plan: &'a Plan,
    pub(crate) participants: Vec<Participant>,
    /// A separate connection for requests of what the server has used.
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

    /// Makes the operations of a cell, and the copy of their content that modes send from. Long content takes
    /// seconds, so another thread makes it: the runtime has to answer the pings of peers.
    async fn operations(&self, cell: Cell) -> Result<Operations, Failure> {
        let up = self.plan.direction == Direction::Up;
        let registers = |mode: Mode| mode.sends_in_place() || (up && mode.registers_payloads());
        let registers = self.participants.iter().any(|it| registers(it.contender.mode));
        let consumed = self.consumed;
        let made = tokio::task::spawn_blocking(move || {
            let operations = Operations::new(cell.load, seed(cell), consumed)?;
            if registers {
                // Modes that get no copy say so when they prepare.
                let _ = operations.registered();
            }
            Ok(operations)
        });
        made.await.context("the content can't be made")?
    }

    /// Measures all modes in one cell, and returns a row for each.
    async fn cell(&mut self, cell: Cell) -> Result<Vec<Row>, Failure> {
        let operations = self.operations(cell).await?;
        let of = MeasuredCell { plan: self.plan, cell, operations, pinned: self.pinned };
        let announce = |progress: &ProgressBar, participant: &Participant| {
            progress.set_message(format!("{}  {}", cell.label(), participant.contender));
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
                // A mode with long operations uses its time up in fewer rounds, and skips the remaining
                // rounds.
                if round < MIN_ROUNDS || participant.tally.wall < self.plan.duration {
                    announce(&self.progress, participant);
                    participant.timed_trial(&of, round, &mut self.control).await?;
                }
                self.progress.inc(1);
            }
        }
        let mut rows = Vec::new();
        for participant in &mut self.participants {
            participant.check_every_byte(&of, 1).await;
            participant.release(cell).await;
            self.checks.add(participant.tally.checks());
            rows.push(participant.tally.row(participant.contender, cell, self.plan.direction));
        }
        Ok(rows)
    }
}

/// A trial that takes longer than this plus the time of its bytes at [`SLOWEST`] (bytes a second) is stuck.
pub(crate) const ANSWER_LIMIT: Duration = Duration::from_secs(30);
const SLOWEST: f64 = 20e6;

/// The largest operation for which an uncounted operation precedes each trial. Without this operation, a mode
/// that had slept would count its wake-up.
const LEAD_IN: u64 = 4 << 20;

/// Returns the time to wait for operations before they count as lost.
pub(crate) fn answer_limit(cell: Cell, operations: usize) -> Duration {
    ANSWER_LIMIT + Duration::from_secs_f64(cell.load.bytes() as f64 * operations as f64 / SLOWEST)
}

/// Returns the result of `work` if it comes within `limit`.
pub(crate) async fn within<T, E: Into<CallError>>(
    limit: Duration,
    work: impl Future<Output = Result<T, E>>,
) -> Result<T, CallError> {
    match tokio::time::timeout(limit, work).await {
        Ok(result) => result.map_err(Into::into),
        Err(_) => Err(CallError::NoAnswer(limit)),
    }
}

/// A cell that all modes measure.
#[derive(Debug)]
pub(crate) struct MeasuredCell<'a> {
    pub(crate) plan: &'a Plan,
    pub(crate) cell: Cell,
    pub(crate) operations: Operations,
    /// Whether each process has a core of its own.
    pub(crate) pinned: bool,
}

impl MeasuredCell<'_> {
    /// Returns the load that is offered to every mode in this round.
    fn offer(&self, rate: f64, round: u32) -> OfferedLoad {
        let length = self.plan.slice(self.cell);
        let schedule = poisson_arrivals(rate, length, mix(u64::from(round)) ^ rate.to_bits());
        let (bound, width) = self.cell.concurrency();
        let first = round as usize * schedule.len();
        OfferedLoad { schedule, length, first, bound, width, sleeps: !generator_polls(self.pinned) }
    }
}

/// Returns whether the load generator of an open loop polls between operations: it has a core of its own, and what
/// it takes is missing nowhere else.
pub(crate) fn generator_polls(pinned: bool) -> bool {
    pinned && !Processors::current().is_limited()
}

/// A mode with its connection.
#[derive(Debug)]
pub(crate) struct Participant {
    contender: Contender,
    caller: Caller,
    /// What it did in this cell.
    pub(crate) tally: Tally,
    /// Number of operations begun in this cell after the warm-up.
    position: Position,
    /// Whether a call got no answer, or all calls have failed for a while. The connection is not used again.
    given_up: bool,
    /// Number of consecutive trials in which every call failed.
    failed_trials: u32,
    /// Whether the mode can't take part in this cell.
    skips: bool,
    /// The end of the last trial.
    last: Instant,
}

impl Participant {
    pub(crate) fn new(contender: Contender, caller: Caller) -> Result<Self, Failure> {
        let (tally, position, last) = (Tally::new()?, Position::default(), Instant::now());
        Ok(Self { contender, caller, tally, position, given_up: false, failed_trials: 0, skips: false, last })
    }

    /// Returns whether the mode sends nothing in this cell.
    fn is_idle(&self) -> bool {
        self.given_up || self.skips
    }

    /// Prepares for a cell's operations. A mode that can't prepare skips the cell, and its row has the
    /// reason.
    pub(crate) async fn prepare(&mut self, of: &MeasuredCell<'_>) -> Result<(), Failure> {
        self.tally = Tally::new()?;
        self.tally.skipped = of.cell.beyond(self.contender.mode);
        self.skips = self.tally.skipped.is_some();
        if self.is_idle() {
            return Ok(());
        }
        let inflight = if of.cell.rate.is_some() { 1 } else { of.cell.concurrency().0 };
        let preparing = self.caller.prepare(&of.operations, inflight);
        if let Err(error) = within(answer_limit(of.cell, inflight), preparing).await {
            self.skips = true;
            self.tally.counts.fail(&error);
        }
        Ok(())
    }

    /// Releases everything that was prepared. A mode whose release takes too long is not used again.
    pub(crate) async fn release(&mut self, cell: Cell) {
        self.given_up |= tokio::time::timeout(answer_limit(cell, 1), self.caller.release()).await.is_err();
    }

    /// Begins a trial, unless the mode is idle. Returns false after a failure; the caller must not end the
    /// trial then.
    async fn begin(&mut self, check: Check) -> bool {
        if self.is_idle() {
            return false;
        }
        let begun = within(ANSWER_LIMIT, self.caller.begin(check)).await;
        if let Err(error) = &begun {
            self.count(true);
            self.tally.counts.fail(error);
        }
        begun.is_ok()
    }

    /// Ends the trial, so that this mode uses no core in the trials of others.
    async fn end(&mut self) {
        match within(ANSWER_LIMIT, self.caller.end()).await {
            Ok(messages) => self.tally.every_byte += messages,
            Err(error) => self.tally.counts.fail(&error),
        }
        self.last = Instant::now();
    }

    /// Makes a trial that does not count. In an open loop one caller makes it, because the bound may be
    /// thousands.
    pub(crate) async fn warm_up(&mut self, of: &MeasuredCell<'_>) {
        let length = (of.plan.duration / 10).min(Duration::from_millis(100));
        let concurrency = if of.cell.rate.is_some() { (1, 1) } else { of.cell.concurrency() };
        if self.begin(Check::Stamps).await {
            self.uncounted_trial(of, concurrency, length).await;
            self.end().await;
        }
        // The warm-up does not count in the sequence of operations.
        self.position = Position::default();
    }

    /// Makes one operation outside the measured time. The receiver checks every byte of it.
    pub(crate) async fn check_every_byte(&mut self, of: &MeasuredCell<'_>, trial: usize) {
        if !self.begin(Check::All).await {
            return;
        }
        let operation = of.operations.take(trial);
        self.tally.every_byte += operation.messages();
        let running = self.caller.run(&operation, Check::All, 1);
        if let Err(error) = within(answer_limit(of.cell, 1), running).await {
            self.given_up |= matches!(error, CallError::NoAnswer(_));
            self.tally.counts.fail(&error);
        }
        self.end().await;
    }

    /// Makes a trial whose calls, wall time, CPU time and context switches count. `control` is a connection of its own.
    pub(crate) async fn timed_trial(
        &mut self,
        of: &MeasuredCell<'_>,
        round: u32,
        control: &mut GrpcCaller,
    ) -> Result<(), Failure> {
        // A trial of its own, because receivers keep a message of a trial until its end. What it checks is not
        // counted, because it depends on the machine whether there is one.
        if self.last.elapsed() > RESTED && self.begin(Check::Stamps).await {
            let checked = self.tally.every_byte;
            self.uncounted_trial(of, (1, 1), Duration::ZERO).await;
            self.end().await;
            self.tally.every_byte = checked;
        }
        if !self.begin(Check::Stamps).await {
            return Ok(());
        }
        if of.cell.load.bytes() <= LEAD_IN {
            self.uncounted_trial(of, (1, 1), Duration::ZERO).await;
        }
        let offer = of.cell.rate.map(|rate| of.offer(rate, round));
        let before = usage(control).await?;
        let start = Instant::now();
        let trial = match &offer {
            Some(offer) => {
                let limit = offer.length * 2 + answer_limit(of.cell, offer.bound);
                open_loop::open_trial(&self.caller, &of.operations, offer, limit).await
            }
            None => self.closed_trial(of, of.cell.concurrency(), of.plan.slice(of.cell)).await,
        };
        let wall = start.elapsed();
        let used = usage(control).await? - before;
        self.end().await;
        self.given_up |= trial.is_stuck;
        self.count(trial.failed());
        self.tally.add(trial, wall, used);
        Ok(())
    }

    /// Makes a trial of which only the errors count.
    async fn uncounted_trial(
        &mut self,
        of: &MeasuredCell<'_>,
        concurrency: (usize, usize),
        length: Duration,
    ) {
        let trial = self.closed_trial(of, concurrency, length).await;
        self.given_up |= trial.is_stuck;
        self.tally.counts.add_errors(trial.counts);
    }

    async fn closed_trial(
        &self,
        of: &MeasuredCell<'_>,
        concurrency: (usize, usize),
        length: Duration,
    ) -> TrialOutcome {
        if self.is_idle() {
            return TrialOutcome::default();
        }
        let callers = std::slice::from_ref(&self.caller);
        closed_trial(callers, (of.cell, &of.operations), &self.position, concurrency, length).await
    }

    /// Counts consecutive trials in which all calls failed, for example after the loss of the device. The
    /// mode is given up after three such trials.
    fn count(&mut self, failed: bool) {
        const TRIALS: u32 = 3;
        self.failed_trials = if failed { self.failed_trials + 1 } else { 0 };
        self.given_up |= self.failed_trials >= TRIALS;
    }
}

/// The counts of operations: how many succeeded, failed, were sent, and got no answer.
#[derive(Clone, Debug, Default)]
pub(crate) struct Counts {
    /// Operations that succeeded, their bytes and their messages.
    pub(crate) ops: u64,
    pub(crate) bytes: u64,
    pub(crate) messages: u64,
    pub(crate) errors: u64,
    pub(crate) first_error: Option<String>,
    /// Errors about wrong content.
    pub(crate) mismatches: u64,
    /// Operations of an open loop that were sent.
    pub(crate) sent: u64,
    /// Operations of an open loop without an answer when the time to send operations was over.
    pub(crate) backlog: u64,
}

impl Counts {
    pub(crate) fn error(&mut self, count: u64, what: String) {
        self.errors += count;
        self.first_error.get_or_insert(what);
    }

    /// Counts an operation that failed.
    pub(crate) fn fail(&mut self, error: &CallError) {
        self.mismatches += u64::from(error.is_mismatch());
        self.error(1, error.to_string());
    }

    /// Adds only the errors of `other`.
    fn add_errors(&mut self, other: Self) {
        self.errors += other.errors;
        self.first_error = self.first_error.take().or(other.first_error);
        self.mismatches += other.mismatches;
    }

    fn add(&mut self, other: Self) {
        self.ops += other.ops;
        self.bytes += other.bytes;
        self.messages += other.messages;
        self.sent += other.sent;
        self.backlog += other.backlog;
        self.add_errors(other);
    }
}

/// The outcome of one trial.
#[derive(Debug, Default)]
pub(crate) struct TrialOutcome {
    pub(crate) counts: Counts,
    /// The latency of each operation that succeeded.
    pub(crate) latencies: Vec<Duration>,
    /// CPU time that the load generator spent waiting until the next operation was due.
    pub(crate) waiting: Duration,
    /// Waiting time of each operation that was given up before it was sent.
    pub(crate) unsent: Vec<Duration>,
    /// Whether operations got no answer.
    is_stuck: bool,
}

impl TrialOutcome {
    pub(crate) fn success(&mut self, latency: Duration, bytes: u64, messages: u64) {
        self.latencies.push(latency);
        self.counts.ops += 1;
        self.counts.bytes += bytes;
        self.counts.messages += messages;
    }

    /// Counts operations that got no answer within `limit`.
    pub(crate) fn stuck(&mut self, missing: u64, limit: Duration) {
        self.is_stuck = true;
        self.counts.error(missing, CallError::NoAnswer(limit).to_string());
    }

    /// Returns whether there were calls and all of them failed.
    fn failed(&self) -> bool {
        self.counts.ops == 0 && self.counts.errors > 0
    }
}

/// The longest latency that is recorded, in nanoseconds. A longer latency counts as this value.
const MAX_LATENCY: u64 = 600_000_000_000;

/// The sum of one mode's trials in one cell.
#[derive(Debug)]
pub(crate) struct Tally {
    pub(crate) counts: Counts,
    latencies: Histogram<u64>,
    /// Operations of an open loop that were given up before they were sent.
    unsent: u64,
    /// Time of all timed trials, and what both processes used in it.
    pub(crate) wall: Duration,
    used: Usage,
    /// The reason why the mode could not take part.
    pub(crate) skipped: Option<String>,
    trials: u64,
    /// Messages whose every byte was checked, and messages whose stamps were.
    pub(crate) every_byte: u64,
    stamps: u64,
}

impl Tally {
    pub(crate) fn new() -> Result<Self, Failure> {
        let latencies = Histogram::new_with_bounds(1, MAX_LATENCY, 3).context("can't make a histogram")?;
        Ok(Self {
            counts: Counts::default(),
            latencies,
            unsent: 0,
            wall: Duration::ZERO,
            used: Usage::default(),
            skipped: None,
            trials: 0,
            every_byte: 0,
            stamps: 0,
        })
    }

    /// Adds a timed trial.
    pub(crate) fn add(&mut self, trial: TrialOutcome, wall: Duration, used: Usage) {
        // Operations that were never sent would have taken longer than they had waited. Figures without them
        // would be too good.
        for latency in trial.latencies.iter().chain(&trial.unsent) {
            self.latencies.saturating_record(u64::try_from(latency.as_nanos()).unwrap_or(MAX_LATENCY));
        }
        self.unsent += trial.unsent.len() as u64;
        self.wall += wall;
        self.used = self.used + Usage { cpu: used.cpu.saturating_sub(trial.waiting), ..used };
        self.trials += 1;
        self.stamps += trial.counts.messages + trial.counts.errors;
        self.counts.add(trial.counts);
    }

    /// Returns the number of checks of content.
    pub(crate) fn checks(&self) -> Checks {
        let Self { every_byte, stamps, counts, .. } = self;
        Checks { every_byte: *every_byte, stamps: *stamps, mismatches: counts.mismatches }
    }

    /// Returns whether the mode fell behind the offered rate. It did if an operation was never sent, if more
    /// than one in twenty (and more than four in each trial) had no answer when the time to send operations
    /// was over, or if the trials took twice as long.
    fn saturated(&self, rate: f64) -> bool {
        const HANDFUL: u64 = 4;
        let Counts { ops, sent, backlog, .. } = self.counts;
        let achieved = ops as f64 / self.wall.as_secs_f64().max(1e-9);
        self.unsent > 0
            || backlog > ((sent + self.unsent) / 20).max(HANDFUL * self.trials)
            || achieved < rate / 2.0
    }

    /// Returns the row of `contender` in `cell`, for payloads that went in `direction`.
    pub(crate) fn row(&self, contender: impl Into<Contender>, cell: Cell, direction: Direction) -> Row {
        let Contender { mode, http2 } = contender.into();
        let per = |total: f64, parts: f64| if parts > 0.0 { total / parts } else { 0.0 };
        let Counts { ops, bytes, errors, ref first_error, .. } = self.counts;
        let micros = |quantile| match ops {
            0 => 0.0,
            _ => self.latencies.value_at_quantile(quantile) as f64 / 1e3,
        };
        let wall = self.wall.as_secs_f64();
        Row {
            mode,
            http2,
            workload: cell.load.name(),
            bytes: cell.load.bytes(),
            inflight: cell.inflight,
            direction,
            rate: cell.rate,
            ops,
            errors,
            unsent: cell.rate.map(|_| self.unsent),
            saturated: cell.rate.map(|rate| self.saturated(rate)),
            p50_us: micros(0.5),
            p99_us: (self.latencies.len() >= 100).then(|| micros(0.99)),
            p999_us: (self.latencies.len() >= 1000).then(|| micros(0.999)),
            ops_per_s: per(ops as f64, wall),
            gbytes_per_s: per(bytes as f64 / 1e9, wall),
            cpu_us_per_op: per(self.used.cpu.as_secs_f64() * 1e6, ops as f64),
            switches_per_op: per(self.used.switches as f64, ops as f64),
            sleeps_per_op: per(self.used.sleeps as f64, ops as f64),
            runs: Runs::default(),
            ratios: Ratios::default(),
            first_error: first_error.clone(),
            skipped: self.skipped.clone(),
            connections: None,
            cell,
        }
    }
}

/// Returns what both processes have used since they started. `control` is a connection of its own.
pub(crate) async fn usage(control: &mut GrpcCaller) -> Result<Usage, Failure> {
    let server = within(ANSWER_LIMIT, control.usage()).await;
    Ok(server.context("can't ask the server process what it has used")? + Usage::of_this_process())
}

/// Returns the seed of a cell. Cells have different seeds, so that remains of an earlier cell never pass a
/// check.
pub(crate) fn seed(cell: Cell) -> u64 {
    let rate = cell.rate.map_or(0, |rate| mix(rate.to_bits()));
    mix(cell.load.bytes() ^ ((cell.inflight as u64) << 40)) ^ rate
}

/// Keeps `concurrency.0` operations of `cell` in flight on each of `connections` until `length` is over, each with
/// `concurrency.1` calls at once. Every caller makes at least one operation. Operations without an answer in time
/// count as errors.
pub(crate) async fn closed_trial(
    connections: &[Caller],
    (cell, operations): (Cell, &Operations),
    position: &Position,
    concurrency: (usize, usize),
    length: Duration,
) -> TrialOutcome {
    let (mut trial, mut missing) = (TrialOutcome::default(), 0);
    let limit = length + answer_limit(cell, concurrency.0 * connections.len());
    let running = run(connections, operations, position, concurrency, length, &mut trial, &mut missing);
    if tokio::time::timeout(limit, running).await.is_err() {
        trial.stuck(missing, limit);
    }
    trial
}

/// Makes the operations of a trial. If this future is dropped, `trial` has the results so far. `missing`
/// counts the callers that have not ended.
async fn run(
    connections: &[Caller],
    operations: &Operations,
    position: &Position,
    (callers, width): (usize, usize),
    length: Duration,
    trial: &mut TrialOutcome,
    missing: &mut u64,
) {
    let end = Instant::now() + length;
    let calls = |caller: &Caller, callers| {
        keep_calling(caller.clone(), operations.clone(), Arc::clone(position), (callers, width), end)
    };
    if let ([caller], 1) = (connections, callers)
        && stays_in_block_on(caller)
    {
        *missing = 1;
        let ended = calls(caller, 1).await;
        *missing = 0;
        return count(ended, trial);
    }
    let mut under_way = JoinSet::new();
    for caller in connections {
        // One task keeps all tensors in flight.
        let (tasks, callers) = if let Caller::Placement(_) = caller { (1, callers) } else { (callers, 1) };
        (0..tasks).for_each(|_| drop(under_way.spawn(calls(caller, callers))));
    }
    *missing = under_way.len() as u64;
    while let Some(ended) = under_way.join_next().await {
        *missing -= 1;
        count(ended.unwrap_or_else(|crash| (Vec::new(), Some(crash.into()))), trial);
    }
}

/// Returns whether a single caller makes its calls in the future that `block_on` was given, and not in a task
/// of its own.
///
/// In a multi-thread runtime that future runs on the main thread, which is no worker. A program whose
/// `#[tokio::main]` function calls, waits for the answer, and calls again makes its calls there. A caller
/// that polls is a task even there, on a worker of its own. In a runtime of one thread all callers are tasks,
/// which makes next to no difference.
fn stays_in_block_on(caller: &Caller) -> bool {
    let polls = matches!(caller, Caller::Placement(caller) if !caller.awaits());
    !polls && Handle::current().runtime_flavor() == RuntimeFlavor::MultiThread
}

fn count((done, error): (Vec<Done>, Option<CallError>), trial: &mut TrialOutcome) {
    for (latency, bytes, messages) in done {
        trial.success(latency, bytes, messages);
    }
    if let Some(error) = error {
        trial.counts.fail(&error);
    }
}

/// Makes operations one after the other until `end`, at least one; tensors are sent up to `callers` at once. An
/// error ends the loop, so that a broken connection does not cause a busy loop.
async fn keep_calling(
    mut caller: Caller,
    operations: Operations,
    position: Position,
    (callers, width): (usize, usize),
    end: Instant,
) -> (Vec<Done>, Option<CallError>) {
    if let Caller::Placement(caller) = caller {
        return caller.keep_sending(operations, position, callers, end).await;
    }
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

#[cfg(test)]
mod participant_tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

    use super::*;
    use crate::compare::modes::grpc::client::CallSettings;
    use crate::compare::modes::mode::Mode;
    use crate::compare::options::CompareOptions;
    use crate::workload::Workload;

    fn participant() -> Participant {
        let nowhere = tonic::transport::Endpoint::from_static("http://127.0.0.1:1").connect_lazy();
        let caller = GrpcCaller::new(nowhere, Mode::GrpcTcp, CallSettings::default());
        Participant::new(Mode::GrpcTcp.into(), Caller::Grpc(caller)).unwrap()
    }

    #[tokio::test]
    async fn a_mode_skips_only_the_cells_that_it_can_t_carry() {
        let plan = Plan::new(&CompareOptions::of(&["--modes", "memcpy"])).unwrap();
        let mut participant = participant();
        for (bytes, skipped) in [(64, false), (3 << 30, true), (2047 << 20, false)] {
            let cell = Cell::closed(bytes, 1);
            let operations = Operations::new(Workload::Size(64), 1, false).unwrap();
            participant
                .prepare(&MeasuredCell { plan: &plan, cell, operations, pinned: false })
                .await
                .unwrap();
            let row = participant.tally.row(Mode::GrpcTcp, cell, Direction::Up);
            assert_eq!((row.skipped.is_some(), participant.is_idle(), row.errors), (skipped, skipped, 0));
        }
    }

    #[tokio::test]
    async fn a_mode_whose_calls_all_fail_is_given_up() {
        let mut participant = participant();
        let trial = |ops, errors| TrialOutcome {
            counts: Counts { ops, errors, ..Counts::default() },
            ..TrialOutcome::default()
        };
        let (failed, mixed, empty) = (trial(0, 1), trial(1, 5), trial(0, 0));
        for trial in [&failed, &failed, &mixed, &failed, &failed, &empty, &failed, &failed] {
            participant.count(trial.failed());
            assert!(!participant.given_up);
        }
        participant.count(failed.failed());
        assert!(participant.given_up);
    }
}

#[cfg(test)]
mod tally_tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

    use super::*;
    use crate::compare::modes::mode::Mode;
    use crate::workload::Workload;

    fn millis(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    #[test]
    fn a_row_counts_what_was_tallied() {
        let mut tally = Tally::new().unwrap();
        let mut trial = TrialOutcome::default();
        for micros in [1, 2, 3, 50] {
            trial.success(Duration::from_micros(micros), 1000, 1);
        }
        trial.waiting = Duration::from_micros(10);
        let cpu = Duration::from_micros(50);
        tally.add(trial, millis(2), Usage { cpu, switches: 10, sleeps: 6 });
        tally.counts.error(2, "first".to_owned());
        tally.counts.error(1, "second".to_owned());
        let row = tally.row(Mode::GrpcUds, Cell::closed(1000, 2), Direction::Up);
        assert_eq!((row.ops, row.errors, row.first_error.as_deref()), (4, 3, Some("first")));
        assert!((row.p50_us - 2.0).abs() < 0.01 && row.p99_us.is_none());
        assert!((row.ops_per_s - 2000.0).abs() < 1e-6 && (row.gbytes_per_s - 0.002).abs() < 1e-9);
        assert!((row.cpu_us_per_op - 10.0).abs() < 1e-9);
        assert_eq!((row.switches_per_op, row.sleeps_per_op), (2.5, 1.5));
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
            let (mut tally, mut trial) = (Tally::new().unwrap(), TrialOutcome::default());
            (1..=operations).for_each(|micros| trial.success(Duration::from_micros(micros), 64, 1));
            tally.add(trial, millis(1), Usage::default());
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
            let mut trial = TrialOutcome::default();
            (trial.counts.sent, trial.counts.backlog) = (1, 1);
            trial.success(wall, 64, 1);
            tally.add(trial, wall, Usage::default());
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
            let sent = 1000 - unsent.len() as u64;
            let mut trial = TrialOutcome { unsent, ..TrialOutcome::default() };
            (trial.counts.sent, trial.counts.backlog) = (sent, backlog);
            for _ in 0..900 {
                trial.success(millis(1), 64, 1);
            }
            tally.add(trial, millis(1000), Usage::default());
            tally.row(Mode::GrpcTcp, cell, Direction::Up)
        };
        assert_eq!(row(50, Vec::new()).saturated, Some(false));
        assert_eq!(row(51, Vec::new()).saturated, Some(true));
        let behind = row(10, vec![millis(500); 100]);
        assert_eq!((behind.saturated, behind.unsent, behind.ops), (Some(true), Some(100), 900));
        assert!(behind.p99_us > Some(499_000.0) && (behind.ops_per_s - 900.0).abs() < 1e-6);
    }
}
