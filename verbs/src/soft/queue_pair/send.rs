//! The send queue. `post_send` carries out a request at once. A request waits only if the peer has no receive posted, or is not
//! connected yet. All later requests then wait, too.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::core::Core;
use super::transfer::{Initiator, Outcome, Wait};
use super::waiting::Waiting;
use crate::soft::completion_queue::Finished;
use crate::sync::lock;
use crate::{
    CompletionOpcode, CompletionStatus, LocalSegment, Operation, PathSettings, Payload, PostError,
    PostErrorKind, QueuePairNumber, QueuePairState, SendRequest, WorkCompletion,
};

/// Messages above this length ring the peer at once. Shorter ones ring it once per batch.
const ANNOUNCE_AT_ONCE: u64 = 4096;

/// The send queue of a queue pair.
#[derive(Debug)]
pub(super) struct SendQueue {
    core: Arc<Core>,
    state: Mutex<SendState>,
    /// Number of requests that wait in `state`. A poll that finds 0 here does not lock `state`.
    waiting: AtomicUsize,
    /// Places of the queue that polled completions have freed.
    freed: AtomicU64,
}

/// The requests of a send queue, and their progress.
#[derive(Debug, Default)]
struct SendState {
    posted: u64,
    /// Number of requests done since the last completion.
    unsignaled: u32,
    waiting: VecDeque<Waiting>,
    /// Whether a request has failed already.
    failed: bool,
    /// Reason why the first waiting request waits, and the deadline.
    patience: Option<(Wait, Option<Instant>)>,
    initiator: Initiator,
}

impl SendQueue {
    pub(super) fn new(core: &Arc<Core>) -> Self {
        let (waiting, freed) = (AtomicUsize::new(0), AtomicU64::new(0));
        Self { core: Arc::clone(core), state: Mutex::default(), waiting, freed }
    }

    /// Returns whether requests wait.
    pub(super) fn has_waiting(&self) -> bool {
        self.waiting.load(SeqCst) != 0
    }

    /// Posts requests in order, and carries them out as far as possible.
    pub(super) fn post(&self, requests: &[SendRequest<'_>]) -> Result<(), PostError> {
        let mut queue = lock(&self.state);
        if !queue.waiting.is_empty() {
            self.run(&mut queue);
        }
        let mut result = Ok(());
        for (index, request) in requests.iter().enumerate() {
            if let Err(kind) = self.check_post(&queue, request) {
                result = Err(PostError { index, kind });
                break;
            }
            queue.posted += 1;
            self.post_one(&mut queue, request);
        }
        self.announce(&mut queue);
        result
    }

    /// Carries out the waiting requests, as far as possible now.
    pub(super) fn run_waiting(&self) {
        let mut queue = lock(&self.state);
        self.run(&mut queue);
        self.announce(&mut queue);
    }

    /// Frees `places` of the send queue, because a poll returned their completion.
    pub(super) fn free_places(&self, places: u32) {
        self.freed.fetch_add(places.into(), SeqCst);
    }

    fn check_post(&self, queue: &SendState, request: &SendRequest<'_>) -> Result<(), PostErrorKind> {
        match self.core.state() {
            QueuePairState::Rts | QueuePairState::Error => {}
            state => return Err(PostErrorKind::State(state)),
        }
        let (segments, inline) = match request.operation {
            Operation::Send { data, .. } | Operation::Write { data, .. } => match data {
                Payload::Registered(segments) => (segments, None),
                Payload::Inline(_) => (&[][..], Some(data.length())),
            },
            Operation::Read { into, .. } => (into, None),
        };
        if segments.len() > self.core.capacity.send_segments as usize {
            return Err(PostErrorKind::TooManySegments);
        }
        if inline.is_some_and(|length| length > self.core.capacity.inline.into()) {
            return Err(PostErrorKind::InlineTooLong);
        }
        let length = segments.iter().fold(0u64, |sum, segment| sum.saturating_add(segment.length()));
        if length > self.core.domain.device().limits().max_message_size {
            return Err(PostErrorKind::MessageTooLong);
        }
        if queue.posted - self.freed.load(SeqCst) >= self.core.capacity.send_requests.into() {
            return Err(PostErrorKind::QueueFull);
        }
        Ok(())
    }

    fn post_one(&self, queue: &mut SendState, request: &SendRequest<'_>) {
        if queue.waiting.is_empty() && !self.core.is_ended() {
            match self.attempt(queue, request) {
                Ok(outcome) => return self.settle(queue, request, outcome),
                Err(wait) => queue.patience = Some((wait, self.patience(wait))),
            }
        }
        let first = queue.waiting.is_empty();
        queue.waiting.push_back(Waiting::new(request));
        // SYNC: stored before the check of the state. A thread that moves to Error after that check, and then rings, finds
        // this request to flush.
        self.waiting.store(queue.waiting.len(), SeqCst);
        if first || self.core.is_ended() {
            self.run(queue);
        }
        if first && let Some((_, Some(deadline))) = queue.patience {
            self.core.ring_at(deadline);
        }
    }

    /// Carries out a request, or returns the reason why the request has to wait.
    fn attempt(&self, queue: &mut SendState, request: &SendRequest<'_>) -> Result<CompletionStatus, Wait> {
        let Some(connection) = self.core.connection() else { return Ok(CompletionStatus::Fatal) };
        match self.core.transfer(connection, &mut queue.initiator, &request.operation) {
            Outcome::Done(status) => Ok(status),
            Outcome::Wait(wait) => Err(wait),
        }
    }

    /// Runs the waiting requests in order, until a request has to wait longer.
    fn run(&self, queue: &mut SendState) {
        while let Some(first) = queue.waiting.pop_front() {
            let outcome = if self.core.is_ended() {
                Ok(self.status_of_end(queue))
            } else {
                first.with_request(|request| self.attempt_and_ask(queue, request))
            };
            match outcome {
                Ok(status) => {
                    queue.patience = None;
                    first.with_request(|request| self.settle(queue, request, status));
                }
                Err(wait) => match self.expired(queue, wait) {
                    Some(status) => first.with_request(|request| self.settle(queue, request, status)),
                    None => {
                        queue.waiting.push_front(first);
                        break;
                    }
                },
            }
        }
        self.waiting.store(queue.waiting.len(), SeqCst);
    }

    /// Attempts the request. If it must wait, asks the peer to ring, and attempts it once more.
    fn attempt_and_ask(
        &self,
        queue: &mut SendState,
        request: &SendRequest<'_>,
    ) -> Result<CompletionStatus, Wait> {
        self.attempt(queue, request).or_else(|_| {
            if let Some(connection) = self.core.connection() {
                connection.link.set_waiting();
            }
            self.attempt(queue, request)
        })
    }

    /// Returns the status of the first waiting request if `wait` has lasted too long.
    fn expired(&self, queue: &mut SendState, wait: Wait) -> Option<CompletionStatus> {
        let deadline = match queue.patience {
            Some((reason, deadline)) if reason == wait => deadline,
            _ => {
                let deadline = self.patience(wait);
                queue.patience = Some((wait, deadline));
                if let Some(deadline) = deadline {
                    self.core.ring_at(deadline);
                }
                deadline
            }
        };
        if deadline.is_none_or(|deadline| Instant::now() < deadline) {
            return None;
        }
        Some(match wait {
            Wait::Receive => CompletionStatus::RnrRetryExceeded,
            Wait::Connection => CompletionStatus::RetryExceeded,
        })
    }

    /// Returns the time until which a request may wait.
    fn patience(&self, wait: Wait) -> Option<Instant> {
        let settings = self.core.settings()?;
        let patience = match wait {
            Wait::Receive => {
                receiver_patience(settings, self.core.connection().map_or(0, |peer| peer.link.rnr_timer()))
            }
            Wait::Connection => connection_patience(settings),
        };
        Some(Instant::now() + patience?)
    }

    /// Returns the status of a request that still waits when the queue pair has ended.
    fn status_of_end(&self, queue: &mut SendState) -> CompletionStatus {
        let died = self.core.connection().is_some_and(|connection| connection.peer.is_dead());
        if died && !std::mem::replace(&mut queue.failed, true) {
            CompletionStatus::RetryExceeded
        } else {
            CompletionStatus::WorkRequestFlushed
        }
    }

    /// Records the end of a request, and adds its completion.
    fn settle(&self, queue: &mut SendState, request: &SendRequest<'_>, status: CompletionStatus) {
        if status == CompletionStatus::Success {
            if queue.initiator.unannounced && request.operation.length() > ANNOUNCE_AT_ONCE {
                self.announce(queue);
            }
            if !request.signaled {
                queue.unsignaled += 1;
                return;
            }
        } else {
            queue.failed = true;
            self.core.fail();
        }
        let completion = WorkCompletion {
            wr_id: request.wr_id,
            status,
            opcode: request.operation.opcode(),
            byte_len: 0,
            immediate: None,
            queue_pair: QueuePairNumber(self.core.number()),
        };
        let frees = std::mem::take(&mut queue.unsignaled) + 1;
        if !self.core.send_queue.push(Finished { completion, slot: self.core.send_slot, frees }) {
            self.core.fail();
        }
    }

    /// Rings the peer, if receives were filled since the last ring.
    fn announce(&self, queue: &mut SendState) {
        if std::mem::take(&mut queue.initiator.unannounced)
            && let Some(connection) = self.core.connection()
        {
            connection.ring_receiver();
        }
    }
}

impl Operation<'_> {
    fn opcode(&self) -> CompletionOpcode {
        match self {
            Self::Send { .. } => CompletionOpcode::Send,
            Self::Write { .. } => CompletionOpcode::Write,
            Self::Read { .. } => CompletionOpcode::Read,
        }
    }

    /// Returns the number of bytes that the operation moves.
    pub(super) fn length(&self) -> u64 {
        match self {
            Self::Send { data, .. } | Self::Write { data, .. } => data.length(),
            Self::Read { into, .. } => into.iter().map(LocalSegment::length).sum(),
        }
    }
}

/// Returns the time that a send waits for a receive; `None` means without end.
fn receiver_patience(settings: &PathSettings, timer: u8) -> Option<Duration> {
    (settings.rnr_retry < 7).then(|| rnr_delay(timer) * u32::from(settings.rnr_retry))
}

/// Returns the time that a request waits for a peer that is not connected yet; `None` means without end.
fn connection_patience(settings: &PathSettings) -> Option<Duration> {
    let timeout = u32::from(settings.timeout.min(31));
    let once = Duration::from_nanos(4096 << timeout);
    (timeout > 0).then(|| once * (u32::from(settings.retry_count) + 1))
}

/// Returns the delay of an RNR timer code (IBA vol. 1, table 45).
fn rnr_delay(code: u8) -> Duration {
    const TENS_OF_MICROSECONDS: [u64; 32] = [
        65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048,
        3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
    ];
    Duration::from_micros(TENS_OF_MICROSECONDS[usize::from(code) % 32] * 10)
}
