//! The send queue: requests run on the poster's CPU, at once where they can, and in order always.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use super::super::{
    CompletionOpcode, CompletionStatus, LocalSegment, Operation, Payload, PostErrorKind, QueuePair as _,
    QueuePairState, RemoteSegment, SendRequest, WorkCompletion,
};
use super::completion::Local;
use super::layout::{pair_page, table};
use super::lock;
use super::peer::PeerPair;
use super::queue_pair::SoftQueuePair;
use super::shared::Imported;
use super::transfer::Halt;

/// What the send queue's lock guards.
#[derive(Debug, Default)]
pub(super) struct SendSide {
    /// Requests that wait for a receive of the peer's, and those behind them.
    pending: VecDeque<Pending>,
    /// Until when the first of them may wait; `None` for ever.
    deadline: Option<Instant>,
    /// Places in use: requests that have not completed, or whose completion was not taken.
    used: Arc<AtomicU32>,
    /// Requests that succeeded without a signal since the last that had one.
    unsignaled: u32,
    /// Receives of the peer's that were used up, which is as many as were delivered.
    pub(super) delivered: u64,
    /// Memory of the peer's that was mapped, by number.
    pub(super) segments: Vec<(u64, Arc<Imported>)>,
}

/// A request that outlives the call that posted it.
#[derive(Debug)]
struct Pending {
    wr_id: u64,
    signaled: bool,
    operation: Owned,
}

#[derive(Debug)]
enum Owned {
    Send { data: Data, immediate: Option<u32> },
    Write { data: Data, remote: RemoteSegment, immediate: Option<u32> },
    Read { into: Vec<LocalSegment>, remote: RemoteSegment },
}

#[derive(Debug)]
enum Data {
    Registered(Vec<LocalSegment>),
    Inline(Vec<u8>),
}

impl SendSide {
    /// Maps what the peer has registered already, so that the first messages need not wait for it.
    pub(super) fn map_table(&mut self, pair: &PeerPair) {
        for index in 0..table::REGIONS {
            let word = |field: usize| pair.table.at(index * table::ENTRY + field).load(Ordering::Acquire);
            let (key, number) = (word(table::KEY), word(table::SEGMENT));
            if key & table::VALID != 0 && number != 0 {
                // What can't be mapped now is asked for again when it is needed.
                let _ = self.segment(pair, number);
            }
        }
    }
}

impl SoftQueuePair {
    pub(super) fn post_one(
        &self,
        side: &mut SendSide,
        request: &SendRequest<'_>,
    ) -> Result<(), PostErrorKind> {
        self.check(&request.operation)?;
        if side.used.load(Ordering::Relaxed) >= self.capacity.send_requests {
            return Err(PostErrorKind::QueueFull);
        }
        side.used.fetch_add(1, Ordering::Relaxed);
        let opcode = opcode_of(&request.operation);
        if self.is_in(QueuePairState::Error) {
            self.complete(side, request.wr_id, opcode, CompletionStatus::WorkRequestFlushed, true);
            return Ok(());
        }
        let halt = if side.pending.is_empty() {
            self.execute(side, &request.operation)
        } else {
            Err(Halt::NotReady)
        };
        match halt {
            Ok(()) => {
                self.complete(side, request.wr_id, opcode, CompletionStatus::Success, request.signaled);
            }
            Err(Halt::NotReady) => self.put_off(side, request),
            Err(Halt::Failed(status)) => {
                self.complete(side, request.wr_id, opcode, status, true);
                self.fail_sends(side);
            }
        }
        Ok(())
    }

    fn check(&self, operation: &Operation<'_>) -> Result<(), PostErrorKind> {
        let segments = match operation {
            Operation::Send { data, .. } | Operation::Write { data, .. } => match data {
                Payload::Registered(segments) => segments.len(),
                Payload::Inline(slices) => {
                    if data.length() > self.capacity.inline.into() {
                        return Err(PostErrorKind::InlineTooLong);
                    }
                    slices.len()
                }
            },
            Operation::Read { into, .. } => into.len(),
        };
        if segments > self.capacity.send_segments as usize {
            return Err(PostErrorKind::TooManySegments);
        }
        if length_of(operation) > self.domain.device.attributes().max_message_size {
            return Err(PostErrorKind::MessageTooLong);
        }
        Ok(())
    }

    /// Puts a request at the end of those that wait.
    fn put_off(&self, side: &mut SendSide, request: &SendRequest<'_>) {
        let first = side.pending.is_empty();
        side.pending.push_back(Pending {
            wr_id: request.wr_id,
            signaled: request.signaled,
            operation: Owned::new(&request.operation),
        });
        if first {
            self.wait(side);
        }
    }

    /// The first request that waits begins to.
    fn wait(&self, side: &mut SendSide) {
        let path = self.path.get();
        let retries = path.map_or(7, |path| path.rnr_retry);
        side.deadline = (retries < 7).then(|| {
            let pause = rnr_timer(path.map_or(0, |path| path.min_rnr_timer));
            Instant::now() + pause * (u32::from(retries) + 1)
        });
        let directory = self.domain.device.directory();
        if side.deadline.is_some() {
            lock(&directory.waiting).push(self.this.clone());
            directory.ring();
        }
        if let Some(pair) = self.peer.get() {
            // SYNC: before the peer's side is looked at once more, by the poll that this asks for: either that sees what
            // is waited for, or the peer sees us wait.
            pair.page.at(pair_page::WAITING).store(1, Ordering::SeqCst);
            self.look();
        }
    }

    /// Tries again what waits.
    pub(super) fn retry_sends(&self) {
        let mut side = lock(&self.sends);
        let side = &mut *side;
        if self.is_doomed() && !self.is_in(QueuePairState::Error) && side.pending.is_empty() {
            self.fail_sends(side);
        }
        let mut told = false;
        while let Some(pending) = side.pending.pop_front() {
            let (opcode, wr_id, signaled) = (pending.operation.opcode(), pending.wr_id, pending.signaled);
            match pending.operation.with(|operation| self.execute(side, operation)) {
                Ok(()) => {
                    told = false;
                    self.complete(side, wr_id, opcode, CompletionStatus::Success, signaled);
                }
                Err(Halt::NotReady) => {
                    side.pending.push_front(pending);
                    // SYNC: the peer is told that we wait, and then tried once more; see `wait`.
                    let Some(pair) = self.peer.get().filter(|_| !told) else { return };
                    pair.page.at(pair_page::WAITING).store(1, Ordering::SeqCst);
                    told = true;
                }
                Err(Halt::Failed(status)) => {
                    self.complete(side, wr_id, opcode, status, true);
                    self.fail_sends(side);
                }
            }
        }
    }

    /// For the service thread: ends a wait whose time is over; whether one with a limit goes on.
    pub(super) fn still_waits(&self) -> bool {
        // Whoever holds the lock is working on it.
        let Ok(mut side) = self.sends.try_lock() else { return true };
        let side = &mut *side;
        let Some(deadline) = side.deadline else { return false };
        if side.pending.is_empty() {
            side.deadline = None;
            return false;
        }
        if Instant::now() < deadline {
            return true;
        }
        self.end_sends(side, CompletionStatus::RnrRetryExceeded);
        false
    }

    /// The first request that waits fails with `status`, and everything behind it is flushed.
    pub(super) fn end_sends(&self, side: &mut SendSide, status: CompletionStatus) {
        if let Some(pending) = side.pending.pop_front() {
            self.complete(side, pending.wr_id, pending.operation.opcode(), status, true);
        }
        self.fail_sends(side);
    }

    /// Goes to Error: flushes what waits, and has the receives flushed with the next poll.
    pub(super) fn fail_sends(&self, side: &mut SendSide) {
        if self.is_in(QueuePairState::Error) {
            return;
        }
        self.set_error();
        side.deadline = None;
        while let Some(pending) = side.pending.pop_front() {
            let opcode = pending.operation.opcode();
            self.complete(side, pending.wr_id, opcode, CompletionStatus::WorkRequestFlushed, true);
        }
        self.look();
        self.wake_waiting_peer();
    }

    fn complete(
        &self,
        side: &mut SendSide,
        wr_id: u64,
        opcode: CompletionOpcode,
        status: CompletionStatus,
        signaled: bool,
    ) {
        side.unsignaled += 1;
        if !signaled {
            return;
        }
        let completion =
            WorkCompletion { wr_id, status, opcode, queue_pair: self.number(), ..WorkCompletion::EMPTY };
        let retires = std::mem::take(&mut side.unsignaled);
        if !self.send_queue.push(Local { completion, retires, used: Arc::clone(&side.used) }) {
            // The completion queue has overrun; this completion is lost, and the queue pair with it.
            self.set_error();
        }
    }
}

impl Owned {
    fn new(operation: &Operation<'_>) -> Self {
        match *operation {
            Operation::Send { data, immediate } => Self::Send { data: Data::new(data), immediate },
            Operation::Write { data, remote, immediate } => {
                Self::Write { data: Data::new(data), remote, immediate }
            }
            Operation::Read { into, remote } => Self::Read { into: into.to_vec(), remote },
        }
    }

    fn opcode(&self) -> CompletionOpcode {
        match self {
            Self::Send { .. } => CompletionOpcode::Send,
            Self::Write { .. } => CompletionOpcode::Write,
            Self::Read { .. } => CompletionOpcode::Read,
        }
    }

    fn with<T>(&self, act: impl FnOnce(&Operation<'_>) -> T) -> T {
        match self {
            Self::Send { data, immediate } => {
                data.with(|data| act(&Operation::Send { data, immediate: *immediate }))
            }
            Self::Write { data, remote, immediate } => {
                data.with(|data| act(&Operation::Write { data, remote: *remote, immediate: *immediate }))
            }
            Self::Read { into, remote } => act(&Operation::Read { into, remote: *remote }),
        }
    }
}

impl Data {
    fn new(payload: Payload<'_>) -> Self {
        match payload {
            Payload::Registered(segments) => Self::Registered(segments.to_vec()),
            Payload::Inline(slices) => Self::Inline(slices.concat_bytes()),
        }
    }

    fn with<T>(&self, act: impl FnOnce(Payload<'_>) -> T) -> T {
        match self {
            Self::Registered(segments) => act(Payload::Registered(segments)),
            Self::Inline(bytes) => act(Payload::Inline(&[IoSlice::new(bytes)])),
        }
    }
}

trait ConcatBytes {
    fn concat_bytes(&self) -> Vec<u8>;
}

impl ConcatBytes for [IoSlice<'_>] {
    fn concat_bytes(&self) -> Vec<u8> {
        self.iter().flat_map(|slice| slice.iter().copied()).collect()
    }
}

pub(super) fn opcode_of(operation: &Operation<'_>) -> CompletionOpcode {
    match operation {
        Operation::Send { .. } => CompletionOpcode::Send,
        Operation::Write { .. } => CompletionOpcode::Write,
        Operation::Read { .. } => CompletionOpcode::Read,
    }
}

fn length_of(operation: &Operation<'_>) -> u64 {
    match operation {
        Operation::Send { data, .. } | Operation::Write { data, .. } => data.length(),
        Operation::Read { into, .. } => into.iter().map(LocalSegment::length).sum(),
    }
}

/// The time that a code of IBA vol. 1, table 45, stands for.
fn rnr_timer(code: u8) -> Duration {
    /// In hundredths of a millisecond, by code.
    const TIMES: [u32; 32] = [
        65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048,
        3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
    ];
    Duration::from_micros(10) * TIMES[usize::from(code % 32)]
}
