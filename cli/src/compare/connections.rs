//! `--connections`: the cost of calls as connections grow, and what each connection occupies.
//!
//! One mode at a time has connections, because others would occupy memory too. Each number of connections has
//! two trials: one connection is busy and the others are idle, then all of them are busy. Before the last two,
//! all are idle for a while.

use std::fs;
use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use tonic_rdma_commands::{Context as _, Failure};
use tonic_rdma_proto::transfer::Check;

use crate::compare::modes::Caller;
use crate::compare::modes::call_error::CallError;
use crate::compare::modes::grpc::client::GrpcCaller;
use crate::compare::modes::mode::Contender;
use crate::compare::operations::{Operations, Position};
use crate::compare::options::CompareOptions;
use crate::compare::plan::{Cell, Plan};
use crate::compare::results::{Checks, Connections, Idle, Row};
use crate::compare::server::Addresses;
use crate::compare::trials::{
    ANSWER_LIMIT, Tally, TrialOutcome, answer_limit, closed_trial, seed, usage, within,
};
use crate::measure::machine::kibibytes;
use crate::measure::transport::{Rdma, RdmaConnection};

/// Time after the last call until memory is measured, so that both ends have handled the last messages.
const SETTLE: Duration = Duration::from_millis(50);

/// Time after the last call until the software device has ended its checks of what was sent.
const QUIET: Duration = Duration::from_millis(500);
/// The least time for which connections are left idle.
const LEAST_IDLE: Duration = Duration::from_secs(1);

/// Measures mode after mode.
#[derive(Debug)]
pub(crate) struct ConnectionMeter<'a> {
    pub(crate) plan: &'a Plan,
    pub(crate) options: &'a CompareOptions,
    pub(crate) rdma: Option<&'a Rdma>,
    pub(crate) addresses: &'a Addresses,
    /// The server process.
    pub(crate) server: u32,
    /// A separate connection for requests of what the server has used.
    pub(crate) control: GrpcCaller,
    pub(crate) progress: ProgressBar,
    pub(crate) checks: Checks,
    /// The RDMA connection of the first mode that has one.
    pub(crate) verdict: Option<RdmaConnection>,
}

impl ConnectionMeter<'_> {
    /// Measures all numbers of connections in all modes and cells. Rows that are compared follow one
    /// another.
    pub(crate) async fn run(&mut self) -> Result<Vec<Row>, Failure> {
        let plan = self.plan;
        let mut rows = Vec::new();
        for cell in &plan.cells {
            let mut of_cell = Vec::new();
            for contender in &plan.contenders {
                of_cell.extend(self.mode(*contender, *cell).await?);
            }
            // A stable sort, so that modes stay in the order of the table.
            of_cell.sort_by_key(|row: &Row| row.connections.map(|of| (of.connections, of.busy)));
            rows.extend(of_cell);
        }
        Ok(rows)
    }

    /// Measures all numbers of connections in one mode. Errors end the mode, and its last row has them.
    async fn mode(&mut self, contender: Contender, cell: Cell) -> Result<Vec<Row>, Failure> {
        let consumed = contender.mode.reduces(self.options.consume);
        let operations = Operations::new(cell.load, seed(cell), consumed)?;
        // The connections of the last mode end.
        tokio::time::sleep(SETTLE).await;
        let empty = Footprint::measure(self.server)?;
        let mut opened = ModeConnections { contender, cell, operations: &operations, callers: Vec::new() };
        let mut rows = Vec::new();
        // What both processes occupy with one connection. The figures of more connections leave it out.
        let mut first = None;
        for count in self.plan.connections.iter().copied() {
            self.progress.set_message(format!("{count} connections  {contender}"));
            let mut tally = Tally::new()?;
            if let Err(error) = self.grow(&mut opened, count).await {
                self.checks.mismatches += u64::from(error.is_mismatch());
                let reached = opened.callers.len();
                tally.counts.error(1, format!("connection {} of {count}: {error}", reached + 1));
                let row = tally.row(contender, cell, self.plan.direction);
                rows.push(with_connections(row, count, count, None, None));
                return Ok(rows);
            }
            if let Some(first) = first {
                tokio::time::sleep(SETTLE).await;
                let each = Footprint::measure(self.server)?.each(first, count - 1);
                let is_last = self.plan.connections.last() == Some(&count);
                let idle = if is_last { Some(self.idle().await?) } else { None };
                let row = self.trial(&opened, 1).await?;
                rows.push(with_connections(row, count, 1, Some(each), idle));
            }
            let row = self.trial(&opened, count).await?;
            tokio::time::sleep(SETTLE).await;
            let now = Footprint::measure(self.server)?;
            let each = match first {
                Some(first) => now.each(first, count - 1),
                None => now.each(empty, count),
            };
            first = first.or(Some(now));
            let failed = row.errors > 0;
            rows.push(with_connections(row, count, count, Some(each), None));
            if failed {
                return Ok(rows);
            }
        }
        Ok(rows)
    }

    /// Connects until there are `count` connections. Each makes one call, and its receiver checks every byte.
    async fn grow(&mut self, opened: &mut ModeConnections<'_>, count: usize) -> Result<(), CallError> {
        while opened.callers.len() < count {
            let verdict = opened.connect(self.addresses, self.options, self.rdma).await?;
            self.verdict = self.verdict.take().or(verdict);
            self.checks.every_byte += 1;
        }
        Ok(())
    }

    /// Leaves all connections idle. Returns what both processes use in a second.
    async fn idle(&mut self) -> Result<Idle, Failure> {
        tokio::time::sleep(QUIET).await;
        let (start, before) = (Instant::now(), usage(&mut self.control).await?);
        tokio::time::sleep(self.plan.duration.max(LEAST_IDLE)).await;
        let used = usage(&mut self.control).await? - before;
        let seconds = start.elapsed().as_secs_f64();
        Ok(Idle {
            idle_cpu_percent: 100.0 * used.cpu.as_secs_f64() / seconds,
            idle_sleeps_per_s: used.sleeps as f64 / seconds,
        })
    }

    /// Makes a trial on the first `busy` connections, and returns its figures.
    async fn trial(&mut self, opened: &ModeConnections<'_>, busy: usize) -> Result<Row, Failure> {
        let mut tally = Tally::new()?;
        // The calls of the warm-up do not count. The trial afterwards shows any error.
        opened.trial(busy, self.plan.duration / 10).await;
        let before = usage(&mut self.control).await?;
        let (trial, wall) = opened.trial(busy, self.plan.duration).await;
        let used = usage(&mut self.control).await? - before;
        let failed = trial.counts.errors > 0;
        tally.add(trial, wall, used);
        if !failed {
            match opened.end().await {
                Ok(messages) => tally.every_byte += messages,
                Err(error) => tally.counts.fail(&error),
            }
        }
        self.checks.add(tally.checks());
        self.progress.inc(1);
        Ok(tally.row(opened.contender, opened.cell, self.plan.direction))
    }
}

/// Returns `row`, measured with `busy` of `connections` connections, each of which takes `each`. All of them
/// together use `idle` while none is busy.
fn with_connections(
    row: Row,
    connections: usize,
    busy: usize,
    each: Option<Footprint>,
    idle: Option<Idle>,
) -> Row {
    let memory_bytes_each = each.map(|each| each.memory);
    let descriptors_each = each.map(|each| each.descriptors);
    let of = Connections { connections, busy, memory_bytes_each, descriptors_each, idle };
    Row { connections: Some(of), ..row }
}

/// The connections of one mode in one cell.
#[derive(Debug)]
struct ModeConnections<'a> {
    /// A gRPC mode.
    contender: Contender,
    cell: Cell,
    operations: &'a Operations,
    callers: Vec<GrpcCaller>,
}

impl ModeConnections<'_> {
    /// Adds a connection, and makes a call on it. The receiver checks every byte.
    async fn connect(
        &mut self,
        addresses: &Addresses,
        options: &CompareOptions,
        rdma: Option<&Rdma>,
    ) -> Result<Option<RdmaConnection>, CallError> {
        let connecting = GrpcCaller::connect(self.contender, addresses, options, rdma);
        let (mut caller, verdict) = within(ANSWER_LIMIT, connecting).await?;
        match self.callers.first() {
            Some(first) => caller.prepare_like(first),
            None => caller.prepare(self.operations)?,
        }
        let operation = self.operations.take(self.callers.len());
        within(answer_limit(self.cell, 1), caller.run(&operation, Check::All, 1)).await?;
        self.callers.push(caller);
        Ok(verdict)
    }

    /// Keeps the cell's number of calls in flight on each of the first `busy` connections until `length` is
    /// over. Returns the outcome, and the time that it took.
    async fn trial(&self, busy: usize, length: Duration) -> (TrialOutcome, Duration) {
        let callers: Vec<Caller> = self.callers[..busy].iter().cloned().map(Caller::Grpc).collect();
        let (start, position) = (Instant::now(), Position::default());
        let of = (self.cell, self.operations);
        let trial = closed_trial(&callers, of, &position, self.cell.concurrency(), length).await;
        (trial, start.elapsed())
    }

    /// Ends a trial on all connections. Returns the number of messages whose every byte was checked now.
    async fn end(&self) -> Result<u64, CallError> {
        let mut checked = 0;
        for caller in &self.callers {
            checked += within(ANSWER_LIMIT, caller.clone().end()).await?;
        }
        Ok(checked)
    }
}

/// Memory and descriptors of both processes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Footprint {
    /// Resident memory. A page that both processes map counts once.
    memory: u64,
    descriptors: u64,
}

impl Footprint {
    /// Measures this process and the process `server`, which must be this user's.
    fn measure(server: u32) -> Result<Self, Failure> {
        let server = server.to_string();
        let mut sum = Self::default();
        for process in ["self", server.as_str()] {
            sum.memory += memory(process)?;
            sum.descriptors += descriptors(process)?;
        }
        Ok(sum)
    }

    /// Returns what each of `connections` connections takes if they explain the growth since `before`.
    fn each(self, before: Self, connections: usize) -> Self {
        let each = |now: u64, before: u64| now.saturating_sub(before) / connections.max(1) as u64;
        Self {
            memory: each(self.memory, before.memory),
            descriptors: each(self.descriptors, before.descriptors),
        }
    }
}

/// Returns the proportional set size of a process in bytes: the kernel divides a shared page by the number of
/// processes that map it.
fn memory(process: &str) -> Result<u64, Failure> {
    let path = format!("/proc/{process}/smaps_rollup");
    let text = fs::read_to_string(&path).context(format!("can't read {path}"))?;
    kibibytes(&text, "Pss:").ok_or_else(|| Failure::run(format!("{path} has no line Pss")))
}

fn descriptors(process: &str) -> Result<u64, Failure> {
    let path = format!("/proc/{process}/fd");
    let open = fs::read_dir(&path).context(format!("can't read {path}"))?;
    Ok(open.count() as u64)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    #[test]
    fn memory_that_was_written_is_found() {
        let this = std::process::id();
        let before = Footprint::measure(this).unwrap();
        let written = vec![1_u8; 64 << 20];
        let after = Footprint::measure(this).unwrap();
        // Both processes are this one.
        let each = after.each(before, 2);
        assert!(each.memory > 48 << 20 && each.memory < 1 << 30, "{each:?} for {}", written.len());
        assert!(after.descriptors >= 2 * 3);
    }

    #[test]
    fn a_process_that_is_not_there_is_named() {
        let error = Footprint::measure(u32::MAX).unwrap_err().to_string();
        assert!(error.contains("/proc/4294967295/smaps_rollup"), "{error}");
    }

    #[test]
    fn a_process_that_shrank_takes_nothing() {
        let before = Footprint { memory: 10, descriptors: 10 };
        assert_eq!(
            Footprint { memory: 5, descriptors: 16 }.each(before, 3),
            Footprint { memory: 0, descriptors: 2 }
        );
    }
}
