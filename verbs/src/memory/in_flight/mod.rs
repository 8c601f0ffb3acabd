//! One-sided operations in flight: the memory that they use stays here until the device is done with it.
//!
//! A transfer's memory moves in with it ([`Transfer`]) and comes back with its completion ([`FinishedTransfer`]). Nobody has a
//! reference to it meanwhile, whatever becomes of the future that waits for it: that is what makes a region's `&mut [u8]`
//! sound without a word of `unsafe` above this floor.
//!
//! Requests of one queue pair complete in the order of posting, so a number that counts them is all that a completion has
//! to say. Long transfers are cut; what the send queue and a window of bytes have no room for waits its turn.

mod ranges;
mod transfer;

use std::collections::VecDeque;
use std::sync::Arc;

pub use ranges::{CopyRange, CopyRanges};
use transfer::RequestPart;
pub use transfer::{FinishedTransfer, LocalMemory, Notice, Transfer, TransferKind};

use super::registrations::LocalRegistrations;
use crate::{CompletionStatus, LocalSegment, Operation, Payload, PostError, QueuePair, SendRequest};

/// The send queue of one queue pair, and the memory that its requests use. `T` is what a transfer's owner knows it by.
#[derive(Debug)]
pub struct InFlight<T> {
    queue_pair: Arc<dyn QueuePair>,
    registrations: LocalRegistrations,
    limits: TransferLimits,
    /// Oldest first: those that are over, but for their completion, then those being posted, then those that wait.
    transfers: VecDeque<Transfer<T>>,
    /// How many of them have been posted to the end.
    posted_transfers: usize,
    /// Requests posted so far, and completed.
    posted: u64,
    completed: u64,
    unsignaled: SignaledRequests,
    /// What each signalled request that is outstanding stands for.
    marks: VecDeque<SignaledRequests>,
    bytes_in_flight: u64,
    /// Whether a completion has told of a fault, or a request was refused.
    failed: bool,
}

/// What the device takes.
#[derive(Clone, Copy, Debug)]
pub struct TransferLimits {
    /// Requests on the send queue.
    pub requests: u32,
    /// Bytes of one request.
    pub message: u64,
    /// Bytes of all requests outstanding, beyond which no further one is posted.
    pub window: u64,
}

/// Requests up to and with a signalled one.
#[derive(Clone, Copy, Debug, Default)]
struct SignaledRequests {
    /// Number of the signalled one.
    number: u64,
    requests: u32,
    bytes: u64,
}

/// Requests handed to the device at a time.
const BATCH: usize = 16;

impl<T> InFlight<T> {
    /// Takes over a connected queue pair, of which there must be no other reference: when it is dropped, the device is done
    /// with the memory of its requests.
    pub fn new(
        queue_pair: Arc<dyn QueuePair>,
        registrations: LocalRegistrations,
        limits: TransferLimits,
    ) -> Self {
        assert_eq!(Arc::strong_count(&queue_pair), 1, "a queue pair of one owner");
        Self {
            queue_pair,
            registrations,
            limits,
            transfers: VecDeque::new(),
            posted_transfers: 0,
            posted: 0,
            completed: 0,
            unsignaled: SignaledRequests::default(),
            marks: VecDeque::new(),
            bytes_in_flight: 0,
            failed: false,
        }
    }

    /// The queue pair.
    pub fn queue_pair(&self) -> &dyn QueuePair {
        &*self.queue_pair
    }

    /// Transfers that are not over.
    pub fn len(&self) -> usize {
        self.transfers.len()
    }

    /// Whether so many requests are outstanding that it is time to take completions.
    pub fn is_crowded(&self) -> bool {
        self.posted - self.completed > u64::from(self.limits.requests / 2)
    }

    /// Posts one small request at once, whose bytes the device takes over before this returns; nobody is told of its
    /// completion. False if it has to queue: then `operation` was not posted.
    pub fn post_now(
        &mut self,
        wr_id: impl Fn(u32) -> u64,
        operation: Operation<'_>,
    ) -> Result<bool, PostError> {
        debug_assert!(matches!(
            operation,
            Operation::Send { data: Payload::Inline(_), .. }
                | Operation::Write { data: Payload::Inline(_), .. }
        ));
        if self.posted_transfers < self.transfers.len() || self.room() == 0 || self.failed {
            return Ok(false);
        }
        let bytes = match operation {
            Operation::Send { data, .. } | Operation::Write { data, .. } => data.length(),
            Operation::Read { .. } => 0,
        };
        let (number, signaled) = self.number(bytes, false);
        let request = SendRequest { wr_id: wr_id(number as u32), operation, signaled };
        self.queue_pair.post_send(&[request]).inspect_err(|_| self.failed = true)?;
        Ok(true)
    }

    /// Takes a transfer, and posts as much of it as there is room for.
    pub fn submit(&mut self, transfer: Transfer<T>, wr_id: impl Fn(u32) -> u64) -> Result<(), PostError> {
        self.transfers.push_back(transfer);
        self.pump(wr_id)
    }

    /// Posts what there is room for.
    pub fn pump(&mut self, wr_id: impl Fn(u32) -> u64) -> Result<(), PostError> {
        while self.posted_transfers < self.transfers.len()
            && self.room() > 0
            && self.bytes_in_flight < self.limits.window
            && !self.failed
        {
            self.post_batch(&wr_id)?;
        }
        Ok(())
    }

    /// The request with this number, of the 32 bits that its identifier had room for, has completed, and all before it.
    pub fn completed(
        &mut self,
        number: u32,
        status: CompletionStatus,
        mut finished: impl FnMut(FinishedTransfer<T>),
    ) {
        let number = self.completed + u64::from(number.wrapping_sub(self.completed as u32));
        if number > self.posted {
            return;
        }
        self.completed = number;
        while let Some(mark) = self.marks.front().filter(|mark| mark.number <= number) {
            self.bytes_in_flight -= mark.bytes;
            self.marks.pop_front();
        }
        self.failed |= status != CompletionStatus::Success;
        while let Some(first) = self.transfers.front_mut().filter(|first| first.began_before(number)) {
            if status != CompletionStatus::Success && first.covers(number) {
                first.fail(status);
            }
            if first.last().is_none_or(|last| last > number) {
                break;
            }
            self.posted_transfers -= 1;
            if let Some(first) = self.transfers.pop_front() {
                finished(first.finish());
            }
        }
    }

    /// Ends it: the queue pair goes, upon which no request can touch memory any more, and every transfer is over with
    /// `status`, if it has no reason of its own.
    pub fn abandon(self, status: CompletionStatus, mut finished: impl FnMut(FinishedTransfer<T>)) {
        let Self { queue_pair, transfers, .. } = self;
        queue_pair.to_error();
        // Nobody else has it, see `new`.
        drop(queue_pair);
        for mut transfer in transfers {
            transfer.fail(status);
            finished(transfer.finish());
        }
    }

    /// Places free in the send queue.
    fn room(&self) -> usize {
        let outstanding = (self.posted - self.completed) as usize;
        (self.limits.requests as usize).saturating_sub(outstanding)
    }

    /// Numbers the next request, of `bytes`, and says whether it must be signalled.
    fn number(&mut self, bytes: u64, wanted: bool) -> (u64, bool) {
        let every = (self.limits.requests / 8).clamp(1, 64);
        self.posted += 1;
        let mark = &mut self.unsignaled;
        mark.number = self.posted;
        mark.requests += 1;
        mark.bytes += bytes;
        self.bytes_in_flight += bytes;
        let signaled = wanted || mark.requests >= every || mark.bytes >= self.limits.window / 4;
        if signaled {
            self.marks.push_back(std::mem::take(mark));
        }
        (self.posted, signaled)
    }

    /// Posts pieces of the first transfer that has any left.
    fn post_batch(&mut self, wr_id: &impl Fn(u32) -> u64) -> Result<(), PostError> {
        let index = self.posted_transfers;
        let room = self.room().min(BATCH);
        let message = self.limits.message;
        let mut pieces: Vec<(RequestPart, Option<LocalSegment>)> = Vec::with_capacity(room);
        let mut bytes = self.bytes_in_flight;
        let transfer = &mut self.transfers[index];
        if let Err(kind) = transfer.register(&mut self.registrations) {
            self.failed = true;
            return Err(PostError { index: 0, kind });
        }
        while pieces.len() < room && (bytes < self.limits.window || pieces.is_empty()) {
            let Some(piece) = transfer.next_piece(message) else { break };
            bytes += piece.bytes();
            let segment = transfer.segment(&piece);
            pieces.push((piece, segment));
        }
        let first = self.posted + 1;
        let numbers: Vec<_> =
            pieces.iter().map(|(piece, _)| self.number(piece.bytes(), piece.is_last())).collect();
        let transfer = &mut self.transfers[index];
        transfer.posted(first, self.posted);
        let result = transfer.with_requests(&pieces, |operations| {
            let requests: Vec<_> = operations
                .iter()
                .zip(&numbers)
                .map(|(operation, (number, signaled))| SendRequest {
                    wr_id: wr_id(*number as u32),
                    operation: *operation,
                    signaled: *signaled,
                })
                .collect();
            self.queue_pair.post_send(&requests)
        });
        if transfer.last().is_some() {
            self.posted_transfers += 1;
        }
        result.inspect_err(|_| self.failed = true)
    }
}
