//! `--connections`: the cost of calls as connections grow, and what each connection occupies.
//!
//! ```text
//!  footprint  memory and descriptors of both processes
//!  crowd      the connections of one mode, and turns on them
//!  row, show  figures, table, page
//! ```
//!
//! One mode at a time has connections, because others would occupy memory too. Each number of connections has two turns:
//! one connection is busy and the others are idle, then all of them are busy.

mod crowd;
pub(crate) mod footprint;
pub(crate) mod row;
pub(crate) mod show;

use std::time::Duration;

use indicatif::ProgressBar;

use self::crowd::Crowd;
use self::footprint::Footprint;
use self::row::ConnectionRow;
use crate::compare::modes::call_error::CallError;
use crate::compare::modes::grpc::client::GrpcCaller;
use crate::compare::modes::mode::Mode;
use crate::compare::operations::Operations;
use crate::compare::options::CompareOptions;
use crate::compare::plan::Plan;
use crate::compare::plan::cell::Cell;
use crate::compare::results::row::{Checks, Row};
use crate::compare::server::start_report::Addresses;
use crate::compare::turns::meter::{cpu_time, seed};
use crate::compare::turns::tally::Tally;
use crate::measure::transport::rdma::{Rdma, RdmaConnection};
use tonic_rdma_commands::Failure;

/// Time after the last call until memory is measured, so that both ends have handled the last messages.
const SETTLE: Duration = Duration::from_millis(50);

/// Measures mode after mode.
#[derive(Debug)]
pub(crate) struct ConnectionMeter<'a> {
    pub(crate) plan: &'a Plan,
    pub(crate) options: &'a CompareOptions,
    pub(crate) rdma: Option<&'a Rdma>,
    pub(crate) addresses: &'a Addresses,
    /// The server process.
    pub(crate) server: u32,
    /// A separate connection for requests of the server's CPU time.
    pub(crate) control: GrpcCaller,
    pub(crate) progress: ProgressBar,
    pub(crate) checks: Checks,
    /// The RDMA connection of the first mode that has one.
    pub(crate) verdict: Option<RdmaConnection>,
}

impl ConnectionMeter<'_> {
    /// Measures all numbers of connections in all modes and cells. Rows to compare follow one another.
    pub(crate) async fn run(&mut self) -> Result<Vec<ConnectionRow>, Failure> {
        let plan = self.plan;
        let mut rows = Vec::new();
        for cell in &plan.cells {
            let mut of_cell = Vec::new();
            for mode in &plan.modes {
                of_cell.extend(self.mode(*mode, *cell).await?);
            }
            // A stable sort, so that modes stay in the order of the table.
            of_cell.sort_by_key(|row: &ConnectionRow| (row.connections, row.busy));
            rows.extend(of_cell);
        }
        Ok(rows)
    }

    /// Measures all numbers of connections in one mode. Errors end the mode, and its last row has them.
    async fn mode(&mut self, mode: Mode, cell: Cell) -> Result<Vec<ConnectionRow>, Failure> {
        let consumed = mode.reduces(self.options.consume);
        let operations = Operations::new(cell.load, seed(cell), consumed)?;
        // The connections of the last mode end.
        tokio::time::sleep(SETTLE).await;
        let empty = Footprint::measure(self.server)?;
        let mut crowd = Crowd::new(mode, cell, &operations);
        let mut rows = Vec::new();
        // What both processes take after the calls of one connection: the others are compared with it.
        let mut first = None;
        for count in self.plan.connections.iter().copied() {
            self.progress.set_message(format!("{count} connections  {mode}"));
            let mut tally = Tally::new()?;
            if let Err(error) = self.grow(&mut crowd, count).await {
                self.checks.mismatches += u64::from(error.is_mismatch());
                let reached = crowd.len();
                tally.error(1, format!("connection {} of {count}: {error}", reached + 1));
                let row = tally.row(mode, cell, self.plan.direction);
                rows.push(ConnectionRow::new(count, count, None, row));
                return Ok(rows);
            }
            if let Some(first) = first {
                tokio::time::sleep(SETTLE).await;
                let each = Footprint::measure(self.server)?.each(first, count - 1);
                let row = self.turn(&crowd, 1).await?;
                rows.push(ConnectionRow::new(count, 1, Some(each), row));
            }
            let row = self.turn(&crowd, count).await?;
            tokio::time::sleep(SETTLE).await;
            let now = Footprint::measure(self.server)?;
            let each = match first {
                Some(first) => now.each(first, count - 1),
                None => now.each(empty, count),
            };
            first = first.or(Some(now));
            let failed = row.errors > 0;
            rows.push(ConnectionRow::new(count, count, Some(each), row));
            if failed {
                return Ok(rows);
            }
        }
        Ok(rows)
    }

    /// Connects until there are `count` connections. Each makes one call, and its receiver checks every byte.
    async fn grow(&mut self, crowd: &mut Crowd<'_>, count: usize) -> Result<(), CallError> {
        while crowd.len() < count {
            let verdict = crowd.connect(self.addresses, self.options, self.rdma).await?;
            self.verdict = self.verdict.take().or(verdict);
            self.checks.every_byte += 1;
        }
        Ok(())
    }

    /// Makes a turn on the first `busy` connections, and returns its figures.
    async fn turn(&mut self, crowd: &Crowd<'_>, busy: usize) -> Result<Row, Failure> {
        let mut tally = Tally::new()?;
        crowd.warm_up(busy, self.plan.duration / 10).await;
        let cpu = cpu_time(&mut self.control).await?;
        let (turn, wall) = crowd.turn(busy, self.plan.duration).await;
        let cpu = cpu_time(&mut self.control).await?.saturating_sub(cpu);
        self.checks.stamps += turn.messages + turn.errors;
        self.checks.mismatches += turn.mismatches;
        let failed = turn.errors > 0;
        tally.add(turn, wall, cpu);
        if !failed {
            match crowd.end().await {
                Ok(messages) => self.checks.every_byte += messages,
                Err(error) => {
                    self.checks.mismatches += u64::from(error.is_mismatch());
                    tally.error(1, error.to_string());
                }
            }
        }
        self.progress.inc(1);
        Ok(tally.row(crowd.mode(), crowd.cell(), self.plan.direction))
    }
}
