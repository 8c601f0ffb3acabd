//! The connections of one mode, and turns on some of them.

use std::time::{Duration, Instant};

use tokio::task::JoinSet;
use tonic_rdma_proto::transfer::Check;

use crate::compare::modes::call_error::CallError;
use crate::compare::modes::caller::Caller;
use crate::compare::modes::grpc::client::GrpcCaller;
use crate::compare::modes::grpc::connect;
use crate::compare::modes::mode::Mode;
use crate::compare::operations::Operations;
use crate::compare::operations::sequence::Position;
use crate::compare::options::CompareOptions;
use crate::compare::plan::cell::Cell;
use crate::compare::server::start_report::Addresses;
use crate::compare::turns::closed_loop;
use crate::compare::turns::outcome::TurnOutcome;
use crate::compare::turns::participant::{PATIENCE, patience};
use crate::measure::transport::rdma::{Rdma, RdmaConnection};

/// The connections of one mode in one cell.
#[derive(Debug)]
pub(super) struct Crowd<'a> {
    mode: Mode,
    cell: Cell,
    operations: &'a Operations,
    callers: Vec<GrpcCaller>,
}

impl<'a> Crowd<'a> {
    /// Makes a crowd without connections. `mode` must be a gRPC mode.
    pub(super) fn new(mode: Mode, cell: Cell, operations: &'a Operations) -> Self {
        Self { mode, cell, operations, callers: Vec::new() }
    }

    pub(super) fn mode(&self) -> Mode {
        self.mode
    }

    pub(super) fn cell(&self) -> Cell {
        self.cell
    }

    /// Returns the number of connections.
    pub(super) fn len(&self) -> usize {
        self.callers.len()
    }

    /// Adds a connection, and makes a call on it. The receiver checks every byte.
    pub(super) async fn connect(
        &mut self,
        addresses: &Addresses,
        options: &CompareOptions,
        rdma: Option<&Rdma>,
    ) -> Result<Option<RdmaConnection>, CallError> {
        let connecting = connect::connect(self.mode, addresses, options.http2, rdma);
        let (channel, verdict) = answered(PATIENCE, connecting).await??;
        let caller = GrpcCaller::new(channel, self.mode, options.encode);
        let mut caller = caller.reducing(self.mode.reduces(options.consume)).towards(options.direction);
        match self.callers.first() {
            Some(first) => caller.prepare_like(first),
            None => caller.prepare(self.operations)?,
        }
        let operation = self.operations.take(self.callers.len());
        answered(patience(self.cell, 1), caller.run(&operation, Check::All, 1)).await??;
        self.callers.push(caller);
        Ok(verdict)
    }

    /// Makes calls for `length` that do not count. The turn afterwards shows any error.
    pub(super) async fn warm_up(&self, busy: usize, length: Duration) {
        self.turn(busy, length).await;
    }

    /// Keeps the cell's number of calls in flight on each of the first `busy` connections until `length` is over.
    /// Returns the outcome, and the time that it took.
    pub(super) async fn turn(&self, busy: usize, length: Duration) -> (TurnOutcome, Duration) {
        let position = Position::default();
        let concurrency = self.cell.concurrency();
        let start = Instant::now();
        let mut all = TurnOutcome::default();
        let patience = length + patience(self.cell, concurrency.0 * busy);
        if let [caller] = &self.callers[..busy] {
            // A single caller may stay in the future that `block_on` was given.
            let caller = Caller::Grpc(caller.clone());
            all = connection_turn(caller, self.operations, &position, concurrency, (length, patience)).await;
            return (all, start.elapsed());
        }
        let mut turns = JoinSet::new();
        for caller in &self.callers[..busy] {
            let (caller, position) = (Caller::Grpc(caller.clone()), position.clone());
            let operations = self.operations.clone();
            turns.spawn(async move {
                connection_turn(caller, &operations, &position, concurrency, (length, patience)).await
            });
        }
        while let Some(ended) = turns.join_next().await {
            match ended {
                Ok(turn) => all.merge(turn),
                Err(crash) => all.error(1, crash.to_string()),
            }
        }
        (all, start.elapsed())
    }

    /// Ends a turn on all connections. Returns the number of messages whose every byte was checked now.
    pub(super) async fn end(&self) -> Result<u64, CallError> {
        let mut checked = 0;
        for caller in &self.callers {
            checked += answered(PATIENCE, caller.clone().end()).await??;
        }
        Ok(checked)
    }
}

/// Makes the calls of one connection. Calls without an answer after `patience` count as errors.
async fn connection_turn(
    caller: Caller,
    operations: &Operations,
    position: &Position,
    concurrency: (usize, usize),
    (length, patience): (Duration, Duration),
) -> TurnOutcome {
    let (mut turn, mut missing) = (TurnOutcome::default(), 0);
    let run = closed_loop::run(&caller, operations, position, concurrency, length, &mut turn, &mut missing);
    if tokio::time::timeout(patience, run).await.is_err() {
        turn.error(missing, CallError::NoAnswer(patience).to_string());
    }
    turn
}

/// Returns the result of `work` if it comes within `patience`.
async fn answered<T>(patience: Duration, work: impl Future<Output = T>) -> Result<T, CallError> {
    tokio::time::timeout(patience, work).await.map_err(|_| CallError::NoAnswer(patience))
}
