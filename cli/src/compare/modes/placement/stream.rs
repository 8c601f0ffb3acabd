//! A stream of operations, several in flight at once.

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

/// A stream of operations, several in flight at once.
pub(super) struct OperationStream {
    operations: Operations,
    position: Position,
    end: Instant,
    reduces: bool,
    /// Start times of the operations that wait to be sent: the start of the stream, or the end of the caller's last
    /// operation.
    waiting: VecDeque<Instant>,
    /// Operations in flight, in the order in which they end: start time, bytes and messages.
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

    /// Returns the operation to start next.
    fn take(&self) -> Operation {
        self.operations.take(self.position.fetch_add(1, Ordering::Relaxed))
    }

    /// Notes that `operation` was started.
    fn started(&mut self, sender: &TensorSender, record: &mut Record, operation: &Operation) {
        record.add(sender.identity(operation), operation.reduced().filter(|_| self.reduces));
        if let Some(begun) = self.waiting.pop_front() {
            self.under_way.push_back((begun, operation.bytes(), operation.messages()));
        }
    }

    /// Notes that all but the last `pending` operations have ended.
    fn finish(&mut self, pending: usize, now: Instant) {
        let ended = self.under_way.len() - pending;
        for (begun, bytes, messages) in self.under_way.drain(..ended) {
            self.done.push((now - begun, bytes, messages));
            // The caller of the operation begins its next one.
            if now < self.end {
                self.waiting.push_back(now);
            }
        }
    }

    /// Sends like [`run`](Self::run), but without polling. With one operation at a time, the stream waits for the
    /// release of each operation. With several, an operation that finds no free buffer waits for the release of the
    /// oldest one.
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
                self.count_ended(sender)?;
            }
            if self.under_way.is_empty() {
                return Ok(());
            }
            self.wait(sender).await?;
        }
    }

    /// Waits until an operation has ended (the oldest operation if the slot is full). Counts all operations that have
    /// ended.
    async fn wait(&mut self, sender: &mut TensorSender) -> Result<(), CallError> {
        let under_way = self.under_way.len();
        self.count_ended(sender)?;
        if self.under_way.len() < under_way {
            return Ok(());
        }
        if under_way > 1 && !sender.is_ready()? {
            sender.ready().await?;
        } else {
            sender.flush().await?;
        }
        self.count_ended(sender)
    }

    fn count_ended(&mut self, sender: &mut TensorSender) -> Result<(), CallError> {
        let pending = sender.pending()? as usize;
        if pending < self.under_way.len() {
            self.finish(pending, Instant::now());
        }
        Ok(())
    }
}
