//! Operations that follow one another, with several on their way.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::geometry::MAX_DEPTH;
use super::record::Record;
use super::sender::TensorSender;
use super::yield_timer::YieldTimer;
use crate::compare::modes::call_error::CallError;
use crate::compare::operations::sequence::{Done, Position};
use crate::compare::operations::{Operation, Operations};

/// Operations that follow one another, several on their way.
pub(super) struct OperationStream {
    operations: Operations,
    position: Position,
    end: Instant,
    reduces: bool,
    /// When those began whose operation is to be started: at once, or when the one before had ended.
    waiting: VecDeque<Instant>,
    /// Those on their way, which end in this order: when they began, bytes and messages.
    under_way: VecDeque<(Instant, u64, u64)>,
    pub(super) done: Vec<Done>,
}

impl OperationStream {
    pub(super) fn new(
        operations: Operations,
        position: Position,
        callers: usize,
        end: Instant,
        reduces: bool,
    ) -> Self {
        let waiting = std::iter::repeat_n(Instant::now(), callers).collect();
        let (under_way, done) = (VecDeque::with_capacity(callers), Vec::with_capacity(1 << 12));
        Self { operations, position, end, reduces, waiting, under_way, done }
    }

    pub(super) async fn run(
        &mut self,
        sender: &mut TensorSender,
        record: &mut Record,
    ) -> Result<(), CallError> {
        let mut yield_timer = YieldTimer::new();
        while !self.waiting.is_empty() || !self.under_way.is_empty() {
            while !self.waiting.is_empty() && sender.is_ready()? {
                self.start(sender, record)?;
            }
            let pending = sender.pending()? as usize;
            if pending < self.under_way.len() {
                let now = Instant::now();
                self.finish(pending, now);
                yield_timer.found(now);
            } else {
                yield_timer.missed();
            }
            if yield_timer.is_due() {
                yield_timer.yield_now().await;
            }
        }
        Ok(())
    }

    fn start(&mut self, sender: &mut TensorSender, record: &mut Record) -> Result<(), CallError> {
        let operation = self.take();
        sender.start(&operation)?;
        self.started(sender, record, &operation);
        Ok(())
    }

    /// The operation that is to be started next.
    fn take(&self) -> Operation {
        self.operations.take(self.position.fetch_add(1, Ordering::Relaxed))
    }

    /// `operation` was started.
    fn started(&mut self, sender: &TensorSender, record: &mut Record, operation: &Operation) {
        record.add(sender.identity(operation), operation.reduced().filter(|_| self.reduces));
        if let Some(begun) = self.waiting.pop_front() {
            self.under_way.push_back((begun, operation.bytes(), operation.messages()));
        }
    }

    /// All but the last `pending` have ended.
    fn finish(&mut self, pending: usize, now: Instant) {
        let ended = self.under_way.len() - pending;
        for (begun, bytes, messages) in self.under_way.drain(..ended) {
            self.done.push((now - begun, bytes, messages));
            // Its caller makes another.
            if now < self.end {
                self.waiting.push_back(now);
            }
        }
    }

    /// What [`run`](Self::run) does, without polling. With one operation at a time it is sent, and its release waited for. With
    /// several, what waits for a buffer waits for the release of the oldest.
    pub(super) async fn run_awaiting(
        &mut self,
        sender: &mut TensorSender,
        record: &mut Record,
        callers: usize,
    ) -> Result<(), CallError> {
        let depth = callers.clamp(1, MAX_DEPTH);
        loop {
            while !self.waiting.is_empty() {
                if self.under_way.len() >= depth {
                    self.wait(sender).await?;
                }
                let operation = self.take();
                sender.send(&operation).await?;
                self.started(sender, record, &operation);
                self.look(sender)?;
            }
            if self.under_way.is_empty() {
                return Ok(());
            }
            self.wait(sender).await?;
        }
    }

    /// Waits until an operation has ended, the oldest if the slot is full, and counts all that have.
    async fn wait(&mut self, sender: &mut TensorSender) -> Result<(), CallError> {
        let under_way = self.under_way.len();
        self.look(sender)?;
        if self.under_way.len() < under_way {
            return Ok(());
        }
        if under_way > 1 && !sender.is_ready()? {
            sender.ready().await?;
        } else {
            sender.flush().await?;
        }
        self.look(sender)
    }

    fn look(&mut self, sender: &mut TensorSender) -> Result<(), CallError> {
        let pending = sender.pending()? as usize;
        if pending < self.under_way.len() {
            self.finish(pending, Instant::now());
        }
        Ok(())
    }
}
