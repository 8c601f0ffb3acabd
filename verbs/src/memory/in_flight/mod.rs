//! Operations in flight: this module keeps the memory of each operation until the device is done with it.
//!
//! The memory moves into a [`Transfer`] and comes back with its completion ([`FinishedTransfer`]). Meanwhile there is no
//! reference to the memory, even if the future that waits for the operation is dropped. For this reason the `&mut [u8]` of
//! a region is sound, and the crates above need no `unsafe`.
//!
//! Requests of one queue pair complete in the order of posting, so a completion only needs to carry a number that counts
//! the requests. Long transfers are cut into requests. A request waits until the send queue and the window of bytes have
//! room.

mod transfer;

use std::collections::VecDeque;
use std::sync::Arc;

use transfer::RequestPart;
pub use transfer::{CopyRange, CopyRanges, FinishedTransfer, LocalMemory, Notice, Transfer, TransferKind};

use super::pieces::Lease;
use super::registrations::LocalRegistrations;
use crate::{CompletionStatus, LocalSegment, Operation, Payload, PostError, QueuePair, SendRequest};

/// The send queue of one queue pair, and the memory that its requests use. `T` is a token by which the owner of a transfer
/// recognises the transfer.
#[derive(Debug)]
pub struct InFlight<T> {
    queue_pair: Arc<dyn QueuePair>,
    registrations: LocalRegistrations,
    limits: TransferLimits,
    /// Oldest first: transfers that wait for their completion, then the transfer being posted, then transfers that wait for
    /// room.
    transfers: VecDeque<Transfer<T>>,
    /// Number of transfers whose requests are all posted.
    posted_transfers: usize,
    /// Number of requests posted so far.
    posted: u64,
    /// Number of requests completed so far.
    completed: u64,
    /// Requests posted since the last signalled one.
    unsignaled: SignaledRequests,
    /// One entry for each outstanding signalled request.
    marks: VecDeque<SignaledRequests>,
    bytes_in_flight: u64,
    /// Whether a request has failed or was refused.
    failed: bool,
}

/// The limits of a send queue.
#[derive(Clone, Copy, Debug)]
pub struct TransferLimits {
    /// Number of requests on the send queue.
    pub requests: u32,
    /// Bytes of one request at most.
    pub message: u64,
    /// Limit of the bytes in flight. When the outstanding requests have this many bytes, no further request is posted.
    pub window: u64,
}

/// A signalled request, together with the unsignalled ones before it.
#[derive(Clone, Copy, Debug, Default)]
struct SignaledRequests {
    /// Number of the signalled request.
    number: u64,
    /// Number of these requests.
    requests: u32,
    /// Bytes of these requests.
    bytes: u64,
}

/// Number of requests that are posted together at most.
const BATCH: usize = 16;

impl<T> InFlight<T> {
    /// Takes over a connected queue pair, which has receives of its own: one with shared receives would outlive its drop.
    ///
    /// # Panics
    /// Panics if there is another reference to the queue pair. There must be none, because [`abandon`](Self::abandon) relies on
    /// it: only dropping the last reference proves that the device is done with the memory of the requests.
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

    /// Returns the queue pair.
    pub fn queue_pair(&self) -> &dyn QueuePair {
        &*self.queue_pair
    }

    /// Returns the number of transfers that have not ended.
    pub fn unfinished(&self) -> usize {
        self.transfers.len()
    }

    /// Registers the slab of `lease` with the device, unless it is registered. Returns false if the budget or the device refuses that: a
    /// transfer from the lease would fail.
    pub fn registers(&mut self, lease: &Lease) -> bool {
        self.registrations.lease(lease).is_ok()
    }

    /// Returns whether more than half of the send queue is in use, so that the caller should poll for completions.
    pub fn is_crowded(&self) -> bool {
        self.posted - self.completed > u64::from(self.limits.requests / 2)
    }

    /// Posts one small inline request at once. The device copies the bytes before this function returns. The completion of the
    /// request is not reported. If the request would have to wait, this function posts nothing and returns false.
    ///
    /// # Errors
    /// The device refuses the request.
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

    /// Accepts a transfer, and posts its requests as far as there is room.
    ///
    /// # Errors
    /// The device refuses a request.
    pub fn submit(&mut self, transfer: Transfer<T>, wr_id: impl Fn(u32) -> u64) -> Result<(), PostError> {
        self.transfers.push_back(transfer);
        self.pump(wr_id)
    }

    /// Posts waiting requests as far as there is room.
    ///
    /// # Errors
    /// The device refuses a request.
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

    /// Records that request `number` and all requests before it have completed. `number` is the low 32 bits of the request's
    /// number, because the identifier of a request has room for 32 bits. Passes each transfer that has ended to `finished`.
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

    /// Destroys the queue pair, so that no request can access memory any more. Then ends every transfer with `status`; a
    /// transfer that has failed before keeps its own status.
    pub fn abandon(self, status: CompletionStatus, mut finished: impl FnMut(FinishedTransfer<T>)) {
        let Self { queue_pair, transfers, .. } = self;
        queue_pair.to_error();
        // This is the only reference, see `new`.
        drop(queue_pair);
        for mut transfer in transfers {
            transfer.fail(status);
            finished(transfer.finish());
        }
    }

    /// Returns the number of free places in the send queue.
    fn room(&self) -> usize {
        let outstanding = (self.posted - self.completed) as usize;
        (self.limits.requests as usize).saturating_sub(outstanding)
    }

    /// Assigns a number to the next request, which has `bytes` bytes. Returns the number, and whether the request must be
    /// signalled.
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

    /// Posts requests of the first transfer that is not posted completely.
    fn post_batch(&mut self, wr_id: &impl Fn(u32) -> u64) -> Result<(), PostError> {
        let index = self.posted_transfers;
        let room = self.room().min(BATCH);
        let message = self.limits.message;
        let mut parts: Vec<(RequestPart, Option<LocalSegment>)> = Vec::with_capacity(room);
        let mut bytes = self.bytes_in_flight;
        let transfer = &mut self.transfers[index];
        if let Err(kind) = transfer.register(&mut self.registrations) {
            self.failed = true;
            return Err(PostError { index: 0, kind });
        }
        while parts.len() < room && (bytes < self.limits.window || parts.is_empty()) {
            let Some(part) = transfer.next_part(message) else { break };
            bytes += part.bytes();
            let segment = transfer.segment(&part);
            parts.push((part, segment));
        }
        let first = self.posted + 1;
        let numbers: Vec<_> =
            parts.iter().map(|(part, _)| self.number(part.bytes(), part.is_last())).collect();
        let transfer = &mut self.transfers[index];
        transfer.posted(first, self.posted);
        let result = transfer.with_requests(&parts, |operations| {
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
