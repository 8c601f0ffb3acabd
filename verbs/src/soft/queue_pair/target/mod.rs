//! The target of the peer's requests: this side takes the records of the peer's ring, checks them against its
//! own records, and writes its own memory. The peer writes nothing here.

mod messages;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};

use super::core::{Connection, Core};
use super::message::{Message, Posted, Pull, Receives};
use super::pulls::Pulls;
use super::send::SendQueue;
use crate::soft::biased_lock::BiasedLock;
use crate::soft::completion_queue::{Remaining, Sink};
use crate::soft::forked;
use crate::soft::shared::end::{Failure, Reader};
use crate::soft::shared::ring::{Flags, Kind, LINE, Record};
use crate::{
    Access, CompletionOpcode, CompletionStatus, PostError, PostErrorKind, QueuePairNumber, QueuePairState,
    ReceiveRequest, WorkCompletion,
};

/// Most bytes that one visit moves, so that one connection does not delay the others for long.
const VISIT_BYTES: u64 = 1 << 20;
/// Most records of one visit.
const VISIT_RECORDS: usize = 256;
/// Bytes of records after which a visit tells the peer of its progress before its end.
const REPORT_BYTES: u64 = 4 << 10;

/// The target of the peer's requests, and the receive queue.
#[derive(Debug)]
pub(super) struct Target {
    core: Arc<Core>,
    state: BiasedLock<TargetState>,
    /// Index in the peer's ring of the next record's tag, and the tag. A poll that does not find the tag does
    /// not lock `state`.
    next: AtomicUsize,
    tag: AtomicU64,
    /// Whether a visit has something to do even if there is no record.
    busy: AtomicBool,
    /// Whether READs of the peer have bytes left, which go through our ring.
    serves: AtomicBool,
    /// Whether the receives were flushed, after the queue pair failed.
    flushed: AtomicBool,
    /// The next visit waits here twice, with the target locked.
    #[cfg(test)]
    pause: std::sync::Mutex<Option<Arc<std::sync::Barrier>>>,
}

#[derive(Debug)]
struct TargetState {
    /// `None` until this side is connected.
    reader: Option<Reader>,
    receives: Receives,
    /// The message whose records are being taken.
    message: Option<Message>,
    /// The addresses in the peer's memory from which the message is being taken.
    pull: Option<Pull>,
    pulls: Pulls,
    /// READs of the peer that wait for room in our ring.
    served: VecDeque<Served>,
    /// Completions that the device's thread found.
    ready: VecDeque<WorkCompletion>,
}

/// A READ of the peer.
#[derive(Clone, Copy, Debug)]
struct Served {
    /// The position of its record in the peer's ring.
    at: u64,
    address: u64,
    key: u32,
    left: u64,
}

/// The destination of completions.
#[derive(Debug)]
pub(super) enum Output<'a, 'b> {
    /// A poll's array.
    Poll(&'a mut Sink<'b>),
    /// The queue pair, because this thread polls no completion queue.
    Keep,
    /// The same, for the device's thread.
    Unpolled {
        /// Set if this visit has found a record, or if READs of the peer have bytes left. Completions that no
        /// poll has taken do not count: the thread that left them may check again and again, and poll seldom.
        found_work: bool,
    },
}

/// The reason why a record can't be taken.
#[derive(Clone, Copy, Debug)]
enum Fault {
    /// The peer did what no well-behaved peer does.
    Violation,
    /// The peer's request is refused with a status, which the peer sees. If the request takes a receive, that
    /// receive completes with the second status.
    Refused(CompletionStatus, Option<CompletionStatus>),
}

impl Target {
    pub(super) fn new(core: &Arc<Core>) -> Self {
        let capacity = &core.capacity;
        let state = TargetState {
            reader: None,
            receives: Receives::new(capacity.receive_requests, capacity.receive_segments),
            message: None,
            pull: None,
            pulls: Pulls::default(),
            served: VecDeque::new(),
            ready: VecDeque::new(),
        };
        let (next, tag) = (AtomicUsize::new(usize::MAX), AtomicU64::new(0));
        let [busy, serves, flushed] = [const { AtomicBool::new(false) }; 3];
        Self {
            core: Arc::clone(core),
            state: BiasedLock::new(state),
            next,
            tag,
            busy,
            serves,
            flushed,
            #[cfg(test)]
            pause: std::sync::Mutex::default(),
        }
    }

    /// Begins to check for records, because this side is connected.
    pub(super) fn connect(&self) {
        let mut state = self.state.lock();
        if let (None, Some(connection)) = (&state.reader, self.core.connection()) {
            let reader = Reader::new(connection.end.ring_bytes(), connection.end.key());
            self.note_next_record(&reader);
            state.reader = Some(reader);
        }
    }

    fn note_next_record(&self, reader: &Reader) {
        let (next, tag) = reader.next();
        self.tag.store(tag, Relaxed);
        self.next.store(next, Relaxed);
    }

    /// Returns whether a visit may have something to do.
    #[inline]
    pub(super) fn has_news(&self) -> bool {
        self.busy.load(Relaxed)
            || self.has_record()
            || (self.core.has_failed() && !self.flushed.load(Relaxed))
    }

    /// Returns whether the peer has published a record that was not taken.
    #[inline]
    pub(super) fn has_record(&self) -> bool {
        self.core.connection().is_some_and(|connection| {
            let next = self.next.load(Relaxed);
            let tag = self.tag.load(Relaxed);
            let found = connection.end.ring().get(next).is_some_and(|word| word.load(Relaxed) == tag);
            if found {
                // The record's second line comes from the other core meanwhile.
                connection.end.prefetch(next + LINE);
            }
            found
        })
    }

    /// Returns whether a visit has left something to do, such as completions that no poll has taken.
    #[inline]
    pub(super) fn is_busy(&self) -> bool {
        self.busy.load(Relaxed)
    }

    /// Returns whether READs of the peer have bytes left at the end of the last visit.
    #[inline]
    pub(super) fn serves(&self) -> bool {
        self.serves.load(Relaxed)
    }

    /// Has the next poll visit this side, because its state has changed.
    pub(super) fn check_again(&self) {
        self.busy.store(true, Relaxed);
    }

    /// Waits until no thread is carrying out records.
    pub(super) fn wait_for_visit(&self) {
        drop(self.state.lock());
    }

    /// Posts receives in order.
    pub(super) fn post(&self, requests: &[ReceiveRequest<'_>]) -> Result<(), PostError> {
        if self.core.domain.device.is_forked() {
            // Before the lock, which a thread of the parent may have held when the process forked.
            return forked::refuse(requests.len());
        }
        let mut state = self.state.lock();
        let before = state.receives.posted();
        let result = requests.iter().enumerate().try_for_each(|(index, request)| {
            self.post_one(&mut state, request).map_err(|kind| PostError { index, kind })
        });
        let posted = state.receives.posted();
        if posted != before {
            self.core.show_posted(posted);
        }
        drop(state);
        // SYNC: checked after posting. Either the thread that moves to Error sees the receive when it
        // flushes, or this thread sees the Error.
        if self.core.has_failed() {
            self.check_again();
            self.core.notify();
        }
        result
    }

    fn post_one(&self, state: &mut TargetState, request: &ReceiveRequest<'_>) -> Result<(), PostErrorKind> {
        if self.core.state() == QueuePairState::Reset {
            return Err(PostErrorKind::State(QueuePairState::Reset));
        }
        if request.into.len() > self.core.capacity.receive_segments as usize {
            return Err(PostErrorKind::TooManySegments);
        }
        if state.receives.outstanding() >= self.core.capacity.receive_requests {
            return Err(PostErrorKind::QueueFull);
        }
        state.receives.push(request.wr_id, request.into);
        Ok(())
    }

    /// Has the next visit wait twice at `barrier`, with the target locked.
    #[cfg(test)]
    pub(super) fn pause_next_visit(&self, barrier: Arc<std::sync::Barrier>) {
        *crate::panics::lock(&self.pause) = Some(barrier);
    }

    #[cfg(test)]
    fn pause_visit(&self) {
        let pause = crate::panics::lock(&self.pause).take();
        if let Some(pause) = pause {
            pause.wait();
            pause.wait();
        }
    }

    /// Takes the records that have come, within the limits of a visit. Returns [`Remaining::Work`], too, if
    /// `output` has no room for the rest.
    pub(super) fn visit(&self, sends: &SendQueue, output: &mut Output<'_, '_>) -> Remaining {
        let mut state = self.state.lock();
        let state = &mut *state;
        #[cfg(test)]
        self.pause_visit();
        let before = state.position();
        while let Output::Poll(sink) = output
            && !state.ready.is_empty()
        {
            if sink.is_full() {
                return Remaining::Work;
            }
            state.ready.pop_front().into_iter().for_each(|completion| sink.push(completion));
        }
        let remaining = match self.core.connection() {
            Some(connection) => {
                // SYNC: the end of the peer is noticed before the last check of its records.
                let peer_is_gone = self.core.peer_is_gone();
                let remaining = self.take_records(state, connection, sends, output);
                if peer_is_gone && remaining != Remaining::Work {
                    self.core.fail();
                }
                remaining
            }
            None => Remaining::Nothing,
        };
        let drained = self.core.is_closed() || self.core.has_failed() && remaining != Remaining::Work;
        let remaining = if drained { Remaining::work_if(self.flush(state, output)) } else { remaining };
        let more = remaining == Remaining::Work;
        let has_work = more || !state.ready.is_empty() || !state.served.is_empty() || state.message_waits();
        self.busy.store(has_work, Relaxed);
        self.serves.store(!state.served.is_empty(), Relaxed);
        if let Output::Unpolled { found_work } = output {
            *found_work |= more || !state.served.is_empty() || state.position() != before;
        }
        remaining
    }

    fn take_records(
        &self,
        state: &mut TargetState,
        connection: &Connection,
        sends: &SendQueue,
        output: &mut Output<'_, '_>,
    ) -> Remaining {
        let Some(mut reader) = state.reader.take() else { return Remaining::Nothing };
        let (mut bytes, mut records, mut more, mut awaited) = (0, 0, false, false);
        let mut read_continues = false;
        let mut reported = reader.position();
        while !self.core.is_closed() {
            if bytes >= VISIT_BYTES || records >= VISIT_RECORDS || output.is_full(state, &self.core) {
                more = true;
                break;
            }
            let at = reader.position();
            let result = if state.pull.is_some() {
                if at != reported {
                    // A pull takes long, and the peer may wait for the records before it.
                    reported = at;
                    self.core.report_taken(connection, reported, false);
                }
                self.continue_pull(state, connection, &mut bytes, output).map(|done| match done {
                    Some(record) => {
                        reader.advance(&record);
                        records += 1;
                        awaited = true;
                    }
                    None => more = true,
                })
            } else {
                match reader.peek(connection.end.ring()) {
                    Ok(None) => break,
                    Ok(Some(record)) => {
                        let result = self.take(state, connection, sends, (&record, at), output);
                        if result.is_ok() && state.pull.is_none() {
                            reader.advance(&record);
                            records += 1;
                            awaited |= record.header.flags.contains(Flags::AWAITED);
                            bytes += u64::from(record.header.length);
                            if record.header.kind == Kind::ReadData {
                                read_continues = !record.header.flags.contains(Flags::LAST);
                            }
                        }
                        result
                    }
                    Err(_) => Err(Fault::Violation),
                }
            };
            self.core.carried_out(reader.position());
            if let Err(fault) = result {
                // The records before this one were carried out.
                self.core.report_taken(connection, reader.position(), false);
                self.fail(state, at, fault, output);
            } else if reader.position() - reported >= REPORT_BYTES {
                // The peer may write the next records meanwhile.
                reported = reader.position();
                self.core.report_taken(connection, reported, false);
            }
        }
        self.note_next_record(&reader);
        if reader.position() != reported || awaited {
            self.core.report_taken(connection, reader.position(), awaited);
        }
        let rest_follows = bytes > 0 && (state.message.is_some() || read_continues);
        let mut remaining = Remaining::message_if(rest_follows).max(Remaining::work_if(more));
        // A queue pair in Error uses no memory any more: its regions may go (see `Core::end`).
        if !state.served.is_empty() && !self.core.has_failed() {
            remaining = remaining.max(self.serve(state, connection, sends));
        }
        state.reader = Some(reader);
        remaining
    }

    /// Carries out one record.
    #[inline]
    fn take(
        &self,
        state: &mut TargetState,
        connection: &Connection,
        sends: &SendQueue,
        (record, at): (&Record, u64),
        output: &mut Output<'_, '_>,
    ) -> Result<(), Fault> {
        let header = &record.header;
        let length = u64::from(header.length);
        let from = connection.end.payload(record.payload, length).ok_or(Fault::Violation)?.cast_const();
        match header.kind {
            Kind::Send | Kind::Write if header.flags.is_whole() => {
                self.take_whole(state, record, from, output)
            }
            Kind::Send | Kind::Write => {
                if header.flags.contains(Flags::FIRST) {
                    let message = self.begin(state, record)?;
                    if header.flags.contains(Flags::PULL) {
                        let pull = Pull::new(record, connection.end.ring(), message.total);
                        state.pull = Some(pull.ok_or(Fault::Violation)?);
                        state.message = Some(message);
                        return Ok(());
                    }
                    state.message = Some(message);
                }
                self.store(state, record, from, length)?;
                if header.flags.contains(Flags::LAST) {
                    let message = state.message.take().ok_or(Fault::Violation)?;
                    self.finish(state, &message, output)?;
                }
                Ok(())
            }
            Kind::Read => self.begin_read(state, connection, record, at),
            Kind::ReadData => {
                let last = header.flags.contains(Flags::LAST);
                // SAFETY: the payload lies in the peer's end, which stays mapped as long as the connection.
                let stored = unsafe { sends.store_read(from, length, last) };
                if stored { Ok(()) } else { Err(Fault::Violation) }
            }
            Kind::Skip => Ok(()),
        }
    }

    /// Checks that the peer may use a range of our memory.
    #[inline]
    fn check(&self, key: u32, address: u64, length: u64, access: Access) -> Result<(), Fault> {
        let good = self.core.access().contains(access)
            && self.core.domain.find_for_peer(self.core.number, key, address, length, access);
        if good { Ok(()) } else { Err(Fault::Refused(CompletionStatus::RemoteAccess, None)) }
    }

    /// Ends the connection because of the record at position `at`.
    #[cold]
    fn fail(&self, state: &mut TargetState, at: u64, fault: Fault, output: &mut Output<'_, '_>) {
        (state.message, state.pull) = (None, None);
        // The record that failed must not be taken again, even if this side was taking the last records of
        // the peer.
        self.core.stop_draining();
        match fault {
            Fault::Violation => {
                // A peer that has ended takes back the memory of its last messages, which may still be in its
                // ring.
                if !self.core.peer_has_ended() {
                    self.core.warn_of_violation();
                }
                self.core.fail();
            }
            Fault::Refused(status, own) => {
                if let (Some(status), Some(posted)) = (own, state.receives.first()) {
                    state.receives.pop();
                    let completion = WorkCompletion { status, ..self.flushed(&posted) };
                    output.push(state, || completion);
                }
                self.core.refuse(Failure { at, status });
            }
        }
    }

    /// Completes the receives that no message can take any more. Returns true if there are more than `output`
    /// has room for.
    #[cold]
    fn flush(&self, state: &mut TargetState, output: &mut Output<'_, '_>) -> bool {
        (state.message, state.pull) = (None, None);
        state.served.clear();
        while let Some(posted) = state.receives.first() {
            if output.is_full(state, &self.core) {
                return true;
            }
            state.receives.pop();
            let completion = self.flushed(&posted);
            output.push(state, || completion);
        }
        self.flushed.store(true, Relaxed);
        false
    }

    fn flushed(&self, posted: &Posted) -> WorkCompletion {
        WorkCompletion {
            wr_id: posted.wr_id,
            status: CompletionStatus::WorkRequestFlushed,
            opcode: CompletionOpcode::Receive,
            queue_pair: QueuePairNumber(self.core.number),
            ..WorkCompletion::EMPTY
        }
    }
}

impl TargetState {
    /// Returns the position in the peer's ring up to which records were taken.
    #[inline]
    fn position(&self) -> u64 {
        self.reader.as_ref().map_or(0, Reader::position)
    }

    /// Returns whether a message continues without a new record.
    fn message_waits(&self) -> bool {
        self.pull.is_some()
    }
}

impl Output<'_, '_> {
    #[inline]
    fn is_full(&self, state: &TargetState, core: &Core) -> bool {
        match self {
            Self::Poll(sink) => sink.is_full(),
            Self::Keep | Self::Unpolled { .. } => state.ready.len() > core.capacity.receive_requests as usize,
        }
    }

    /// Adds the completion that `make` makes. A completion that goes to a poll is made there.
    #[inline(always)]
    fn push(&mut self, state: &mut TargetState, make: impl Fn() -> WorkCompletion) {
        match self {
            Self::Poll(sink) => sink.push(make()),
            Self::Keep | Self::Unpolled { .. } => state.ready.push_back(make()),
        }
    }
}
