//! Messages of the peer: the checks before the first byte, the stores, and the completion.

use super::super::message::{Destination, Message};
use super::super::receives::Segment;
use super::super::source::{self, Stores};
use super::{Fault, Output, Target, TargetState};
use crate::soft::limits::MAX_MESSAGE;
use crate::soft::shared::ring::{Flags, Kind, Record};
use crate::{Access, CompletionOpcode, CompletionStatus, QueuePairNumber, WorkCompletion};

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

    /// Stores all bytes of a message at its destination, for which [`receive_for`](Self::receive_for) has found room.
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
                self.check_segment(segment, segment.address(), length)?;
                (segment.address(), Stores { ends_a_word: false, ..stores })
            }
            // SAFETY: the contract is the same.
            (Destination::Receive, _) => return unsafe { self.put(state, message, from, length, stores) },
        };
        // SAFETY: as in `put`.
        unsafe { source::place(from, to as *mut u8, length, stores) };
        Ok(())
    }

    /// Checks that `length` bytes at `to`, a part of a posted receive, are registered for writing.
    #[inline]
    fn check_segment(&self, segment: &Segment, to: u64, length: u64) -> Result<(), Fault> {
        if self.core.domain.find_local(segment.lkey(), to, length, Access::LOCAL_WRITE) {
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

    /// Stores the next `length` bytes of a message at its destination. They are not more than the rest of the message.
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
                    self.check_segment(segment, to, count)?;
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
        output.push_made(state, || WorkCompletion {
            wr_id: posted.wr_id,
            status: CompletionStatus::Success,
            opcode,
            byte_len: message.total,
            immediate: message.immediate,
            queue_pair: QueuePairNumber(self.core.number()),
        });
        Ok(())
    }
}
