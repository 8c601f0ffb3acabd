//! The send queue. `post_send` puts requests into the ring at once. A request waits if the ring is full, if the peer has no
//! receive posted, or if the peer is not connected yet. All later requests then wait, too.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use super::connection::{Connection, Debt};
use super::core::Core;
use super::outstanding::{Outstanding, Progress, Reading};
use super::pulls::{PlaceList, Pulls};
use super::source::{self, Local};
use super::waiting::Waiting;
use crate::soft::completion_queue::Sink;
use crate::soft::limits::MAX_READS;
use crate::soft::shared::attention::Attention;
use crate::soft::shared::end::{EndState, Writer};
use crate::soft::shared::platform::{Native, Shipping};
use crate::soft::shared::ring::{Flags, Header, Kind, Place};
use crate::sync::lock;
use crate::{
    Access, CompletionOpcode, CompletionStatus, LocalSegment, Operation, PathSettings, Payload, PostError,
    PostErrorKind, QueuePairNumber, QueuePairState, RemoteSegment, SendRequest, WorkCompletion,
};

/// Bytes from which the peer takes a message from registered memory where it lies, instead of from the ring.
const PULL: u64 = 8 << 10;

/// Most bytes of payload in one record. A long message has many records, so that the peer takes the first ones while this end
/// writes the next.
const CHUNK: u64 = 32 << 10;

/// The send queue of a queue pair.
#[derive(Debug)]
pub(super) struct SendQueue {
    core: Arc<Core>,
    state: Mutex<SendState>,
    /// Number of requests that have no completion yet. A poll that finds 0 here does not lock `state`.
    pending: AtomicUsize,
    /// Number of requests whose progress a sleeping poller waits for: those that are signalled, and those that wait.
    awaited: AtomicUsize,
    /// The position that the peer had taken at the last poll.
    seen: AtomicU64,
    /// Whether a request has ended without the peer: it failed, or was a READ that is complete.
    ended: AtomicBool,
    /// Number of requests that wait. A poll that finds 0 here does not try them.
    waiting: AtomicUsize,
}

/// The requests of a send queue, and their progress.
#[derive(Debug)]
pub(super) struct SendState {
    writer: Writer,
    /// Requests posted, and places of the queue that polled completions have freed.
    posted: u64,
    freed: u64,
    /// Number of requests done since the last completion.
    unsignaled: u64,
    waiting: VecDeque<Waiting>,
    outstanding: VecDeque<Outstanding>,
    /// Number of outstanding READs that are done.
    reads_done: usize,
    /// READs whose bytes come through the peer's ring.
    reading: VecDeque<Reading>,
    /// The end of the record of the last WRITE.
    last_write: u64,
    pulls: Pulls,
    /// The peer's receives that our messages have taken, and those that it had posted at the last look.
    receives_taken: u32,
    receives_posted: u32,
    /// Number of signalled requests that were started and have no completion yet.
    signaled: usize,
    /// Whether a request could not begin, so that no later request may begin.
    stopped: bool,
    /// Whether a poll has taken a failure.
    failed: bool,
    /// Reason why the first waiting request waits, and the deadline.
    patience: Option<(Wait, Option<Instant>)>,
    /// Whether records were published that the peer was not told of.
    unannounced: bool,
    /// Whether one of them belongs to another request than a WRITE without immediate data.
    unannounced_news: bool,
}

/// The reason why a request waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wait {
    /// The ring is full.
    Room,
    /// The peer has no receive posted.
    Receive,
    /// The peer has not connected to us yet.
    Connection,
}

impl SendQueue {
    pub(super) fn new(core: &Arc<Core>) -> Self {
        let state = SendState {
            writer: Writer::new(core.end.ring_bytes(), core.end.key()),
            posted: 0,
            freed: 0,
            unsignaled: 0,
            signaled: 0,
            waiting: VecDeque::new(),
            outstanding: VecDeque::new(),
            reads_done: 0,
            reading: VecDeque::new(),
            last_write: 0,
            pulls: Pulls::default(),
            receives_taken: 0,
            receives_posted: 0,
            stopped: false,
            failed: false,
            patience: None,
            unannounced: false,
            unannounced_news: false,
        };
        let [pending, awaited, waiting] = [const { AtomicUsize::new(0) }; 3];
        let (seen, ended) = (AtomicU64::new(0), AtomicBool::new(false));
        Self { core: Arc::clone(core), state: Mutex::new(state), pending, awaited, seen, ended, waiting }
    }

    /// Returns whether a poll may have something to do. Takes no lock.
    #[inline]
    pub(super) fn has_news(&self) -> bool {
        let pending = self.pending.load(Relaxed);
        pending != 0 && self.has_progress(pending)
    }

    #[inline]
    fn has_progress(&self, pending: usize) -> bool {
        // Requests without a completion are forgotten when there are many, or together with the next one that has a completion.
        let many = pending > self.core.capacity.send_requests as usize / 2;
        (many || self.awaited.load(Relaxed) != 0)
            && self
                .core
                .connection()
                .is_none_or(|connection| connection.end.taken_word().load(Relaxed) != self.seen.load(Relaxed))
            || self.waiting.load(Relaxed) != 0
            || self.ended.load(Relaxed)
            || self.core.has_failed()
            || self.core.peer_has_ended()
    }

    /// Returns whether requests wait.
    pub(super) fn has_waiting(&self) -> bool {
        self.waiting.load(Relaxed) != 0
    }

    /// Returns whether the peer has made progress that a poller waits for and has not seen.
    pub(super) fn has_unseen_progress(&self) -> bool {
        self.awaited.load(Relaxed) != 0
            && self.core.connection().is_some_and(|connection| {
                connection.end.taken_word().load(Relaxed) != self.seen.load(Relaxed)
            })
    }

    /// Returns whether an event is wanted when the peer makes progress. The caller has armed the queue, then has locked the queue
    /// once.
    pub(super) fn wants_progress(&self) -> bool {
        self.awaited.load(Relaxed) != 0
    }

    /// Locks the state.
    pub(super) fn lock(&self) -> MutexGuard<'_, SendState> {
        lock(&self.state)
    }

    /// Posts requests in order, and carries them out as far as possible.
    pub(super) fn post(&self, requests: &[SendRequest<'_>]) -> Result<(), PostError> {
        let mut queue = self.lock();
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
            if request.signaled && !self.core.send_queue.expect_completion() {
                self.core.fail();
            }
            self.post_one(&mut queue, request);
        }
        self.after(&mut queue);
        self.after_post(&queue);
        if !queue.waiting.is_empty() {
            // SYNC: after the store of `awaited`. The poller may sleep; it asks for an event when it arms its queue again.
            self.core.send_queue.notify();
        }
        result
    }

    /// Carries out the waiting requests, as far as possible now.
    pub(super) fn run_waiting(&self) {
        let mut queue = self.lock();
        self.run(&mut queue);
        self.after(&mut queue);
        self.after_post(&queue);
    }

    /// Gives the places of the completion queue back, because the queue pair is destroyed.
    pub(super) fn forget(&self) {
        let queue = self.lock();
        let waiting = queue.waiting.iter().filter(|waiting| waiting.is_signaled()).count();
        let started = queue.outstanding.iter().filter(|outstanding| outstanding.signaled).count();
        self.core.send_queue.forget_completions(waiting + started);
    }

    /// Tells the peer of new records, and pollers of requests without a completion.
    #[inline]
    fn after(&self, queue: &mut SendState) {
        self.pending.store(queue.waiting.len() + queue.outstanding.len(), Relaxed);
        self.awaited.store(queue.waiting.len() + queue.signaled, Relaxed);
        if std::mem::take(&mut queue.unannounced) {
            self.core.published.store(queue.writer.head(), Relaxed);
            if let Some(connection) = self.core.connection() {
                let news = std::mem::take(&mut queue.unannounced_news);
                self.core.announce_news(connection, if news { Debt::NEWS } else { Debt::WRITES });
            }
            self.core.guard();
        }
    }

    /// Asks for an event when the peer makes progress, if requests were added while the poller sleeps.
    #[inline]
    fn after_post(&self, queue: &SendState) {
        if queue.signaled + queue.waiting.len() > 0 && self.core.send_queue.is_armed() {
            self.ask_for_progress();
        }
    }

    /// Asks the peer for an event when it makes progress, because the poller sleeps.
    #[cold]
    fn ask_for_progress(&self) {
        self.core.want(Attention::PROGRESS);
        Attention::fence::<Native, Shipping>();
        if self.has_unseen_progress() {
            self.core.send_queue.notify();
        }
    }

    #[inline]
    fn check_post(&self, queue: &SendState, request: &SendRequest<'_>) -> Result<(), PostErrorKind> {
        if self.core.domain.device().is_forked() {
            return Err(PostErrorKind::State(QueuePairState::Error));
        }
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
        if source::total(segments) > self.core.domain.device().limits().max_message_size {
            return Err(PostErrorKind::MessageTooLong);
        }
        if queue.posted - queue.freed >= self.core.capacity.send_requests.into() {
            return Err(PostErrorKind::QueueFull);
        }
        Ok(())
    }

    #[inline]
    fn post_one(&self, queue: &mut SendState, request: &SendRequest<'_>) {
        let mut done = 0;
        if queue.waiting.is_empty() && !queue.stopped && !self.core.has_failed() {
            match self.attempt(queue, request, &mut done) {
                Ok(()) => return,
                Err(wait) => queue.patience = Some((wait, self.patience(wait))),
            }
        }
        self.wait(queue, request, done);
    }

    /// Keeps a request until it can go on.
    #[cold]
    fn wait(&self, queue: &mut SendState, request: &SendRequest<'_>, done: u64) {
        let first = queue.waiting.is_empty();
        queue.waiting.push_back(Waiting::new(request, done));
        self.waiting.store(queue.waiting.len(), Relaxed);
        self.core.guard();
        if first {
            self.core.want(Attention::STUCK);
            Attention::fence::<Native, Shipping>();
            self.run(queue);
            if let Some((_, Some(deadline))) = queue.patience {
                self.core.notify_at(deadline);
            }
        } else if self.core.has_failed() {
            self.core.notify();
        }
    }

    /// Carries out a request from byte `done` on, or returns the reason why the request has to wait.
    #[inline]
    fn attempt(&self, queue: &mut SendState, request: &SendRequest<'_>, done: &mut u64) -> Result<(), Wait> {
        let Some(connection) = self.core.connection() else {
            self.end_with(queue, request, Some(CompletionStatus::Fatal));
            return Ok(());
        };
        match connection.end.state() {
            EndState::Ready if !connection.peer.is_dead() => {}
            EndState::Waiting if !connection.peer.is_dead() => return Err(Wait::Connection),
            _ => {
                self.end_with(queue, request, None);
                return Ok(());
            }
        }
        match request.operation {
            Operation::Send { data, immediate } => {
                let target = Target { kind: Kind::Send, remote: None, immediate };
                self.attempt_message(queue, connection, request, (data.into(), target), done)
            }
            Operation::Write { data, remote, immediate } => {
                let target = Target { kind: Kind::Write, remote: Some(remote), immediate };
                self.attempt_message(queue, connection, request, (data.into(), target), done)
            }
            Operation::Read { into, remote } => self.attempt_read(queue, connection, request, into, remote),
        }
    }

    #[inline]
    fn attempt_message(
        &self,
        queue: &mut SendState,
        connection: &Connection,
        request: &SendRequest<'_>,
        (data, target): (Local<'_>, Target),
        done: &mut u64,
    ) -> Result<(), Wait> {
        if data.check(&self.core.domain).is_err() {
            self.end_with(queue, request, Some(CompletionStatus::LocalProtection));
            return Ok(());
        }
        let takes_receive = target.kind == Kind::Send || target.immediate.is_some();
        if *done == 0 && takes_receive && !queue.has_receive(connection) {
            return Err(Wait::Receive);
        }
        let total = data.length();
        if let (0, Local::Segments(segments), PULL..) = (*done, data, total)
            && let Some(places) = queue.pulls.places(&self.core, connection, segments)
        {
            return self.offer_to_pull(queue, connection, request, (&places, target, total));
        }
        loop {
            let first = *done == 0;
            let Some(chunk) = self.chunk(queue, connection, total - *done) else { return Err(Wait::Room) };
            let Some(place) = queue.writer.reserve(self.core.end.ring(), chunk) else {
                return Err(Wait::Room);
            };
            if let Some(to) = self.core.end.payload(place.payload(), chunk) {
                // SAFETY:
                // - `to` is in the ring of our own end, which only this thread writes while the send queue is locked; and
                // - the segments were checked above, with the send queue locked.
                unsafe {
                    let first = chunk.min(Place::WITH_TAG);
                    if chunk > first {
                        data.copy_out(*done + first, chunk - first, to.wrapping_add(first as usize));
                    }
                    data.copy_out(*done, first, to);
                }
            }
            *done += chunk;
            let last = *done == total;
            let header = Header {
                kind: target.kind,
                flags: Flags::default()
                    .with_if(Flags::FIRST, first)
                    .with_if(Flags::LAST, last)
                    .with_if(Flags::IMMEDIATE, target.immediate.is_some()),
                length: chunk as u32,
                immediate: target.immediate.unwrap_or(0),
                address: target.remote.map_or(0, |remote| remote.address),
                key: target.remote.map_or(0, |remote| remote.rkey.0),
                total,
            };
            queue.writer.publish(self.core.end.ring(), &place, &header);
            queue.unannounced = true;
            queue.unannounced_news |= takes_receive;
            if first && takes_receive {
                queue.receives_taken = queue.receives_taken.wrapping_add(1);
            }
            if last {
                if target.kind == Kind::Write {
                    queue.last_write = queue.writer.head();
                }
                queue.signaled += usize::from(request.signaled);
                queue.outstanding.push_back(Outstanding {
                    wr_id: request.wr_id,
                    opcode: request.operation.opcode(),
                    signaled: request.signaled,
                    progress: Progress::InRing { end: queue.writer.head() },
                });
                return Ok(());
            }
            self.core.announce_news(connection, if takes_receive { Debt::NEWS } else { Debt::WRITES });
        }
    }

    /// Publishes a record with the places in our memory from which the peer takes the bytes of a message.
    fn offer_to_pull(
        &self,
        queue: &mut SendState,
        connection: &Connection,
        request: &SendRequest<'_>,
        (places, target, total): (&PlaceList, Target, u64),
    ) -> Result<(), Wait> {
        let bytes = places.as_bytes();
        let length = bytes.len() as u64;
        if queue.writer.room().is_none_or(|room| room < length)
            && queue.writer.reclaim(connection.end.taken_word()).is_err()
        {
            self.violation();
        }
        let Some(place) = queue.writer.reserve(self.core.end.ring(), length) else { return Err(Wait::Room) };
        if let Some(to) = self.core.end.payload(place.payload(), length) {
            // SAFETY: `to` is in the ring of our own end, which only this thread writes while the send queue is locked.
            unsafe { crate::copy_bytes(bytes.as_ptr(), to, bytes.len()) };
        }
        let header = Header {
            kind: target.kind,
            flags: Flags::FIRST
                .with(Flags::LAST)
                .with(Flags::PULL)
                .with_if(Flags::IMMEDIATE, target.immediate.is_some()),
            length: length as u32,
            immediate: target.immediate.unwrap_or(0),
            address: target.remote.map_or(0, |remote| remote.address),
            key: target.remote.map_or(0, |remote| remote.rkey.0),
            total,
        };
        queue.writer.publish(self.core.end.ring(), &place, &header);
        queue.unannounced = true;
        if target.kind == Kind::Send || target.immediate.is_some() {
            queue.unannounced_news = true;
            queue.receives_taken = queue.receives_taken.wrapping_add(1);
        }
        let end = queue.writer.head();
        if target.kind == Kind::Write {
            queue.last_write = end;
        }
        queue.signaled += usize::from(request.signaled);
        queue.outstanding.push_back(Outstanding {
            wr_id: request.wr_id,
            opcode: request.operation.opcode(),
            signaled: request.signaled,
            progress: Progress::Pulled { end },
        });
        Ok(())
    }

    /// Returns the bytes of the next record of a message with `left` bytes left; `None` if there is no room. The last record of a
    /// message has at least a word, or the whole message, so that the target can store the last word at once.
    #[inline]
    fn chunk(&self, queue: &mut SendState, connection: &Connection, left: u64) -> Option<u64> {
        const LEAST: u64 = 4096;
        let wanted = left.min(CHUNK);
        let mut room = queue.writer.room().unwrap_or(0);
        if room < wanted || queue.writer.room().is_none() {
            if queue.writer.reclaim(connection.end.taken_word()).is_err() {
                self.core.fail();
                return None;
            }
            room = queue.writer.room()?;
        }
        if room < wanted.min(LEAST) {
            return None;
        }
        let chunk = wanted.min(room);
        let rest = left - chunk;
        Some(if rest > 0 && rest < source::WORD { chunk - source::WORD } else { chunk })
    }

    fn attempt_read(
        &self,
        queue: &mut SendState,
        connection: &Connection,
        request: &SendRequest<'_>,
        into: &[LocalSegment],
        remote: RemoteSegment,
    ) -> Result<(), Wait> {
        if source::check(into, &self.core.domain, Access::LOCAL_WRITE).is_err() {
            self.end_with(queue, request, Some(CompletionStatus::LocalProtection));
            return Ok(());
        }
        if queue.last_write > queue.writer.freed()
            && queue.writer.reclaim(connection.end.taken_word()).is_err()
        {
            self.violation();
        }
        // A READ sees the WRITEs before it.
        if queue.last_write <= queue.writer.freed() && queue.pulls.read(&self.core, connection, into, remote)
        {
            queue.signaled += usize::from(request.signaled);
            queue.outstanding.push_back(Outstanding {
                wr_id: request.wr_id,
                opcode: CompletionOpcode::Read,
                signaled: request.signaled,
                progress: Progress::Read,
            });
            queue.reads_done += 1;
            self.ended.store(true, Relaxed);
            return Ok(());
        }
        if queue.reading.len() >= MAX_READS || self.chunk(queue, connection, 0).is_none() {
            return Err(Wait::Room);
        }
        let Some(place) = queue.writer.reserve(self.core.end.ring(), 0) else { return Err(Wait::Room) };
        let header = Header {
            kind: Kind::Read,
            flags: Flags::FIRST.with(Flags::LAST),
            length: 0,
            immediate: 0,
            address: remote.address,
            key: remote.rkey.0,
            total: source::total(into),
        };
        queue.writer.publish(self.core.end.ring(), &place, &header);
        (queue.unannounced, queue.unannounced_news) = (true, true);
        queue.signaled += usize::from(request.signaled);
        queue.outstanding.push_back(Outstanding {
            wr_id: request.wr_id,
            opcode: CompletionOpcode::Read,
            signaled: request.signaled,
            progress: Progress::Reading { end: queue.writer.head() },
        });
        queue.reading.push_back(Reading::new(into));
        Ok(())
    }

    /// Ends a request with a failure, after the requests before it. Without a status, the end of the queue pair is the reason.
    #[cold]
    fn end_with(&self, queue: &mut SendState, request: &SendRequest<'_>, status: Option<CompletionStatus>) {
        queue.signaled += usize::from(request.signaled);
        queue.outstanding.push_back(Outstanding {
            wr_id: request.wr_id,
            opcode: request.operation.opcode(),
            signaled: request.signaled,
            progress: status.map_or(Progress::Flushed, Progress::Failed),
        });
        queue.stopped = true;
        self.ended.store(true, Relaxed);
        // The poll that takes the failure moves the queue pair to Error. Until then the requests before it may still succeed.
        self.core.notify();
    }

    /// Runs the waiting requests in order, until a request has to wait longer.
    fn run(&self, queue: &mut SendState) {
        while let Some(mut first) = queue.waiting.pop_front() {
            if queue.stopped || self.core.has_failed() || self.core.peer_has_ended() {
                first.with_request(|request, _| self.end_with(queue, request, None));
                continue;
            }
            match first.with_request(|request, done| self.attempt(queue, request, done)) {
                Ok(()) => queue.patience = None,
                Err(wait) => match self.expired(queue, wait) {
                    Some(status) => {
                        first.with_request(|request, _| self.end_with(queue, request, Some(status)));
                    }
                    None => {
                        queue.waiting.push_front(first);
                        break;
                    }
                },
            }
        }
        self.waiting.store(queue.waiting.len(), Relaxed);
        if queue.waiting.is_empty() && queue.reading.is_empty() {
            self.core.want_no_more(Attention::STUCK);
        }
    }

    /// Returns the status of the first waiting request if `wait` has lasted too long.
    fn expired(&self, queue: &mut SendState, wait: Wait) -> Option<CompletionStatus> {
        let deadline = match queue.patience {
            Some((reason, deadline)) if reason == wait => deadline,
            _ => {
                let deadline = self.patience(wait);
                queue.patience = Some((wait, deadline));
                if let Some(deadline) = deadline {
                    self.core.notify_at(deadline);
                }
                deadline
            }
        };
        if deadline.is_none_or(|deadline| Instant::now() < deadline) {
            return None;
        }
        Some(match wait {
            Wait::Receive => CompletionStatus::RnrRetryExceeded,
            Wait::Connection | Wait::Room => CompletionStatus::RetryExceeded,
        })
    }

    /// Returns the time until which a request may wait.
    fn patience(&self, wait: Wait) -> Option<Instant> {
        let settings = self.core.settings()?;
        let patience = match wait {
            Wait::Receive => {
                receiver_patience(settings, self.core.connection().map_or(0, |peer| peer.end.rnr_timer()))
            }
            Wait::Connection => connection_patience(settings),
            // The peer's own death or end bounds this wait, and the pings of the layers above.
            Wait::Room => None,
        };
        Some(Instant::now() + patience?)
    }

    /// Returns the status of a request that could not be carried out before the queue pair ended.
    fn status_of_end(&self, queue: &SendState) -> CompletionStatus {
        if queue.failed {
            return CompletionStatus::WorkRequestFlushed;
        }
        let peer_has_ended = self.core.peer_has_ended();
        let failure = self.core.connection().and_then(|connection| connection.end.failure());
        match failure {
            // The requests before the refused one have completed, so this is the refused one.
            Some(failure) => failure.status,
            None if peer_has_ended => CompletionStatus::RetryExceeded,
            None => CompletionStatus::WorkRequestFlushed,
        }
    }

    /// Carries out waiting requests, and moves completions to `sink`. Returns true if `sink` has no room for all of them.
    pub(super) fn poll(&self, sink: &mut Sink<'_>) -> bool {
        let mut queue = self.lock();
        self.ended.store(false, Relaxed);
        let more = self.take(&mut queue, sink);
        self.seen.store(queue.writer.freed(), Relaxed);
        if more {
            self.ended.store(true, Relaxed);
        }
        if !queue.waiting.is_empty() {
            self.run(&mut queue);
        }
        self.after(&mut queue);
        more
    }

    #[inline]
    fn take(&self, queue: &mut SendState, sink: &mut Sink<'_>) -> bool {
        let Some(connection) = self.core.connection() else {
            return self.flush(queue, sink);
        };
        // SYNC: the ends are noticed before the last look at the peer's progress.
        let peer_has_ended = self.core.peer_has_ended();
        if queue.writer.reclaim(connection.end.taken_word()).is_err() {
            self.violation();
        }
        let taken = queue.writer.freed();
        if !self.complete_reads(queue, sink) {
            return true;
        }
        while let Some(first) = queue.outstanding.front() {
            let status = match first.progress {
                Progress::InRing { end } | Progress::Pulled { end } if end <= taken => {
                    CompletionStatus::Success
                }
                Progress::Read => CompletionStatus::Success,
                Progress::Failed(status) => status,
                Progress::Flushed => self.status_of_end(queue),
                Progress::InRing { .. } | Progress::Pulled { .. } | Progress::Reading { .. } => break,
            };
            if sink.is_full() {
                return true;
            }
            self.complete_first(queue, status, sink);
        }
        if peer_has_ended || self.core.has_failed() {
            return self.flush(queue, sink);
        }
        false
    }

    /// Completes the READs that are done although requests without a completion before them are not, as far as the peer has shown.
    /// Returns false if `sink` has no room.
    fn complete_reads(&self, queue: &mut SendState, sink: &mut Sink<'_>) -> bool {
        while queue.reads_done > 0 {
            let ended = self.core.has_failed() || self.core.peer_has_ended();
            let silent = |it: &Outstanding| {
                !it.signaled && matches!(it.progress, Progress::InRing { .. } | Progress::Pulled { .. })
            };
            let found = queue.outstanding.iter().position(|it| it.progress == Progress::Read);
            let Some(index) = found else {
                queue.reads_done = 0;
                break;
            };
            if !ended && !queue.outstanding.range(..index).all(silent) {
                break;
            }
            if sink.is_full() {
                return false;
            }
            if let Some(done) = queue.outstanding.remove(index) {
                queue.reads_done -= 1;
                self.complete(queue, done, CompletionStatus::Success, sink);
            }
        }
        true
    }

    /// Completes the requests that can't be carried out any more.
    #[cold]
    fn flush(&self, queue: &mut SendState, sink: &mut Sink<'_>) -> bool {
        if !self.core.has_failed() && !self.core.peer_has_ended() {
            return false;
        }
        // SYNC: the end of the peer is noticed before the look at the record that it refused.
        let peer_has_ended = self.core.peer_has_ended();
        let failure = self.core.connection().and_then(|connection| connection.end.failure());
        while let Some(first) = queue.outstanding.front() {
            if sink.is_full() {
                return true;
            }
            let status = match (first.progress, failure) {
                (Progress::Failed(status), _) => status,
                (Progress::Read, _) => CompletionStatus::Success,
                (_, Some(_)) if queue.failed => CompletionStatus::WorkRequestFlushed,
                (
                    Progress::InRing { end } | Progress::Pulled { end } | Progress::Reading { end },
                    Some(failure),
                ) if end > failure.at => failure.status,
                // The peer takes the records of an end that fails, so this message will arrive.
                (Progress::InRing { .. }, None) if !peer_has_ended && !queue.failed => {
                    CompletionStatus::Success
                }
                _ => self.status_of_end(queue),
            };
            self.complete_first(queue, status, sink);
        }
        self.core.fail_requests();
        self.run(queue);
        !queue.outstanding.is_empty()
    }

    /// Takes the first outstanding request, and adds its completion.
    #[inline]
    fn complete_first(&self, queue: &mut SendState, status: CompletionStatus, sink: &mut Sink<'_>) {
        if let Some(done) = queue.outstanding.pop_front() {
            if done.progress == Progress::Read {
                queue.reads_done -= 1;
            }
            self.complete(queue, done, status, sink);
        }
    }

    /// Adds the completion of a request.
    #[inline]
    fn complete(
        &self,
        queue: &mut SendState,
        done: Outstanding,
        status: CompletionStatus,
        sink: &mut Sink<'_>,
    ) {
        queue.unsignaled += 1;
        if matches!(done.progress, Progress::Reading { .. }) {
            queue.reading.pop_front();
        }
        if done.signaled {
            queue.signaled -= 1;
            self.core.send_queue.forget_completions(1);
        }
        if status != CompletionStatus::Success {
            queue.failed = true;
            self.core.fail_requests();
        } else if !done.signaled {
            return;
        }
        queue.freed += std::mem::take(&mut queue.unsignaled);
        sink.push(WorkCompletion {
            wr_id: done.wr_id,
            status,
            opcode: done.opcode,
            byte_len: 0,
            immediate: None,
            queue_pair: QueuePairNumber(self.core.number()),
        });
    }

    /// Stores the bytes of a record with data of a READ. Returns false if no READ waits for them.
    ///
    /// # Safety
    /// - `from` must be valid for reading `length` bytes.
    pub(super) unsafe fn store_read(&self, from: *const u8, length: u64, last: bool) -> bool {
        let mut queue = self.lock();
        let queue = &mut *queue;
        let Some(reading) = queue.reading.front_mut() else { return false };
        // SAFETY: `from` is valid, as the caller promises.
        let stored = unsafe { reading.store(&self.core.domain, from, length, last) };
        match stored {
            Ok(complete) => {
                if complete {
                    queue.finish_read();
                    self.ended.store(true, Relaxed);
                    // The poller of sends may sleep: it did not look since, or it is another one than that of the records.
                    self.core.send_queue.notify();
                }
                true
            }
            Err(status) => {
                if let Some(first) =
                    queue.outstanding.iter_mut().find(|it| matches!(it.progress, Progress::Reading { .. }))
                {
                    first.progress = Progress::Failed(status);
                    queue.reading.pop_front();
                    self.ended.store(true, Relaxed);
                }
                self.core.fail();
                status != CompletionStatus::Fatal
            }
        }
    }

    /// Puts bytes for a READ of the peer into the ring: a piece of `left` bytes at `from`. Returns the number of bytes; `None` if
    /// there is no room now.
    ///
    /// # Safety
    /// - `from` must be valid for reading `left` bytes.
    pub(super) unsafe fn serve(
        &self,
        queue: &mut SendState,
        connection: &Connection,
        from: *const u8,
        left: u64,
    ) -> Option<u64> {
        let chunk = self.chunk(queue, connection, left)?;
        let place = queue.writer.reserve(self.core.end.ring(), chunk)?;
        let to = self.core.end.payload(place.payload(), chunk)?;
        // SAFETY:
        // - `to` is in the ring of our own end, which only this thread writes while the send queue is locked; and
        // - `from` is valid, as the caller promises.
        unsafe { crate::copy_bytes(from, to, chunk as usize) };
        let header = Header {
            kind: Kind::ReadData,
            flags: Flags::default().with_if(Flags::LAST, chunk == left),
            length: chunk as u32,
            immediate: 0,
            address: 0,
            key: 0,
            total: left,
        };
        queue.writer.publish(self.core.end.ring(), &place, &header);
        (queue.unannounced, queue.unannounced_news) = (true, true);
        Some(chunk)
    }

    /// Tells the peer of the bytes that [`serve`](Self::serve) put into the ring.
    pub(super) fn served(&self, queue: &mut SendState) {
        self.after(queue);
    }

    #[cold]
    fn violation(&self) {
        super::warn_of_violation(&self.core);
        self.core.fail();
    }
}

impl SendState {
    /// Returns whether the peer has a receive for the next message.
    #[inline]
    fn has_receive(&mut self, connection: &Connection) -> bool {
        let left = |state: &Self| state.receives_posted.wrapping_sub(state.receives_taken);
        if left(self) == 0 {
            self.receives_posted = connection.end.posted();
        }
        left(self) != 0
    }

    /// Notes that the oldest READ that was not complete is complete.
    fn finish_read(&mut self) {
        self.reading.pop_front();
        let first = self.outstanding.iter_mut().find(|it| matches!(it.progress, Progress::Reading { .. }));
        if let Some(first) = first {
            first.progress = Progress::Read;
            self.reads_done += 1;
        }
    }
}

/// The target of a message.
#[derive(Clone, Copy, Debug)]
struct Target {
    kind: Kind,
    remote: Option<RemoteSegment>,
    immediate: Option<u32>,
}

impl Operation<'_> {
    fn opcode(&self) -> CompletionOpcode {
        match self {
            Self::Send { .. } => CompletionOpcode::Send,
            Self::Write { .. } => CompletionOpcode::Write,
            Self::Read { .. } => CompletionOpcode::Read,
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
