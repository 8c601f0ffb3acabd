//! The send queue. `post_send` puts requests into the ring at once. A request waits if the ring is full, if
//! the peer has no receive posted, or if the peer is not connected yet. All later requests then wait, too.
//! How long a request may wait, by the retries of the settings, is in `complete`.

mod attempt;
mod complete;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

use super::core::{Connection, Core, Debt};
use super::outstanding::{Outstanding, Progress, Reading, Waiting};
use super::pulls::Pulls;
use crate::soft::biased_lock::{BiasedGuard, BiasedLock};
use crate::soft::device::MAX_MESSAGE;
use crate::soft::forked;
use crate::soft::shared::attention::{Attention, Watch};
use crate::soft::shared::end::{PairEnd, Writer};
use crate::soft::shared::platform::{Native, Shipping};
use crate::soft::shared::ring::{Flags, Header, Kind, RingSlot};
use crate::{
    CompletionStatus, LocalSegment, Operation, Payload, PostError, PostErrorKind, QueuePairState, SendRequest,
};

/// The send queue of a queue pair.
#[derive(Debug)]
pub(super) struct SendQueue {
    core: Arc<Core>,
    state: BiasedLock<SendState>,
    /// Number of requests that have no completion yet. A poll that finds 0 here does not lock `state`.
    pending: AtomicUsize,
    /// Number of requests whose progress a sleeping poller waits for: those that are signalled, and those
    /// that wait.
    awaited: AtomicUsize,
    /// The position that the peer had taken at the last poll.
    seen: AtomicU64,
    /// Whether a request has ended without the peer: it failed, or was a READ that is complete.
    ended: AtomicBool,
    /// Number of requests that wait. A poll that finds 0 here does not try them.
    waiting: AtomicUsize,
    /// The position that the peer had taken before requests, and before bytes for READs of the peer, last
    /// found no room in the ring. [`NOT_STUCK`] if none of them waits for room.
    requests_stuck_at: AtomicU64,
    reads_stuck_at: AtomicU64,
}

/// No position of a ring.
const NOT_STUCK: u64 = u64::MAX;

/// The requests of a send queue, and their progress.
#[derive(Debug)]
pub(super) struct SendState {
    writer: Writer,
    /// Requests posted, and slots of the queue that polled completions have freed.
    posted: u64,
    freed: u64,
    /// Number of requests done since the last completion.
    unsignaled: u64,
    /// Number of the first outstanding requests that are counted as done already, because a READ after them is
    /// done.
    overtaken: usize,
    waiting: VecDeque<Waiting>,
    outstanding: VecDeque<Outstanding>,
    /// Number of outstanding READs that are done.
    reads_done: usize,
    /// READs whose bytes come through the peer's ring.
    reading: VecDeque<Reading>,
    /// Whether READs of the peer have bytes left, which go through our ring.
    serves: bool,
    /// The end of the record of the last WRITE.
    last_write: u64,
    pulls: Pulls,
    /// The peer's receives that our messages have taken, and those that it had posted at the last check.
    receives_taken: u32,
    receives_posted: u32,
    /// Number of signalled requests that were started and have no completion yet.
    signaled: usize,
    /// Whether a request could not begin, so that no later request may begin.
    stopped: bool,
    /// Whether a poll has taken a failure.
    failed: bool,
    /// Reason why the first waiting request waits, and the deadline.
    retry_until: Option<(Wait, Option<Instant>)>,
    /// Whether records were published that the peer was not notified of.
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
            overtaken: 0,
            signaled: 0,
            waiting: VecDeque::new(),
            outstanding: VecDeque::new(),
            reads_done: 0,
            reading: VecDeque::new(),
            serves: false,
            last_write: 0,
            pulls: Pulls::default(),
            receives_taken: 0,
            receives_posted: 0,
            stopped: false,
            failed: false,
            retry_until: None,
            unannounced: false,
            unannounced_news: false,
        };
        let [pending, awaited, waiting] = [const { AtomicUsize::new(0) }; 3];
        let (seen, ended) = (AtomicU64::new(0), AtomicBool::new(false));
        let [requests_stuck_at, reads_stuck_at] = [const { AtomicU64::new(NOT_STUCK) }; 2];
        let (core, state) = (Arc::clone(core), BiasedLock::new(state));
        Self { core, state, pending, awaited, seen, ended, waiting, requests_stuck_at, reads_stuck_at }
    }

    /// Returns whether a poll may have something to do. Takes no lock.
    #[inline]
    pub(super) fn has_news(&self) -> bool {
        let pending = self.pending.load(Relaxed);
        pending != 0 && self.has_progress(pending)
    }

    #[inline]
    fn has_progress(&self, pending: usize) -> bool {
        // Requests without a completion are forgotten when there are many, or together with the next one that
        // has a completion.
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

    /// Returns whether the peer has taken records since requests, or bytes for its READs, found no room.
    /// Takes no lock.
    #[inline]
    pub(super) fn has_new_room(&self) -> bool {
        let stuck_at = [&self.requests_stuck_at, &self.reads_stuck_at].map(|at| at.load(Relaxed));
        stuck_at != [NOT_STUCK; 2]
            && self.core.connection().is_some_and(|connection| {
                let taken = connection.end.taken_word().load(Relaxed);
                stuck_at.iter().any(|at| *at != NOT_STUCK && *at != taken)
            })
    }

    /// Returns whether the peer has made progress that a poller waits for and has not seen.
    pub(super) fn has_unseen_progress(&self) -> bool {
        self.awaited.load(Relaxed) != 0
            && self.core.connection().is_some_and(|connection| {
                connection.end.taken_word().load(Relaxed) != self.seen.load(Relaxed)
            })
    }

    /// Returns whether an event is wanted when the peer makes progress. The caller has armed the queue, then
    /// has locked the queue once.
    pub(super) fn wants_progress(&self) -> bool {
        self.awaited.load(Relaxed) != 0
    }

    /// Locks the state.
    pub(super) fn lock(&self) -> BiasedGuard<'_, SendState> {
        self.state.lock()
    }

    /// Posts requests in order, and carries them out as far as possible.
    pub(super) fn post(&self, requests: &[SendRequest<'_>]) -> Result<(), PostError> {
        if self.core.domain.device.is_forked() {
            // Before the lock, which a thread of the parent may have held when the process forked.
            return forked::refuse(requests.len());
        }
        let mut queue = self.lock();
        if !queue.waiting.is_empty() {
            self.run(&mut queue);
        }
        let mut result = Ok(());
        for (index, request) in requests.iter().enumerate() {
            let total = match self.check_post(&queue, request) {
                Ok(total) => total,
                Err(kind) => {
                    result = Err(PostError { index, kind });
                    break;
                }
            };
            queue.posted += 1;
            if request.signaled && !self.core.send_queue.expect_completion() {
                self.core.fail();
            }
            if !self.post_short(&mut queue, request, total) {
                self.post_one(&mut queue, request);
            }
        }
        self.after(&mut queue);
        self.after_post(&queue);
        if !queue.waiting.is_empty() {
            // SYNC: after the store of `awaited`. The poller may sleep; it asks for an event when it arms its
            // queue again.
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

    /// Gives the slots of the completion queue back, because the queue pair is destroyed.
    pub(super) fn forget(&self) {
        let queue = self.lock();
        let waiting = queue.waiting.iter().filter(|waiting| waiting.signaled).count();
        let started = queue.outstanding.iter().filter(|outstanding| outstanding.signaled).count();
        self.core.send_queue.forget_completions(waiting + started);
    }

    /// Tells the peer of new records, and pollers of requests without a completion.
    #[inline]
    fn after(&self, queue: &mut SendState) {
        self.pending.store(queue.waiting.len() + queue.outstanding.len(), Relaxed);
        self.awaited.store(queue.waiting.len() + queue.signaled, Relaxed);
        if std::mem::take(&mut queue.unannounced) {
            let news = std::mem::take(&mut queue.unannounced_news);
            let debt = if news { Debt::NEWS } else { Debt::WRITES };
            let is_called = self.core.announce_news(queue.writer.head(), debt);
            self.core.guard_news(is_called, debt);
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
        // A READ may be complete already, because this side copies the bytes while it posts the request.
        if self.ended.load(Relaxed) || self.has_unseen_progress() {
            self.core.send_queue.notify();
        }
    }

    /// Returns the bytes of a request that may be posted.
    #[inline]
    fn check_post(&self, queue: &SendState, request: &SendRequest<'_>) -> Result<u64, PostErrorKind> {
        if !self.core.is_ready_to_send() {
            match self.core.state() {
                QueuePairState::Rts | QueuePairState::Error => {}
                state => return Err(PostErrorKind::State(state)),
            }
        }
        let total = match request.operation {
            Operation::Send { data: data @ Payload::Inline(_), .. }
            | Operation::Write { data: data @ Payload::Inline(_), .. } => {
                let total = data.length();
                if total > self.core.capacity.inline.into() {
                    return Err(PostErrorKind::InlineTooLong);
                }
                total
            }
            Operation::Send { data: Payload::Registered(segments), .. }
            | Operation::Write { data: Payload::Registered(segments), .. }
            | Operation::Read { into: segments, .. } => {
                if segments.len() > self.core.capacity.send_segments as usize {
                    return Err(PostErrorKind::TooManySegments);
                }
                let total = LocalSegment::total(segments);
                if total > MAX_MESSAGE {
                    return Err(PostErrorKind::MessageTooLong);
                }
                total
            }
        };
        if queue.posted - queue.freed >= self.core.capacity.send_requests.into() {
            return Err(PostErrorKind::QueueFull);
        }
        Ok(total)
    }

    fn post_one(&self, queue: &mut SendState, request: &SendRequest<'_>) {
        let mut done = 0;
        if queue.waiting.is_empty() && !queue.stopped && !self.core.has_failed() {
            match self.attempt(queue, request, &mut done) {
                Ok(()) => return,
                Err(wait) => queue.retry_until = Some((wait, self.deadline(wait))),
            }
        }
        self.wait(queue, request, done);
    }

    /// Keeps a request until it can continue.
    #[cold]
    fn wait(&self, queue: &mut SendState, request: &SendRequest<'_>, done: u64) {
        let first = queue.waiting.is_empty();
        queue.waiting.push_back(Waiting::new(request, done));
        self.waiting.store(queue.waiting.len(), Relaxed);
        // SYNC: pairs with the fence of `Guarded::lower`, so that a guard that ends sees this request.
        Attention::fence::<Native, Shipping>();
        self.core.guard(Watch::Often);
        if first {
            self.core.want(Attention::STUCK);
            Attention::fence::<Native, Shipping>();
            self.run(queue);
            if let Some((_, Some(deadline))) = queue.retry_until {
                self.core.notify_at(deadline);
            }
        } else if self.core.has_failed() {
            self.core.notify();
        }
    }

    /// Ends a request with a failure, after the requests before it. Without a status, the end of the queue
    /// pair is the reason.
    #[cold]
    fn end_with(&self, queue: &mut SendState, request: &SendRequest<'_>, status: Option<CompletionStatus>) {
        queue.started(request, status.map_or(Progress::Flushed, Progress::Failed));
        queue.stopped = true;
        self.ended.store(true, Relaxed);
        // The poll that takes the failure moves the queue pair to Error. Until then the requests before it
        // may still succeed.
        self.core.notify();
    }

    /// Runs the waiting requests in order, until a request has to wait longer.
    fn run(&self, queue: &mut SendState) {
        // Read before the attempts, which see this position or a later one. A thread that sees another
        // position later runs the requests again, so a run may be spurious, but none is lost.
        let taken = self.taken_by_peer();
        let mut stuck_at = NOT_STUCK;
        while let Some(mut first) = queue.waiting.pop_front() {
            if queue.stopped || self.core.has_failed() || self.core.peer_has_ended() {
                first.with_request(|request, _| self.end_with(queue, request, None));
                continue;
            }
            match first.with_request(|request, done| self.attempt(queue, request, done)) {
                Ok(()) => queue.retry_until = None,
                Err(wait) => match self.expired(queue, wait) {
                    Some(status) => {
                        first.with_request(|request, _| self.end_with(queue, request, Some(status)));
                    }
                    None => {
                        queue.waiting.push_front(first);
                        if wait == Wait::Room {
                            stuck_at = taken;
                        }
                        break;
                    }
                },
            }
        }
        self.requests_stuck_at.store(stuck_at, Relaxed);
        self.waiting.store(queue.waiting.len(), Relaxed);
        self.want_no_needless_progress(queue);
    }

    /// Returns the position up to which the peer shows that it has taken our records.
    pub(super) fn taken_by_peer(&self) -> u64 {
        self.core.connection().map_or(0, |connection| connection.end.taken_word().load(Relaxed))
    }

    /// Takes the request for progress of the peer back if neither a request of this side nor a READ of the
    /// peer waits for it.
    fn want_no_needless_progress(&self, queue: &SendState) {
        if queue.waiting.is_empty() && !queue.serves {
            self.core.want_no_more(Attention::STUCK);
        }
    }

    #[cold]
    fn violation(&self) {
        self.core.warn_of_violation();
        self.core.fail();
    }
}

impl SendState {
    /// Publishes a record, and notes what follows from it for the peer's receives, for READs and for the news
    /// to tell.
    #[inline]
    fn publish(&mut self, end: &PairEnd, slot: &RingSlot, header: &Header) {
        self.writer.publish(end.ring(), slot, header);
        let is_write = header.kind == Kind::Write;
        let has_immediate = header.flags.contains(Flags::IMMEDIATE);
        self.unannounced = true;
        self.unannounced_news |= !is_write || has_immediate;
        if header.flags.contains(Flags::FIRST) && (header.kind == Kind::Send || has_immediate) {
            self.receives_taken = self.receives_taken.wrapping_add(1);
        }
        if header.flags.contains(Flags::LAST) && is_write {
            self.last_write = self.writer.head();
        }
    }

    /// Notes a request that was started.
    #[inline]
    fn started(&mut self, request: &SendRequest<'_>, progress: Progress) {
        self.signaled += usize::from(request.signaled);
        self.outstanding.push_back(Outstanding {
            wr_id: request.wr_id,
            opcode: request.operation.opcode(),
            signaled: request.signaled,
            progress,
        });
    }

    /// Returns whether the peer has a receive for the next message.
    #[inline]
    fn has_receive(&mut self, connection: &Connection) -> bool {
        let left = |state: &Self| state.receives_posted.wrapping_sub(state.receives_taken);
        if left(self) == 0 {
            self.receives_posted = connection.end.posted();
        }
        left(self) != 0
    }

    /// Takes the first outstanding request, which is done.
    #[inline]
    fn pop_first(&mut self) -> Option<Outstanding> {
        let done = self.outstanding.pop_front()?;
        if self.overtaken > 0 {
            self.overtaken -= 1;
        } else {
            self.unsignaled += 1;
        }
        Some(done)
    }

    /// Takes the outstanding READ at `index`, which is done. If it overtakes requests without a completion,
    /// they count as done, too, because its completion frees the slots of all requests before it.
    fn pop_read(&mut self, index: usize, overtakes: bool) -> Option<Outstanding> {
        let done = self.outstanding.remove(index)?;
        self.reads_done -= 1;
        self.unsignaled += 1;
        if overtakes {
            // Those that an earlier READ has overtaken are the first.
            self.unsignaled += (index - self.overtaken) as u64;
            self.overtaken = index;
        }
        Some(done)
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
