//! The two directions. Receiving: slots, READs, and delivery in order. Sending: credits, entries of the send
//! queue, and chunks that the peer is reading.

use std::collections::VecDeque;

use super::connection::Blocked;
use super::settings::Settings;
use super::violation::ProtocolViolation;
use crate::wire::{Chunk, Header};

/// The number of a receive slot of this side, from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SlotIndex(pub u32);

/// The number of a READ on its connection. It wraps around.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ReadId(pub u32);

/// An RDMA READ to post.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadRequest {
    /// The number of the READ, which the caller names when the READ completes.
    pub id: ReadId,
    /// The address in the peer's memory.
    pub address: u64,
    /// The key of the peer's region.
    pub rkey: u32,
    /// The length in bytes.
    pub length: u64,
}

/// Bytes that can be delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Bytes in a receive slot.
    Eager {
        /// The slot.
        slot: SlotIndex,
        /// The offset from the start of the slot.
        offset: usize,
        /// The number of bytes.
        length: usize,
    },
    /// Bytes in the memory that a READ filled.
    Rendezvous {
        /// The READ.
        read: ReadId,
        /// The offset from the start of that memory.
        offset: usize,
        /// The number of bytes.
        length: usize,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReadState {
    Waiting,
    Posted,
    Landed,
}

#[derive(Debug)]
struct Read {
    state: ReadState,
    chunk: Chunk,
}

#[derive(Debug)]
pub(super) struct Inbound {
    /// The count of messages received and of credits that the peer returned. It is the number of the next
    /// message.
    received: u64,
    /// The count of messages that the peer may send since the start: the sum of `released` and `window`.
    granted: u64,
    /// The part of `granted` that was announced to the peer.
    granted_announced: u64,
    /// The count of messages whose slots are free again, and of credits that the peer returned.
    released: u64,
    /// The number of slots that are kept for this connection.
    pub(super) window: u32,
    /// The smallest value of `window`, and the value at the start.
    least_window: u32,
    /// True if free slots are not granted again while `window` is larger than `least_window`.
    narrowing: bool,
    slot_size: u32,
    reserve: u64,
    /// The number of slots freed by control messages and not yet announced to the peer.
    pub(super) freed_by_control: u64,
    max_reads: u32,
    max_chunk: u64,
    pub(super) release: VecDeque<SlotIndex>,
    /// The parts to be delivered, in order. A part of a READ that has not landed delays the parts behind it.
    parts: VecDeque<Part>,
    /// The READs that are not delivered, the oldest first.
    reads: VecDeque<Read>,
    /// The number of the first READ in `reads`.
    first_read: u32,
    /// The number of READs at the front that have landed without a gap.
    landed: usize,
    /// The number of READs that were posted.
    posted: usize,
    /// The number of READs that were posted and have not landed.
    outstanding: u32,
    /// The count of READs that finished without a gap since the start.
    reads_done: u64,
    /// The part of `reads_done` that was announced to the peer.
    reads_announced: u64,
    pub(super) fin: bool,
}

impl Inbound {
    pub(super) fn new(settings: &Settings) -> Self {
        Self {
            received: 0,
            granted: u64::from(settings.receive_slots),
            granted_announced: u64::from(settings.receive_slots),
            released: 0,
            window: settings.receive_slots,
            least_window: settings.receive_slots,
            narrowing: false,
            slot_size: settings.slot_size,
            reserve: Settings::reserve(settings.receive_slots),
            freed_by_control: 0,
            max_reads: settings.max_reads,
            max_chunk: settings.max_chunk,
            release: VecDeque::with_capacity(settings.receive_slots as usize),
            parts: VecDeque::with_capacity(settings.receive_slots as usize),
            reads: VecDeque::new(),
            first_read: 0,
            landed: 0,
            posted: 0,
            outstanding: 0,
            reads_done: 0,
            reads_announced: 0,
            fin: false,
        }
    }

    /// Checks that the message is the next one, and that it is as long as its header says.
    pub(super) fn check(&mut self, header: &Header, length: usize) -> Result<(), ProtocolViolation> {
        if length.checked_sub(Header::LENGTH) != Some(header.body_length as usize)
            || length > self.slot_size as usize
        {
            return Err(ProtocolViolation::Length { received: length, promised: header.body_length });
        }
        if header.sequence != self.received {
            return Err(ProtocolViolation::Sequence { seen: header.sequence, expected: self.received });
        }
        // The slots may be shared with other connections: a message without a credit would take a slot of
        // another connection.
        if self.received >= self.granted_announced {
            return Err(ProtocolViolation::CreditsExceeded { granted: self.granted_announced });
        }
        if header.kind.is_data() && self.fin {
            return Err(ProtocolViolation::DataAfterFin);
        }
        self.received += 1;
        Ok(())
    }

    pub(super) fn eager(&mut self, slot: SlotIndex, length: usize) {
        if length == 0 {
            self.release.push_back(slot);
        } else {
            self.parts.push_back(Part::Eager { slot, offset: Header::LENGTH, length });
        }
    }

    /// Takes an offer. Its slot is free at once.
    pub(super) fn rts(&mut self, slot: SlotIndex, body: &[u8]) -> Result<(), ProtocolViolation> {
        for chunk in Chunk::decode_all(body)? {
            let unread = (self.reads.len() - self.landed) as u64;
            if unread >= super::MAX_UNREAD_CHUNKS {
                return Err(ProtocolViolation::TooManyChunks(unread + 1));
            }
            if chunk.length > self.max_chunk {
                return Err(ProtocolViolation::ChunkTooLong { length: chunk.length, most: self.max_chunk });
            }
            let read = ReadId(self.first_read.wrapping_add(self.reads.len() as u32));
            self.reads.push_back(Read { state: ReadState::Waiting, chunk });
            self.parts.push_back(Part::Rendezvous { read, offset: 0, length: chunk.length as usize });
        }
        self.release.push_back(slot);
        Ok(())
    }

    pub(super) fn posted_slots(&mut self, count: u32) {
        let surplus = if self.narrowing { count.min(self.window - self.least_window) } else { 0 };
        self.window -= surplus;
        self.released += u64::from(count);
        self.granted += u64::from(count - surplus);
    }

    pub(super) fn widen(&mut self, slots: u32) {
        self.window += slots;
        self.narrowing = false;
        self.granted += u64::from(slots);
    }

    /// Takes back `count` credits of the peer: the credits count as used, their slots count as free, and the
    /// window gets smaller.
    pub(super) fn returned(&mut self, count: u32) -> Result<(), ProtocolViolation> {
        let unused = self.granted_announced.saturating_sub(self.received);
        let most = u64::from(self.window - self.least_window).min(unused);
        if u64::from(count) > most {
            return Err(ProtocolViolation::CreditsReturned { seen: count, most });
        }
        self.received += u64::from(count);
        self.released += u64::from(count);
        self.window -= count;
        // Credits that were not announced are taken back without a message. Slots that become free later are
        // not granted again.
        let unannounced =
            (self.granted - self.granted_announced).min(u64::from(self.window - self.least_window));
        self.granted -= unannounced;
        self.window -= unannounced as u32;
        self.narrowing = true;
        Ok(())
    }

    pub(super) fn next_read(&self) -> Option<ReadRequest> {
        if self.outstanding >= self.max_reads {
            return None;
        }
        let Read { chunk, .. } = self.reads.get(self.posted)?;
        let id = ReadId(self.first_read.wrapping_add(self.posted as u32));
        Some(ReadRequest { id, address: chunk.address, rkey: chunk.rkey, length: chunk.length })
    }

    pub(super) fn start_read(&mut self) {
        if let Some(read) = self.reads.get_mut(self.posted) {
            read.state = ReadState::Posted;
            self.posted += 1;
            self.outstanding += 1;
        }
    }

    /// Marks a READ as landed. Only READs that landed without a gap count as done.
    pub(super) fn read_completed(&mut self, id: ReadId) {
        let index = id.0.wrapping_sub(self.first_read) as usize;
        let Some(read) = self.reads.get_mut(index).filter(|read| read.state == ReadState::Posted) else {
            return;
        };
        read.state = ReadState::Landed;
        self.outstanding -= 1;
        while self.reads.get(self.landed).is_some_and(|read| read.state == ReadState::Landed) {
            self.landed += 1;
            self.reads_done += 1;
        }
    }

    pub(super) fn front(&self) -> Option<Part> {
        let part = *self.parts.front()?;
        let arrived = match part {
            Part::Eager { .. } => true,
            // The part at the front belongs to the oldest READ.
            Part::Rendezvous { .. } => self.landed > 0,
        };
        arrived.then_some(part)
    }

    pub(super) fn consume(&mut self, count: usize) -> Option<ReadId> {
        let front = self.front()?;
        let (Part::Eager { length: available, .. } | Part::Rendezvous { length: available, .. }) = front;
        if count < available {
            if let Some(Part::Eager { offset, length, .. } | Part::Rendezvous { offset, length, .. }) =
                self.parts.front_mut()
            {
                (*offset, *length) = (*offset + count, *length - count);
            }
            return None;
        }
        self.parts.pop_front();
        match front {
            Part::Eager { slot, .. } => {
                self.release.push_back(slot);
                None
            }
            Part::Rendezvous { read, .. } => {
                self.reads.pop_front();
                self.first_read = self.first_read.wrapping_add(1);
                (self.landed, self.posted) = (self.landed - 1, self.posted - 1);
                Some(read)
            }
        }
    }

    /// Returns true if freed slots or finished reads need an acknowledgement of their own.
    pub(super) fn ack_due(&self) -> bool {
        let freed = self.granted - self.granted_announced;
        freed >= u64::from(self.window) / 4
            || (self.freed_by_control >= self.reserve / 2 && freed > 0)
            || self.reads_done > self.reads_announced
    }

    /// Returns true if the peer has offered memory that was not read to its end.
    pub(super) fn awaits_reads(&self) -> bool {
        self.landed < self.reads.len()
    }

    /// Returns true if every READ has finished and was announced to the peer.
    pub(super) fn reads_settled(&self) -> bool {
        self.reads_done == self.reads_announced && self.landed == self.reads.len()
    }

    /// Returns the counts for a header that is being sent, and marks them as announced.
    pub(super) fn announce(&mut self) -> (u64, u64) {
        (self.granted_announced, self.reads_announced) = (self.granted, self.reads_done);
        self.freed_by_control = 0;
        (self.granted, self.reads_done)
    }

    /// Returns true if the peer's Fin was received, and everything before it was delivered.
    pub(super) fn is_finished(&self) -> bool {
        self.fin && self.parts.is_empty()
    }
}

/// The number of chunks that may be offered and not read yet, in each direction.
pub const MAX_UNREAD_CHUNKS: u64 = 64;

/// The state of the sending direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WriteState {
    Open,
    Closing,
    Closed,
}

#[derive(Debug)]
pub(super) struct Outbound {
    /// The count of messages sent and of credits returned. It is the number of the next message.
    pub(super) sent: u64,
    /// The count of messages that the peer has been ready to receive, from the peer's last header.
    granted: u64,
    /// The value of `granted` at the start.
    slots: u64,
    reserve: u64,
    /// The number of bytes of the longest eager message.
    pub(super) payload: usize,
    queue: u32,
    /// Messages that have not left the send queue.
    pub(super) queued: u32,
    pub(super) chunks_sent: u64,
    chunks_read: u64,
    /// The count of messages with data.
    data: u64,
    /// The value of `data` at the last check for idleness.
    data_at_check: u64,
    pub(super) state: WriteState,
}

impl Outbound {
    pub(super) fn new(settings: &Settings) -> Self {
        Self {
            sent: 0,
            granted: u64::from(settings.peer_slots),
            slots: u64::from(settings.peer_slots),
            reserve: Settings::reserve(settings.peer_slots),
            payload: settings.peer_slot_size as usize - Header::LENGTH,
            queue: settings.send_queue,
            queued: 0,
            chunks_sent: 0,
            chunks_read: 0,
            data: 0,
            data_at_check: 0,
            state: WriteState::Open,
        }
    }

    fn credits(&self) -> u64 {
        self.granted - self.sent
    }

    /// Returns what prevents sending data now.
    pub(super) fn blocked(&self) -> Option<Blocked> {
        if self.credits() <= self.reserve {
            Some(Blocked::Credits)
        } else if self.queued + Settings::CONTROL_ENTRIES >= self.queue {
            Some(Blocked::SendQueue)
        } else {
            None
        }
    }

    /// Returns the number of messages with data that may be sent now.
    pub(super) fn data_room(&self) -> u64 {
        if self.state != WriteState::Open {
            return 0;
        }
        let queue = self.queue.saturating_sub(self.queued + Settings::CONTROL_ENTRIES);
        self.credits().saturating_sub(self.reserve).min(u64::from(queue))
    }

    /// Returns the number of bytes that one eager message may carry now.
    pub(super) fn eager_room(&self) -> usize {
        let may = self.state == WriteState::Open && self.blocked().is_none();
        if may { self.payload } else { 0 }
    }

    /// Returns the number of chunks that may be offered now.
    pub(super) fn rts_room(&self) -> u64 {
        let may = self.state == WriteState::Open && self.blocked().is_none();
        if may { MAX_UNREAD_CHUNKS - (self.chunks_sent - self.chunks_read) } else { 0 }
    }

    pub(super) fn may_send_control(&self) -> bool {
        self.credits() > 0 && self.queued < self.queue
    }

    /// Takes a credit and an entry of the send queue for a message, and returns the number of the message.
    pub(super) fn take(&mut self, is_data: bool) -> u64 {
        let sequence = self.sent;
        self.sent += 1;
        self.queued += 1;
        self.data += u64::from(is_data);
        sequence
    }

    /// Returns true if no data was sent since the last call.
    pub(super) fn is_idle(&mut self) -> bool {
        std::mem::replace(&mut self.data_at_check, self.data) == self.data
    }

    /// Returns the number of credits beyond those at the start.
    pub(super) fn surplus(&self) -> u32 {
        u32::try_from(self.credits().saturating_sub(self.slots)).unwrap_or(u32::MAX)
    }

    /// Takes the counts of a header, and returns how many more chunks the peer has read.
    pub(super) fn counts(&mut self, header: &Header) -> Result<u64, ProtocolViolation> {
        let (least, most) = (self.granted, u64::from(Settings::MAX_SLOTS) + self.sent);
        if !(least..=most).contains(&header.granted) {
            return Err(ProtocolViolation::CreditsGranted { seen: header.granted, least, most });
        }
        let (least, most) = (self.chunks_read, self.chunks_sent);
        if !(least..=most).contains(&header.reads_done) {
            return Err(ProtocolViolation::ChunksRead { seen: header.reads_done, least, most });
        }
        self.granted = header.granted;
        self.chunks_read = header.reads_done;
        Ok(header.reads_done - least)
    }

    /// Returns true if the peer has not read all offered chunks.
    pub(super) fn has_unread_chunks(&self) -> bool {
        self.chunks_read < self.chunks_sent
    }

    /// Returns true if everything was sent, and the peer has read all offered chunks.
    pub(super) fn is_done(&self) -> bool {
        self.state == WriteState::Closed && self.chunks_read == self.chunks_sent
    }
}
