//! A mode that takes part in a run: its connection and its state.

use std::time::Duration;

use super::outcome::TurnOutcome;
use super::tally::Tally;
use crate::compare::modes::call_error::CallError;
use crate::compare::modes::caller::Caller;
use crate::compare::modes::mode::Mode;
use crate::compare::operations::Operations;
use crate::compare::operations::sequence::Position;
use crate::compare::plan::cell::Cell;

/// A turn that takes longer than this plus the time of its bytes at [`SLOWEST`] (bytes a second) is stuck.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);
const SLOWEST: f64 = 20e6;

/// A mode with its connection.
#[derive(Debug)]
pub(crate) struct Participant {
    pub(crate) mode: Mode,
    pub(crate) caller: Caller,
    /// Number of operations begun in this cell after the warm-up.
    pub(super) position: Position,
    /// Whether a call got no answer, or all calls have failed for a while. The connection is not used again.
    pub(super) given_up: bool,
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
    pub(super) fn is_idle(&self) -> bool {
        self.given_up || self.skips
    }

    /// Prepares for a cell's operations. A mode that can't prepare skips the cell, and its row has the reason.
    pub(super) async fn prepare(&mut self, operations: &Operations, cell: Cell, tally: &mut Tally) {
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
    pub(super) async fn release(&mut self, cell: Cell) {
        self.given_up |= tokio::time::timeout(patience(cell, 1), self.caller.release()).await.is_err();
    }

    /// Counts consecutive turns in which all calls failed, for example after the loss of the device. The mode is given
    /// up after three such turns.
    pub(super) fn count(&mut self, turn: &TurnOutcome) {
        const TURNS: u32 = 3;
        self.failed_turns = if turn.failed() { self.failed_turns + 1 } else { 0 };
        self.given_up |= self.failed_turns >= TURNS;
    }
}

/// Returns the time to wait for operations before they count as lost.
pub(crate) fn patience(cell: Cell, operations: usize) -> Duration {
    PATIENCE + Duration::from_secs_f64(cell.load.bytes() as f64 * operations as f64 / SLOWEST)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

    use super::*;
    use crate::compare::modes::grpc::client::GrpcCaller;
    use crate::compare::plan::cell::Load;
    use crate::compare::plan::direction::Direction;
    use crate::measure::transport::encode::Encode;

    fn participant() -> Participant {
        let nowhere = tonic::transport::Endpoint::from_static("http://127.0.0.1:1").connect_lazy();
        Participant::new(Mode::GrpcTcp, Caller::Grpc(GrpcCaller::new(nowhere, Mode::GrpcTcp, Encode::Copy)))
    }

    #[tokio::test]
    async fn a_mode_skips_only_the_cells_that_it_can_t_carry() {
        let operations = Operations::new(Load::Size(64), 1, false).unwrap();
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
