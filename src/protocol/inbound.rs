//! The receiving direction: slots, READs, and delivery in order.

use std::collections::VecDeque;

use super::settings::Settings;
use super::violation::Violation;
use crate::wire::{Chunk, Header};

/// A receive slot of this end, from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SlotIndex(pub u32);

/// Number of a READ on its connection; wraps around.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ReadId(pub u32);

/// An RDMA READ to post.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadRequest {
    /// To be named when it completed.
    pub id: ReadId,
    /// Where in the peer's memory.
    pub address: u64,
    /// Key of the peer's region.
    pub rkey: u32,
    /// Bytes.
    pub length: u64,
}

/// Bytes that are there to be delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// In a receive slot.
    Eager {
        /// Which.
        slot: SlotIndex,
        /// Where in it, from its start.
        offset: usize,
        /// How many.
        length: usize,
    },
    /// In the memory that a READ filled.
    Rendezvous {
        /// Which READ.
        read: ReadId,
        /// Where in it.
        offset: usize,
        /// How many.
        length: usize,
    },
}

/// A part that was delivered whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finished {
    /// Its slot also comes out of [`poll_release`](super::Connection::poll_release).
    Slot(SlotIndex),
    /// Its memory can be used for something else.
    Read(ReadId),
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
    /// Messages received, and so the number of the next.
    received: u64,
    /// Messages that the peer may ever send (always `released` and `window`), and as many of them as it was told.
    granted: u64,
    granted_told: u64,
    /// Messages whose slots are free again, and those that the peer did without.
    released: u64,
    /// Slots that are kept for this connection, and as many as always are.
    window: u32,
    least_window: u32,
    /// Whether slots that become free are not granted again while there are more than always.
    narrowing: bool,
    slot_size: u32,
    reserve: u64,
    /// Slots freed by control messages that the peer was not told of.
    freed_by_control: u64,
    max_reads: u32,
    max_chunk: u64,
    release: VecDeque<SlotIndex>,
    /// What is to be delivered, in order; a part of a READ that has not landed holds up those behind it.
    parts: VecDeque<Part>,
    /// READs from the oldest not delivered on.
    reads: VecDeque<Read>,
    /// Number of the first of them.
    first_read: u32,
    /// How many of them are landed without a gap, were posted, and are outstanding.
    landed: usize,
    posted: usize,
    outstanding: u32,
    /// READs ever finished without a gap, and as many of them as the peer was told.
    reads_done: u64,
    reads_told: u64,
    pub(super) fin: bool,
}

impl Inbound {
    pub(super) fn new(settings: &Settings) -> Self {
        Self {
            received: 0,
            granted: u64::from(settings.receive_slots),
            granted_told: u64::from(settings.receive_slots),
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
            reads_told: 0,
            fin: false,
        }
    }

    /// Checks that the message is the next, and as long as it says.
    pub(super) fn check(&mut self, header: &Header, length: usize) -> Result<(), Violation> {
        if length.checked_sub(Header::LENGTH) != Some(header.body_length as usize)
            || length > self.slot_size as usize
        {
            return Err(Violation::Length { received: length, promised: header.body_length });
        }
        if header.sequence != self.received {
            return Err(Violation::Sequence { seen: header.sequence, expected: self.received });
        }
        // Slots that are shared with other connections are not to be had without credit.
        if self.received >= self.granted_told {
            return Err(Violation::Overdrawn { granted: self.granted_told });
        }
        if header.kind.is_data() && self.fin {
            return Err(Violation::DataAfterFin);
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

    /// Takes in an offer; its slot is free at once.
    pub(super) fn rts(&mut self, slot: SlotIndex, body: &[u8]) -> Result<(), Violation> {
        for chunk in Chunk::decode_all(body)? {
            let unread = (self.reads.len() - self.landed) as u64;
            if unread >= super::MAX_OFFERED {
                return Err(Violation::TooManyOffers(unread + 1));
            }
            if chunk.length > self.max_chunk {
                return Err(Violation::ChunkTooLong { length: chunk.length, most: self.max_chunk });
            }
            let read = ReadId(self.first_read.wrapping_add(self.reads.len() as u32));
            self.reads.push_back(Read { state: ReadState::Waiting, chunk });
            self.parts.push_back(Part::Rendezvous { read, offset: 0, length: chunk.length as usize });
        }
        self.release.push_back(slot);
        Ok(())
    }

    pub(super) fn control(&mut self, slot: SlotIndex) {
        self.release.push_back(slot);
        self.freed_by_control += 1;
    }

    pub(super) fn poll_release(&mut self) -> Option<SlotIndex> {
        self.release.pop_front()
    }

    pub(super) fn posted_slots(&mut self, count: u32) {
        let surplus = if self.narrowing { count.min(self.window - self.least_window) } else { 0 };
        self.window -= surplus;
        self.released += u64::from(count);
        self.granted += u64::from(count - surplus);
    }

    pub(super) fn window(&self) -> u32 {
        self.window
    }

    pub(super) fn widen(&mut self, slots: u32) {
        self.window += slots;
        self.narrowing = false;
        self.granted += u64::from(slots);
    }

    /// The peer does without `count` of its credits: they count as used and free, and the window is narrower.
    pub(super) fn returned(&mut self, count: u32) -> Result<(), Violation> {
        let unused = self.granted_told.saturating_sub(self.received);
        let most = u64::from(self.window - self.least_window).min(unused);
        if u64::from(count) > most {
            return Err(Violation::Returned { seen: count, most });
        }
        self.received += u64::from(count);
        self.released += u64::from(count);
        self.window -= count;
        // What the peer was not told of can be taken back without a word; what it is about to be told of later, too.
        let untold = (self.granted - self.granted_told).min(u64::from(self.window - self.least_window));
        self.granted -= untold;
        self.window -= untold as u32;
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

    /// Marks a READ as landed. Only what landed without a gap counts as done.
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
        let there = match part {
            Part::Eager { .. } => true,
            // The part at the head belongs to the oldest read.
            Part::Rendezvous { .. } => self.landed > 0,
        };
        there.then_some(part)
    }

    pub(super) fn consume(&mut self, count: usize) -> Option<Finished> {
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
        Some(match front {
            Part::Eager { slot, .. } => {
                self.release.push_back(slot);
                Finished::Slot(slot)
            }
            Part::Rendezvous { read, .. } => {
                self.reads.pop_front();
                self.first_read = self.first_read.wrapping_add(1);
                (self.landed, self.posted) = (self.landed - 1, self.posted - 1);
                Finished::Read(read)
            }
        })
    }

    /// Whether the peer should be told of freed slots or finished reads although there is nothing else to say.
    pub(super) fn ack_due(&self) -> bool {
        let freed = self.granted - self.granted_told;
        freed >= u64::from(self.window) / 4
            || (self.freed_by_control >= self.reserve / 2 && freed > 0)
            || self.reads_done > self.reads_told
    }

    /// Returns whether the peer has offered memory that was not read to its end.
    pub(super) fn awaits_reads(&self) -> bool {
        self.landed < self.reads.len()
    }

    /// Whether the peer knows of every finished read, and there is none left to finish.
    pub(super) fn reads_settled(&self) -> bool {
        self.reads_done == self.reads_told && self.landed == self.reads.len()
    }

    /// The counts for a header that is being sent.
    pub(super) fn tell(&mut self) -> (u64, u64) {
        (self.granted_told, self.reads_told) = (self.granted, self.reads_done);
        self.freed_by_control = 0;
        (self.granted, self.reads_done)
    }

    /// Whether the peer's end was received and everything before it delivered.
    pub(super) fn is_finished(&self) -> bool {
        self.fin && self.parts.is_empty()
    }
}
