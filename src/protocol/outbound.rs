//! The sending direction: credits, places on the send queue, and chunks that the peer is reading.

use super::connection::Blocked;
use super::settings::Settings;
use super::violation::Violation;
use crate::wire::Header;

/// The number of chunks that may be offered and not read yet, in each direction.
pub const MAX_OFFERED: u64 = 64;

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
    queued: u32,
    pub(super) offered: u64,
    offers_done: u64,
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
            offered: 0,
            offers_done: 0,
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
        } else if self.queued + Settings::CONTROL_PLACES >= self.queue {
            Some(Blocked::SendQueue)
        } else {
            None
        }
    }

    /// Returns the number of bytes that one eager message may carry now.
    pub(super) fn eager_room(&self) -> usize {
        let may = self.state == WriteState::Open && self.blocked().is_none();
        if may { self.payload } else { 0 }
    }

    /// Returns the number of chunks that may be offered now.
    pub(super) fn offer_room(&self) -> u64 {
        let may = self.state == WriteState::Open && self.blocked().is_none();
        if may { MAX_OFFERED - (self.offered - self.offers_done) } else { 0 }
    }

    pub(super) fn may_send_control(&self) -> bool {
        self.credits() > 0 && self.queued < self.queue
    }

    /// Takes a credit and a place for a message, and returns the number of the message.
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

    pub(super) fn completed(&mut self, count: u32) {
        self.queued = self.queued.saturating_sub(count);
    }

    /// Takes the counts of a header, and returns how many more chunks the peer has read.
    pub(super) fn counts(&mut self, header: &Header) -> Result<u64, Violation> {
        let (least, most) = (self.granted, u64::from(Settings::MAX_SLOTS) + self.sent);
        if !(least..=most).contains(&header.granted) {
            return Err(Violation::Granted { seen: header.granted, least, most });
        }
        let (least, most) = (self.offers_done, self.offered);
        if !(least..=most).contains(&header.reads_done) {
            return Err(Violation::ReadsDone { seen: header.reads_done, least, most });
        }
        self.granted = header.granted;
        self.offers_done = header.reads_done;
        Ok(header.reads_done - least)
    }

    /// Returns true if the peer has not read all offered chunks.
    pub(super) fn is_offering(&self) -> bool {
        self.offers_done < self.offered
    }

    /// Returns true if everything was sent, and the peer has read all offered chunks.
    pub(super) fn is_done(&self) -> bool {
        self.state == WriteState::Closed && self.offers_done == self.offered
    }
}
