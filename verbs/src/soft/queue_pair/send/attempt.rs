//! The start of requests: records in the ring, and copies from the peer's memory. READs that this side does
//! not copy go through the rings: the bytes of ours come through the peer's ring, and those of the peer go
//! through ours.

use std::sync::atomic::Ordering::Relaxed;

use super::{NOT_STUCK, SendQueue, SendState, Wait};
use crate::soft::device::{MAX_MESSAGE, MAX_READS};
use crate::soft::queue_pair::core::{Connection, Debt};
use crate::soft::queue_pair::outstanding::{Progress, Reading};
use crate::soft::queue_pair::source;
use crate::soft::shared::end::EndState;
use crate::soft::shared::ring::{Flags, Header, Kind, RingSlot};
use crate::{
    Access, CompletionOpcode, CompletionStatus, LocalSegment, Operation, Payload, RemoteSegment, Rkey,
    SendRequest,
};

/// Bytes from which the peer takes a message from registered memory where it lies, instead of from the ring.
const LEAST_PULL: u64 = 8 << 10;

/// Most bytes of payload in one record. A long message has many records, so that the peer takes the first
/// ones while this side writes the next.
const CHUNK: u64 = 32 << 10;

/// The target of a message.
#[derive(Clone, Copy, Debug)]
struct MessageTarget {
    kind: Kind,
    remote: RemoteSegment,
    immediate: Option<u32>,
}

impl MessageTarget {
    /// The memory that a Send names.
    const NOWHERE: RemoteSegment = RemoteSegment { address: 0, rkey: Rkey(0) };

    /// Returns the bytes and the target of a message. For a READ, returns where its bytes go, and from where.
    #[inline]
    fn of(operation: Operation<'_>) -> Result<(Payload<'_>, Self), (&[LocalSegment], RemoteSegment)> {
        match operation {
            Operation::Send { data, immediate } => {
                Ok((data, Self { kind: Kind::Send, remote: Self::NOWHERE, immediate }))
            }
            Operation::Write { data, remote, immediate } => {
                Ok((data, Self { kind: Kind::Write, remote, immediate }))
            }
            Operation::Read { into, remote } => Err((into, remote)),
        }
    }

    /// Returns whether the message takes a receive of the peer.
    #[inline]
    fn takes_receive(&self) -> bool {
        self.kind == Kind::Send || self.immediate.is_some()
    }

    /// Makes the header of a record with `length` bytes of payload, of a message of `total` bytes.
    #[inline]
    fn header(&self, flags: Flags, length: u64, total: u64) -> Header {
        Header {
            kind: self.kind,
            flags: flags.with_if(Flags::IMMEDIATE, self.immediate.is_some()),
            length: length as u32,
            immediate: self.immediate.unwrap_or(0),
            address: self.remote.address,
            key: self.remote.rkey.0,
            total,
        }
    }
}

impl Operation<'_> {
    #[inline]
    pub(super) fn opcode(&self) -> CompletionOpcode {
        match self {
            Self::Send { .. } => CompletionOpcode::Send,
            Self::Write { .. } => CompletionOpcode::Write,
            Self::Read { .. } => CompletionOpcode::Read,
        }
    }
}

impl SendQueue {
    /// Carries out a request from byte `done` on, or returns the reason why the request has to wait. See
    /// [`post_short`](Self::post_short), too.
    pub(super) fn attempt(
        &self,
        queue: &mut SendState,
        request: &SendRequest<'_>,
        done: &mut u64,
    ) -> Result<(), Wait> {
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
        match MessageTarget::of(request.operation) {
            Ok(message) => self.attempt_message(queue, connection, request, message, done),
            Err((into, remote)) => self.attempt_read(queue, connection, request, into, remote),
        }
    }

    fn attempt_message(
        &self,
        queue: &mut SendState,
        connection: &Connection,
        request: &SendRequest<'_>,
        (data, target): (Payload<'_>, MessageTarget),
        done: &mut u64,
    ) -> Result<(), Wait> {
        if !data.is_registered(&self.core.domain) {
            self.end_with(queue, request, Some(CompletionStatus::LocalProtection));
            return Ok(());
        }
        let takes_receive = target.takes_receive();
        if *done == 0 && takes_receive && !queue.has_receive(connection) {
            return Err(Wait::Receive);
        }
        let total = data.length();
        if let (0, Payload::Registered(segments), LEAST_PULL..) = (*done, data, total)
            && let Some(result) = self.attempt_to_offer(queue, connection, request, (segments, target, total))
        {
            return result;
        }
        loop {
            let first = *done == 0;
            let Some(chunk) = self.chunk(queue, connection, total - *done) else { return Err(Wait::Room) };
            let Some(slot) = queue.writer.reserve(self.core.end.ring(), chunk) else {
                return Err(Wait::Room);
            };
            // SAFETY: the segments were checked above, with the send queue locked.
            unsafe { self.fill(&slot, &data, *done, chunk) };
            *done += chunk;
            let last = *done == total;
            let flags = Flags::default()
                .with_if(Flags::FIRST, first)
                .with_if(Flags::LAST, last)
                .with_if(Flags::AWAITED, last && request.signaled);
            queue.publish(&self.core.end, &slot, &target.header(flags, chunk, total));
            if last {
                queue.started(request, Progress::InRing { end: queue.writer.head() });
                return Ok(());
            }
            let debt = if takes_receive { Debt::NEWS } else { Debt::WRITES };
            let _ = self.core.announce_news(queue.writer.head(), debt);
        }
    }

    /// Copies `length` bytes of a message from `offset` on into the record at `slot`. Those beside the tag
    /// come last.
    ///
    /// # Safety
    /// `data` must have these bytes, and [`is_registered`](Payload::is_registered) must have returned true
    /// since the send queue was locked.
    #[inline(always)]
    unsafe fn fill(&self, slot: &RingSlot, data: &Payload<'_>, offset: u64, length: u64) {
        let Some(to) = self.core.end.payload(slot.payload(), length) else { return };
        let first = length.min(RingSlot::WITH_TAG);
        // SAFETY:
        // - `to` is in the ring of our own end, which only this thread writes while the send queue is locked;
        //   and
        // - the caller promises the rest.
        unsafe {
            if length > first {
                data.copy_out(offset + first, length - first, to.wrapping_add(first as usize));
            }
            data.copy_out(offset, first, to);
        }
    }

    /// Offers the peer to take a message from our memory, by a record with the addresses of its bytes. `None` if
    /// the peer can't take it.
    #[inline(never)]
    fn attempt_to_offer(
        &self,
        queue: &mut SendState,
        connection: &Connection,
        request: &SendRequest<'_>,
        (segments, target, total): (&[LocalSegment], MessageTarget, u64),
    ) -> Option<Result<(), Wait>> {
        let addresses = queue.pulls.addresses(&self.core, connection, segments)?;
        let bytes = addresses.as_bytes();
        let length = bytes.len() as u64;
        if queue.writer.room().is_none_or(|room| room < length)
            && queue.writer.reclaim(connection.end.taken_word()).is_err()
        {
            self.violation();
        }
        let Some(slot) = queue.writer.reserve(self.core.end.ring(), length) else {
            return Some(Err(Wait::Room));
        };
        if let Some(to) = self.core.end.payload(slot.payload(), length) {
            // SAFETY: `to` is in the ring of our own end, which only this thread writes while the send queue
            // is locked.
            unsafe { crate::copy_bytes(bytes.as_ptr(), to, bytes.len()) };
        }
        let flags = Flags::FIRST.with(Flags::LAST).with(Flags::AWAITED).with(Flags::PULL);
        queue.publish(&self.core.end, &slot, &target.header(flags, length, total));
        queue.started(request, Progress::Pulled { end: queue.writer.head() });
        Some(Ok(()))
    }

    /// Returns the bytes of the next record of a message with `left` bytes left; `None` if there is no room.
    /// The last record of a message has at least a word, or the whole message, so that the target can store
    /// the last word at once.
    #[inline]
    pub(super) fn chunk(&self, queue: &mut SendState, connection: &Connection, left: u64) -> Option<u64> {
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
        if !source::are_registered(into, &self.core.domain, Access::LOCAL_WRITE) {
            self.end_with(queue, request, Some(CompletionStatus::LocalProtection));
            return Ok(());
        }
        // A READ sees the WRITEs before it.
        if self.sees_writes(queue, connection) && queue.pulls.read(&self.core, connection, into, remote) {
            queue.started(request, Progress::Read);
            queue.reads_done += 1;
            self.ended.store(true, Relaxed);
            return Ok(());
        }
        if queue.reading.len() >= MAX_READS || self.chunk(queue, connection, 0).is_none() {
            return Err(Wait::Room);
        }
        let Some(slot) = queue.writer.reserve(self.core.end.ring(), 0) else { return Err(Wait::Room) };
        let empty = Header::empty(Kind::Read, Flags::FIRST.with(Flags::LAST));
        let total = LocalSegment::total(into);
        let header = Header { address: remote.address, key: remote.rkey.0, total, ..empty };
        queue.publish(&self.core.end, &slot, &header);
        queue.started(request, Progress::Reading { end: queue.writer.head() });
        queue.reading.push_back(Reading::new(into));
        Ok(())
    }

    /// Puts a short message of `total` bytes into the ring, in one record. Most messages are short, so this
    /// function does only what they need. Returns false if the message is not short, or if it has to wait or
    /// fails; then no record was published, and [`attempt`](Self::attempt) finds the reason. (The number of
    /// the peer's receives that this side knows may be newer afterwards.)
    #[inline]
    pub(super) fn post_short(&self, queue: &mut SendState, request: &SendRequest<'_>, total: u64) -> bool {
        let Ok((data, target)) = MessageTarget::of(request.operation) else { return false };
        let Some(connection) = self.core.connection() else { return false };
        let eligible = total < LEAST_PULL
            && queue.waiting.is_empty()
            && !queue.stopped
            && !self.core.has_failed()
            && connection.end.state() == EndState::Ready
            && !connection.peer.is_dead()
            && (!target.takes_receive() || queue.has_receive(connection));
        if !eligible || !data.is_registered(&self.core.domain) {
            return false;
        }
        let Some(slot) = queue.writer.reserve(self.core.end.ring(), total) else { return false };
        // SAFETY: the segments were checked above, with the send queue locked.
        unsafe { self.fill(&slot, &data, 0, total) };
        let flags = Flags::FIRST.with(Flags::LAST).with_if(Flags::AWAITED, request.signaled);
        queue.publish(&self.core.end, &slot, &target.header(flags, total, total));
        queue.started(request, Progress::InRing { end: queue.writer.head() });
        true
    }

    /// Carries out a READ if this side can copy the bytes now, and no earlier request waits. Returns whether
    /// the bytes have arrived.
    pub(in crate::soft::queue_pair) fn read_at_once(
        &self,
        into: &[LocalSegment],
        remote: RemoteSegment,
    ) -> bool {
        let mut queue = self.lock();
        let queue = &mut *queue;
        let Some(connection) = self.core.connection() else { return false };
        self.core.is_ready_to_send()
            && !self.core.domain.device.is_forked()
            && into.len() <= self.core.capacity.send_segments as usize
            && LocalSegment::total(into) <= MAX_MESSAGE
            && queue.waiting.is_empty()
            && !queue.stopped
            && !self.core.has_failed()
            && connection.end.state() == EndState::Ready
            && !connection.peer.is_dead()
            && source::are_registered(into, &self.core.domain, Access::LOCAL_WRITE)
            && self.sees_writes(queue, connection)
            && queue.pulls.read(&self.core, connection, into, remote)
    }

    /// Returns whether the peer has taken the WRITEs of this side, so that a READ sees them.
    pub(super) fn sees_writes(&self, queue: &mut SendState, connection: &Connection) -> bool {
        if queue.last_write > queue.writer.freed()
            && queue.writer.reclaim(connection.end.taken_word()).is_err()
        {
            self.violation();
        }
        queue.last_write <= queue.writer.freed()
    }

    /// Stores the bytes of a record with data of a READ. Returns false if no READ waits for them.
    ///
    /// # Safety
    /// - `from` must be valid for reading `length` bytes.
    pub(crate) unsafe fn store_read(&self, from: *const u8, length: u64, last: bool) -> bool {
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
                    // The poller of sends may sleep: it did not check since, or it is another one than that
                    // of the records.
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

    /// Puts bytes for a READ of the peer into the ring: a chunk of `left` bytes at `from`. Returns the number
    /// of bytes; `None` if there is no room now.
    ///
    /// # Safety
    /// - `from` must be valid for reading `left` bytes.
    pub(crate) unsafe fn serve(
        &self,
        queue: &mut SendState,
        connection: &Connection,
        from: *const u8,
        left: u64,
    ) -> Option<u64> {
        let chunk = self.chunk(queue, connection, left)?;
        let slot = queue.writer.reserve(self.core.end.ring(), chunk)?;
        let to = self.core.end.payload(slot.payload(), chunk)?;
        // SAFETY:
        // - `to` is in the ring of our own end, which only this thread writes while the send queue is locked;
        //   and
        // - `from` is valid, as the caller promises.
        unsafe { crate::copy_for_peer(from, to, chunk as usize) };
        let empty = Header::empty(Kind::ReadData, Flags::default().with_if(Flags::LAST, chunk == left));
        let header = Header { length: chunk as u32, total: left, ..empty };
        queue.publish(&self.core.end, &slot, &header);
        Some(chunk)
    }

    /// Tells the peer of the bytes that [`serve`](Self::serve) put into the ring. `left`: whether READs of
    /// the peer have bytes left. `stuck_at`: the position that the peer had taken before the ring had no room
    /// for them, if that is the reason.
    pub(crate) fn served(&self, queue: &mut SendState, left: bool, stuck_at: Option<u64>) {
        queue.serves = left;
        self.reads_stuck_at.store(stuck_at.unwrap_or(NOT_STUCK), Relaxed);
        self.want_no_needless_progress(queue);
        self.after(queue);
    }
}
