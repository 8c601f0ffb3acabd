//! Messages of the peer: the checks before the first byte, the stores, and the completion. Their bytes come
//! in records, or this side takes them from the peer's memory. Also READs of the peer that this side serves
//! through its ring.

use std::sync::Arc;

use super::{Fault, Output, Served, Target, TargetState, VISIT_BYTES};
use crate::soft::completion_queue::Remaining;
use crate::soft::device::{MAX_MESSAGE, MAX_READS};
use crate::soft::peers::segments::Segment;
use crate::soft::queue_pair::core::Connection;
use crate::soft::queue_pair::message::{Destination, Message, Pull, ReceiveSegment};
use crate::soft::queue_pair::pulls::Pulls;
use crate::soft::queue_pair::send::SendQueue;
use crate::soft::queue_pair::source::{self, Stores, WORD};
use crate::soft::shared::attention::Attention;
use crate::soft::shared::end::{EndState, Failure, unless_revoked};
use crate::soft::shared::platform::{Native, Shipping};
use crate::soft::shared::ring::{Flags, Kind, Record};
use crate::{Access, CompletionOpcode, CompletionStatus, QueuePairNumber, WorkCompletion, copy_bytes};

impl Target {
    /// Carries out a record that has a whole message.
    #[inline]
    pub(super) fn take_whole(
        &self,
        state: &mut TargetState,
        record: &Record,
        from: *const u8,
        output: &mut Output<'_, '_>,
    ) -> Result<(), Fault> {
        let length = u64::from(record.header.length);
        if state.message.is_some() || record.header.total != length {
            return Err(Fault::Violation);
        }
        let mut message = Self::receive_for(state, record)?;
        if length > 0 {
            // SAFETY: the payload lies in the peer's end, which stays mapped as long as the connection.
            unsafe { self.put_whole(state, &mut message, from, length)? };
        }
        self.finish(state, &message, output)
    }

    /// Stores all bytes of a message at its destination, for which [`receive_for`](Self::receive_for) has
    /// found room.
    ///
    /// # Safety
    /// - `from` must be valid for reading `length` bytes.
    #[inline]
    unsafe fn put_whole(
        &self,
        state: &TargetState,
        message: &mut Message,
        from: *const u8,
        length: u64,
    ) -> Result<(), Fault> {
        let stores = Stores { ends_a_word: true, past_caches: false };
        let (to, stores) = match (message.destination, state.receives.segments()) {
            (Destination::Memory { address, key }, _) => {
                self.check(key, address, length, Access::REMOTE_WRITE)?;
                (address, stores)
            }
            (Destination::Receive, [segment]) => {
                self.check_segment(segment, segment.start, length)?;
                (segment.start, Stores { ends_a_word: false, ..stores })
            }
            // SAFETY: the contract is the same.
            (Destination::Receive, _) => return unsafe { self.put(state, message, from, length, stores) },
        };
        // SAFETY: as in `put`.
        unsafe { source::store(from, to as *mut u8, length, stores) };
        Ok(())
    }

    /// Checks that `length` bytes at `to`, a part of a posted receive, are registered for writing.
    #[inline]
    fn check_segment(&self, segment: &ReceiveSegment, to: u64, length: u64) -> Result<(), Fault> {
        if self.core.domain.find_local(segment.key, to, length, Access::LOCAL_WRITE) {
            return Ok(());
        }
        Err(Fault::Refused(CompletionStatus::RemoteOperation, Some(CompletionStatus::LocalProtection)))
    }

    /// Checks a message before its first byte is stored.
    #[inline]
    pub(super) fn begin(&self, state: &TargetState, record: &Record) -> Result<Message, Fault> {
        let header = &record.header;
        if state.message.is_some() || header.total > MAX_MESSAGE {
            return Err(Fault::Violation);
        }
        let message = Self::receive_for(state, record)?;
        if message.destination != Destination::Receive && header.total > 0 {
            self.check(header.key, header.address, header.total, Access::REMOTE_WRITE)?;
        }
        Ok(message)
    }

    /// Checks that a message has the receive that it takes, and that the receive has room.
    #[inline]
    fn receive_for(state: &TargetState, record: &Record) -> Result<Message, Fault> {
        let header = &record.header;
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
        Ok(Message { destination, immediate, total: header.total, done: 0 })
    }

    /// Stores the bytes of a record.
    #[inline]
    pub(super) fn store(
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

    /// Stores the next `length` bytes of a message at its destination. They are not more than the rest of the
    /// message.
    ///
    /// # Safety
    /// - `from` must be valid for reading `length` bytes.
    pub(super) unsafe fn put(
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
                // - the destination is registered for writing, as just checked with the target locked, so
                //   that it stays registered (see `Domain::remove_region`). The two do not overlap, because
                //   no process registers memory that it has mapped of a peer.
                unsafe { source::store(from, to as *mut u8, length, stores) };
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
                    let to = segment.start + offset;
                    self.check_segment(segment, to, count)?;
                    let stores = Stores { ends_a_word: false, ..stores };
                    // SAFETY: as above; the destination is a part of a posted receive.
                    unsafe { source::store(from, to as *mut u8, count, stores) };
                    from = from.wrapping_add(count as usize);
                    left -= count;
                    offset = 0;
                }
            }
        }
        message.done += length;
        Ok(())
    }

    /// Ends a message, and completes the receive that it takes.
    #[inline]
    pub(super) fn finish(
        &self,
        state: &mut TargetState,
        message: &Message,
        output: &mut Output<'_, '_>,
    ) -> Result<(), Fault> {
        let opcode = match message.destination {
            Destination::Receive => CompletionOpcode::Receive,
            Destination::Memory { .. } if message.immediate.is_none() => return Ok(()),
            Destination::Memory { .. } => CompletionOpcode::ReceiveWriteWithImmediate,
        };
        let posted = state.receives.first().ok_or(Fault::Violation)?;
        state.receives.pop();
        output.push(state, || WorkCompletion {
            wr_id: posted.wr_id,
            status: CompletionStatus::Success,
            opcode,
            byte_len: message.total,
            immediate: message.immediate,
            queue_pair: QueuePairNumber(self.core.number),
        });
        Ok(())
    }

    /// Takes bytes of a message from the peer's memory, within the limit of a visit. Returns the record when
    /// the message is complete.
    pub(super) fn continue_pull(
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
            let (segment, offset, length) = self.next_chunk(state, &mut pull, wanted)?;
            let from = segment.mapping.range(offset, length).ok_or(Fault::Violation)?.as_ptr().cast_const();
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
            let (segment, offset, length) = self.next_chunk(state, &mut pull, (last.len() - at) as u64)?;
            let from = segment.mapping.range(offset, length).ok_or(Fault::Violation)?.as_ptr().cast_const();
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
        self.finish(state, &message, output)?;
        Ok(Some(pull.record))
    }

    /// Returns the next chunk of the peer's memory, at most `wanted` bytes, and continues behind it.
    fn next_chunk(
        &self,
        state: &mut TargetState,
        pull: &mut Pull,
        wanted: u64,
    ) -> Result<(Arc<Segment>, u64, u64), Fault> {
        let (id, offset, length) = pull.next(wanted).ok_or(Fault::Violation)?;
        let segment = state.pulls.segment(&self.core, id).ok_or(Fault::Violation)?;
        Ok((segment, offset, length))
    }

    /// Takes a READ of the peer.
    pub(super) fn begin_read(
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

    /// Puts bytes for the peer's READs into our ring, as far as there is room, within the limit of a visit.
    /// Returns [`Remaining::Work`] if the limit ended the visit. There is still room then, so no message of
    /// the peer will announce room. Returns [`Remaining::Message`] if some bytes went into the ring, and
    /// there is no room for the others.
    pub(super) fn serve(
        &self,
        state: &mut TargetState,
        connection: &Connection,
        sends: &SendQueue,
    ) -> Remaining {
        let mut queue = sends.lock();
        let (mut bytes, mut asked, mut more, mut stuck_at) = (0, false, false, None);
        while let Some(first) = state.served.front_mut() {
            if first.left > 0
                && self.check(first.key, first.address, first.left, Access::REMOTE_READ).is_err()
            {
                // The region was deregistered meanwhile.
                let failure = Failure { at: first.at, status: CompletionStatus::RemoteAccess };
                state.served.clear();
                drop(queue);
                self.core.refuse(failure);
                return Remaining::Nothing;
            }
            if bytes >= VISIT_BYTES {
                more = true;
                break;
            }
            // Before the check for room: see `SendQueue::run`.
            let taken = sends.taken_by_peer();
            // SAFETY: the range is registered, as just checked with the target locked.
            let put = unsafe { sends.serve(&mut queue, connection, first.address as *const u8, first.left) };
            let Some(count) = put else {
                if asked {
                    stuck_at = Some(taken);
                    break;
                }
                // The peer may have made room just before it could see that this side waits for room. So this
                // thread checks again.
                self.core.want(Attention::STUCK);
                Attention::fence::<Native, Shipping>();
                asked = true;
                continue;
            };
            first.address += count;
            first.left -= count;
            bytes += count;
            if first.left == 0 {
                state.served.pop_front();
            }
        }
        sends.served(&mut queue, !state.served.is_empty(), stuck_at);
        Remaining::message_if(bytes > 0 && !state.served.is_empty()).max(Remaining::work_if(more))
    }
}
