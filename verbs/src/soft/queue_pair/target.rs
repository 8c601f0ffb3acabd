//! The target of the peer's requests: this end takes the records of the peer's ring, checks them against its own records, and
//! writes its own memory. The peer writes nothing here.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use super::connection::Connection;
use super::core::Core;
use super::message::{Destination, Message, Pull};
use super::pulls::Pulls;
use super::receives::{Posted, Receives};
use super::send::SendQueue;
use super::source::{self, Stores, WORD};
use crate::soft::completion_queue::Sink;
use crate::soft::limits::{MAX_MESSAGE, MAX_READS};
use crate::soft::shared::attention::Attention;
use crate::soft::shared::end::{EndState, Failure, Reader};
use crate::soft::shared::mapping::Mapping;
use crate::soft::shared::platform::{Native, Shipping};
use crate::soft::shared::ring::{Flags, Kind, Record};
use crate::soft::shared::states::unless_revoked;
use crate::sync::lock;
use crate::{
    Access, CompletionOpcode, CompletionStatus, PostError, PostErrorKind, QueuePairNumber, QueuePairState,
    ReceiveRequest, WorkCompletion, copy_bytes,
};

/// Most bytes that one visit moves, so that one connection does not delay the others for long.
const VISIT_BYTES: u64 = 1 << 20;
/// Most records of one visit.
const VISIT_RECORDS: usize = 256;

/// The target of the peer's requests, and the receive queue.
#[derive(Debug)]
pub(super) struct Target {
    core: Arc<Core>,
    state: Mutex<TargetState>,
    /// Index in the peer's ring of the next record's tag, and the tag. A poll that does not find the tag does not lock `state`.
    next: AtomicUsize,
    tag: AtomicU64,
    /// Whether a visit has something to do even if there is no record.
    busy: AtomicBool,
    /// Whether the receives were flushed, after the queue pair failed.
    flushed: AtomicBool,
}

#[derive(Debug)]
struct TargetState {
    /// `None` until this end is connected.
    reader: Option<Reader>,
    receives: Receives,
    /// The message whose records are being taken.
    message: Option<Message>,
    /// The places in the peer's memory from which the message is being taken.
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

/// The place for completions.
#[derive(Debug)]
pub(super) enum Output<'a, 'b> {
    /// A poll's array.
    Poll(&'a mut Sink<'b>),
    /// The queue pair, because no thread polls.
    Keep,
}

/// The reason why a record can't be taken.
#[derive(Clone, Copy, Debug)]
enum Fault {
    /// The peer did what no well-behaved peer does.
    Violation,
    /// The peer's request is refused with a status, which the peer sees. If the request takes a receive, that receive completes
    /// with the second status.
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
        let (busy, flushed) = (AtomicBool::new(false), AtomicBool::new(false));
        Self { core: Arc::clone(core), state: Mutex::new(state), next, tag, busy, flushed }
    }

    /// Begins to look for records, because this end is connected.
    pub(super) fn connect(&self) {
        let mut state = lock(&self.state);
        if let (None, Some(connection)) = (&state.reader, self.core.connection()) {
            let reader = Reader::new(connection.end.ring_bytes(), connection.end.key());
            self.look_for_record_of(&reader);
            state.reader = Some(reader);
        }
    }

    fn look_for_record_of(&self, reader: &Reader) {
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
            connection.end.ring().get(next).is_some_and(|word| word.load(Relaxed) == tag)
        })
    }

    /// Returns whether a visit has left something to do, such as completions that no poll has taken.
    #[inline]
    pub(super) fn is_busy(&self) -> bool {
        self.busy.load(Relaxed)
    }

    /// Has the next poll visit this end, because its state has changed.
    pub(super) fn look_again(&self) {
        self.busy.store(true, Relaxed);
    }

    /// Waits until no thread is carrying out records.
    pub(super) fn wait_for_visit(&self) {
        drop(lock(&self.state));
    }

    /// Posts receives in order.
    pub(super) fn post(&self, requests: &[ReceiveRequest<'_>]) -> Result<(), PostError> {
        let mut state = lock(&self.state);
        let before = state.receives.posted();
        let result = requests.iter().enumerate().try_for_each(|(index, request)| {
            self.post_one(&mut state, request).map_err(|kind| PostError { index, kind })
        });
        let posted = state.receives.posted();
        if posted != before {
            self.core.posted(posted, state.receives.used());
        }
        drop(state);
        // SYNC: checked after posting. Either the thread that moves to Error sees the receive when it flushes, or this thread
        // sees the Error.
        if self.core.has_failed() {
            self.look_again();
            self.core.notify();
        }
        result
    }

    fn post_one(&self, state: &mut TargetState, request: &ReceiveRequest<'_>) -> Result<(), PostErrorKind> {
        if self.core.domain.device().is_forked() {
            return Err(PostErrorKind::State(QueuePairState::Error));
        }
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

    /// Takes the records that have come, within the limits of a visit. Returns true if there is more to do, or `output` has no
    /// room for the rest.
    pub(super) fn visit(&self, sends: &SendQueue, output: &mut Output<'_, '_>) -> bool {
        let mut state = lock(&self.state);
        let state = &mut *state;
        while let Output::Poll(sink) = output
            && !state.ready.is_empty()
        {
            if sink.is_full() {
                return true;
            }
            state.ready.pop_front().into_iter().for_each(|completion| sink.push(completion));
        }
        let more = match self.core.connection() {
            Some(connection) => {
                // SYNC: the end of the peer is noticed before the last look at its records.
                let peer_is_gone = self.core.peer_is_gone();
                let more = self.take_records(state, connection, sends, output);
                if peer_is_gone && !more {
                    self.core.fail();
                }
                more
            }
            None => false,
        };
        let drained = self.core.is_closed() || self.core.has_failed() && !more;
        let more = if drained { self.flush(state, output) } else { more };
        let has_work = more || !state.ready.is_empty() || !state.served.is_empty() || state.message_waits();
        self.busy.store(has_work, Relaxed);
        more
    }

    fn take_records(
        &self,
        state: &mut TargetState,
        connection: &Connection,
        sends: &SendQueue,
        output: &mut Output<'_, '_>,
    ) -> bool {
        let Some(mut reader) = state.reader.take() else { return false };
        let (mut bytes, mut records, mut more) = (0, 0, false);
        while !self.core.is_closed() {
            if bytes >= VISIT_BYTES || records >= VISIT_RECORDS || output.is_full(state, &self.core) {
                more = true;
                break;
            }
            let at = reader.position();
            let result = if state.pull.is_some() {
                self.go_on_pulling(state, connection, &mut bytes, output).map(|done| match done {
                    Some(record) => {
                        reader.advance(&record);
                        records += 1;
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
                            bytes += u64::from(record.header.length);
                        }
                        result
                    }
                    Err(_) => Err(Fault::Violation),
                }
            };
            if let Err(fault) = result {
                // The records before this one were carried out.
                self.core.took(connection, reader.position());
                self.fail(state, at, fault, output);
            } else {
                // The peer may write the next records meanwhile.
                self.core.took(connection, reader.position());
            }
        }
        self.look_for_record_of(&reader);
        // A queue pair in Error uses no memory any more: its regions may go (see `Core::end`).
        if !state.served.is_empty() && !self.core.has_failed() {
            self.serve(state, connection, sends);
        }
        state.reader = Some(reader);
        more
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
                    self.finish(state, output)?;
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

    /// Checks a message before its first byte is stored.
    #[inline]
    fn begin(&self, state: &TargetState, record: &Record) -> Result<Message, Fault> {
        let header = &record.header;
        if state.message.is_some() || header.total > MAX_MESSAGE {
            return Err(Fault::Violation);
        }
        let immediate = header.flags.contains(Flags::IMMEDIATE).then_some(header.immediate);
        let destination = match header.kind {
            Kind::Send => Destination::Receive,
            _ => Destination::Memory { address: header.address, key: header.key },
        };
        if destination == Destination::Receive || immediate.is_some() {
            let posted = state.receives.first().ok_or(Fault::Violation)?;
            if destination == Destination::Receive && header.total > posted.room {
                return Err(Fault::Refused(
                    CompletionStatus::RemoteInvalidRequest,
                    Some(CompletionStatus::LocalLength),
                ));
            }
        }
        if destination != Destination::Receive && header.total > 0 {
            self.check(header.key, header.address, header.total, Access::REMOTE_WRITE)?;
        }
        Ok(Message { destination, immediate, total: header.total, done: 0 })
    }

    /// Checks that the peer may use a range of our memory.
    #[inline]
    fn check(&self, key: u32, address: u64, length: u64, access: Access) -> Result<(), Fault> {
        let good = self.core.access().contains(access)
            && self.core.domain.find_local(crate::Lkey(key), address, length, access);
        if good { Ok(()) } else { Err(Fault::Refused(CompletionStatus::RemoteAccess, None)) }
    }

    /// Takes bytes of a message from the peer's memory, within the limit of a visit. Returns the record when the message is
    /// complete.
    fn go_on_pulling(
        &self,
        state: &mut TargetState,
        connection: &Connection,
        bytes: &mut u64,
        output: &mut Output<'_, '_>,
    ) -> Result<Option<Record>, Fault> {
        let (Some(mut pull), Some(mut message)) = (state.pull.take(), state.message.take()) else {
            return Err(Fault::Violation);
        };
        // The last word is stored after the check that the memory was valid.
        let body = message.total.saturating_sub(WORD);
        while message.done < body && *bytes < VISIT_BYTES {
            let wanted = (body - message.done).min(VISIT_BYTES);
            let (mapping, offset, length) = self.next_piece(state, &mut pull, wanted)?;
            let from = mapping.range(offset, length).ok_or(Fault::Violation)?.as_ptr().cast_const();
            let stores = Stores { ends_a_word: false, past_caches: message.goes_past_caches() };
            // SAFETY: the mapping has these bytes, and lives until the end of the block.
            unsafe { self.put(state, &mut message, from, length, stores)? };
            *bytes += length;
        }
        if message.done < body {
            (state.pull, state.message) = (Some(pull), Some(message));
            return Ok(None);
        }
        let mut word = [0; WORD as usize];
        let last = &mut word[..(message.total - message.done) as usize];
        let mut at = 0;
        while at < last.len() {
            let (mapping, offset, length) = self.next_piece(state, &mut pull, (last.len() - at) as u64)?;
            let from = mapping.range(offset, length).ok_or(Fault::Violation)?.as_ptr().cast_const();
            // SAFETY: the mapping has these bytes; the part of the word is ours.
            unsafe { copy_bytes(from, last[at..].as_mut_ptr(), length as usize) };
            at += length as usize;
        }
        if !unless_revoked::<Native, Shipping>(|| connection.end.state() != EndState::Ended) {
            self.core.stop_draining();
            self.core.fail();
            return Ok(None);
        }
        let stores = Stores { ends_a_word: true, past_caches: false };
        // SAFETY: `word` is ours.
        unsafe { self.put(state, &mut message, word.as_ptr(), at as u64, stores)? };
        state.message = Some(message);
        self.finish(state, output)?;
        Ok(Some(pull.record))
    }

    /// Returns the next piece of the peer's memory, at most `wanted` bytes, and goes on behind it.
    fn next_piece(
        &self,
        state: &mut TargetState,
        pull: &mut Pull,
        wanted: u64,
    ) -> Result<(Arc<Mapping>, u64, u64), Fault> {
        let (id, offset, length) = pull.next(wanted).ok_or(Fault::Violation)?;
        let mapping = state.pulls.segment(&self.core, id).ok_or(Fault::Violation)?;
        Ok((mapping, offset, length))
    }

    /// Stores the bytes of a record.
    #[inline]
    fn store(
        &self,
        state: &mut TargetState,
        record: &Record,
        from: *const u8,
        length: u64,
    ) -> Result<(), Fault> {
        let Some(message) = &state.message else { return Err(Fault::Violation) };
        let last = record.header.flags.contains(Flags::LAST);
        let is_send = message.destination == Destination::Receive;
        if length > message.total - message.done
            || last != (message.done + length == message.total)
            || is_send != (record.header.kind == Kind::Send)
        {
            return Err(Fault::Violation);
        }
        if length == 0 {
            return Ok(());
        }
        let Some(mut message) = state.message.take() else { return Err(Fault::Violation) };
        let stores = Stores { ends_a_word: last, past_caches: message.goes_past_caches() };
        // SAFETY: the payload lies in the peer's end, which stays mapped as long as the connection.
        let put = unsafe { self.put(state, &mut message, from, length, stores) };
        state.message = Some(message);
        put
    }

    /// Stores the next `length` bytes of a message at its destination. They are not more than the rest of the message.
    ///
    /// # Safety
    /// - `from` must be valid for reading `length` bytes.
    #[inline]
    unsafe fn put(
        &self,
        state: &TargetState,
        message: &mut Message,
        from: *const u8,
        length: u64,
        stores: Stores,
    ) -> Result<(), Fault> {
        match message.destination {
            Destination::Memory { address, key } => {
                let to = address.wrapping_add(message.done);
                // Checked for each record, because the region may be gone since the first.
                self.check(key, to, length, Access::REMOTE_WRITE)?;
                // SAFETY:
                // - `from` is valid, as the caller promises; and
                // - the destination is registered for writing, as just checked with the target locked, so that it stays
                //   registered (see `Domain::remove_region`). The two do not overlap, because no process registers memory
                //   that it has mapped of a peer.
                unsafe { source::place(from, to as *mut u8, length, stores) };
            }
            Destination::Receive => {
                let mut offset = message.done;
                let (mut from, mut left) = (from, length);
                for segment in state.receives.segments() {
                    if left == 0 {
                        break;
                    }
                    if offset >= segment.length() {
                        offset -= segment.length();
                        continue;
                    }
                    let count = (segment.length() - offset).min(left);
                    let to = segment.address() + offset;
                    if !self.core.domain.find_local(segment.lkey(), to, count, Access::LOCAL_WRITE) {
                        return Err(Fault::Refused(
                            CompletionStatus::RemoteOperation,
                            Some(CompletionStatus::LocalProtection),
                        ));
                    }
                    let stores = Stores { ends_a_word: false, ..stores };
                    // SAFETY: as above; the destination is a part of a posted receive.
                    unsafe { source::place(from, to as *mut u8, count, stores) };
                    from = from.wrapping_add(count as usize);
                    left -= count;
                    offset = 0;
                }
            }
        }
        message.done += length;
        Ok(())
    }

    /// Ends the message, and completes the receive that it takes.
    #[inline]
    fn finish(&self, state: &mut TargetState, output: &mut Output<'_, '_>) -> Result<(), Fault> {
        let message = state.message.take().ok_or(Fault::Violation)?;
        let opcode = match message.destination {
            Destination::Receive => CompletionOpcode::Receive,
            Destination::Memory { .. } if message.immediate.is_none() => return Ok(()),
            Destination::Memory { .. } => CompletionOpcode::ReceiveWriteWithImmediate,
        };
        let posted = state.receives.first().ok_or(Fault::Violation)?;
        state.receives.pop();
        let completion = WorkCompletion {
            wr_id: posted.wr_id,
            status: CompletionStatus::Success,
            opcode,
            byte_len: message.total,
            immediate: message.immediate,
            queue_pair: QueuePairNumber(self.core.number()),
        };
        output.push(state, completion);
        Ok(())
    }

    /// Takes a READ of the peer.
    fn begin_read(
        &self,
        state: &mut TargetState,
        connection: &Connection,
        record: &Record,
        at: u64,
    ) -> Result<(), Fault> {
        let header = &record.header;
        if header.total > MAX_MESSAGE || state.served.len() == MAX_READS {
            return Err(Fault::Violation);
        }
        if header.total > 0 {
            self.check(header.key, header.address, header.total, Access::REMOTE_READ)?;
            Pulls::offer_for_reads(&self.core, connection, header.key, header.address, header.total);
        }
        state.served.push_back(Served { at, address: header.address, key: header.key, left: header.total });
        Ok(())
    }

    /// Puts the bytes of the peer's READs into our ring, as far as there is room.
    fn serve(&self, state: &mut TargetState, connection: &Connection, sends: &SendQueue) {
        let mut queue = sends.lock();
        let mut bytes = 0;
        while let Some(first) = state.served.front_mut() {
            if first.left > 0
                && self.check(first.key, first.address, first.left, Access::REMOTE_READ).is_err()
            {
                // The region was deregistered meanwhile.
                let failure = Failure { at: first.at, status: CompletionStatus::RemoteAccess };
                state.served.clear();
                drop(queue);
                return self.core.refuse(failure);
            }
            if bytes >= VISIT_BYTES {
                break;
            }
            // SAFETY: the range is registered, as just checked with the target locked.
            let put = unsafe { sends.serve(&mut queue, connection, first.address as *const u8, first.left) };
            let Some(count) = put else {
                self.core.want(Attention::STUCK);
                Attention::fence::<Native, Shipping>();
                break;
            };
            first.address += count;
            first.left -= count;
            bytes += count;
            if first.left == 0 {
                state.served.pop_front();
            }
        }
        sends.served(&mut queue);
    }

    /// Ends the connection because of the record at position `at`.
    #[cold]
    fn fail(&self, state: &mut TargetState, at: u64, fault: Fault, output: &mut Output<'_, '_>) {
        (state.message, state.pull) = (None, None);
        // The record that failed must not be taken again, even if this end was taking the last records of the peer.
        self.core.stop_draining();
        match fault {
            Fault::Violation => {
                // A peer that has ended takes back the memory of its last messages, which may still be in its ring.
                if !self.core.peer_has_ended() {
                    super::warn_of_violation(&self.core);
                }
                self.core.fail();
            }
            Fault::Refused(status, own) => {
                if let (Some(status), Some(posted)) = (own, state.receives.first()) {
                    state.receives.pop();
                    let completion = WorkCompletion { status, ..self.flushed(&posted) };
                    output.push(state, completion);
                }
                self.core.refuse(Failure { at, status });
            }
        }
    }

    /// Completes the receives that no message can take any more. Returns true if there are more than `output` has room for.
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
            output.push(state, completion);
        }
        self.flushed.store(true, Relaxed);
        false
    }

    fn flushed(&self, posted: &Posted) -> WorkCompletion {
        WorkCompletion {
            wr_id: posted.wr_id,
            status: CompletionStatus::WorkRequestFlushed,
            opcode: CompletionOpcode::Receive,
            byte_len: 0,
            immediate: None,
            queue_pair: QueuePairNumber(self.core.number()),
        }
    }
}

impl TargetState {
    /// Returns whether a message goes on without a new record.
    fn message_waits(&self) -> bool {
        self.pull.is_some()
    }
}

impl Output<'_, '_> {
    #[inline]
    fn is_full(&self, state: &TargetState, core: &Core) -> bool {
        match self {
            Self::Poll(sink) => sink.is_full(),
            Self::Keep => state.ready.len() > core.capacity.receive_requests as usize,
        }
    }

    #[inline]
    fn push(&mut self, state: &mut TargetState, completion: WorkCompletion) {
        match self {
            Self::Poll(sink) => sink.push(completion),
            Self::Keep => state.ready.push_back(completion),
        }
    }
}
