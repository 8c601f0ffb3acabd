//! Messages by writes: each end writes its messages into memory of the peer, and the peer learns of them by notices.
//!
//! ```text
//!   ring of this rank for the peer, which the peer writes    the peer's ring for this rank, which this rank writes
//!     taken   messages of this rank taken there                taken   messages of the peer taken here
//!     slots   messages from the peer                           slots   messages to the peer
//! ```
//!
//! A count of taken messages is written twice, the second time with all bits turned. A device that does not write 16 bytes at
//! once can so show no mixture of two counts.

use std::io::IoSlice;

use tonic_rdma_tensor::{Channel, ChannelError, ExportedRegion, RemoteRegion};

use crate::lane::remote::message::{HEADER, Head, Layout, Look, look};
use crate::lane::remote::view::wrong_word;
use crate::lane::{LaneFault, violation};

/// The rings of both ends.
pub(super) struct WriteWire {
    channel: Channel,
    ring: ExportedRegion,
    remote: RemoteRegion,
    /// The number of notices that came.
    arrived: u64,
    /// The number of messages that were taken.
    taken: u64,
    /// The number of taken messages that the peer knows of.
    reported: u64,
    /// Whether the peer must learn of taken messages at once, because one of them was a reference.
    urgent: bool,
    /// Calls of `progress` since the last message.
    idle: u32,
}

impl WriteWire {
    /// Calls of `progress` without a message after which the peer learns of all taken messages.
    const IDLE: u32 = 64;

    pub(super) fn new(channel: Channel, ring: ExportedRegion, remote: RemoteRegion) -> Self {
        Self { channel, ring, remote, arrived: 0, taken: 0, reported: 0, urgent: false, idle: 0 }
    }

    /// Writes a message into the slot at `slot`. Returns false if the queue is full.
    pub(super) fn put(&self, slot: usize, head: Head, payload: &[u8]) -> Result<bool, LaneFault> {
        self.write(slot, &[IoSlice::new(&head.to_bytes()), IoSlice::new(payload)], true)
    }

    /// Returns the head of message `number`, if the message has arrived.
    pub(super) fn look(&mut self, slot: usize, number: u64, slots: u32) -> Result<Option<Head>, LaneFault> {
        if self.arrived <= number {
            self.take_notice(slots)?;
        }
        if self.arrived <= number {
            return Ok(None);
        }
        let mut bytes = [0; HEADER];
        self.copy_out(slot, &mut bytes)?;
        let head = Head::from_bytes(bytes);
        match look(head.word, number, slots) {
            Look::Arrived => Ok(Some(head)),
            Look::NotYet | Look::Wrong => Err(wrong_word(head.word, number)),
        }
    }

    /// Copies payload bytes at `offset` of the ring into `into`.
    pub(super) fn copy_out(&self, offset: usize, into: &mut [u8]) -> Result<(), LaneFault> {
        let outside = |_| violation("a slot does not lie within the memory of the lanes");
        self.ring.memory().copy_out(offset, into).map_err(outside)
    }

    /// Returns how many messages of this rank the peer has taken, as the peer says, or `None` while the count changes.
    pub(super) fn taken(&mut self, slots: u32) -> Result<Option<u64>, LaneFault> {
        // Some devices carry out the peer's writes only when this end looks for notices.
        self.take_notice(slots)?;
        let mut bytes = [0; 16];
        self.copy_out(Layout::TAKEN, &mut bytes)?;
        let (mut count, mut turned) = ([0; 8], [0; 8]);
        count.copy_from_slice(&bytes[..8]);
        turned.copy_from_slice(&bytes[8..]);
        let count = u64::from_le_bytes(count);
        let whole = count == !u64::from_le_bytes(turned) || bytes == [0; 16];
        Ok(whole.then_some(count))
    }

    /// Notes that `taken` messages were taken. The peer learns of it in [`progress`](Self::progress), or at once if it waits for
    /// the release of memory, or if half of the slots are taken.
    pub(super) fn report(&mut self, taken: u64, urgent: bool, slots: u32) -> Result<(), LaneFault> {
        self.taken = taken;
        self.urgent |= urgent;
        self.idle = 0;
        if self.urgent || taken - self.reported >= u64::from(slots / 2) {
            return self.write_count();
        }
        Ok(())
    }

    /// Takes notices, and tells the peer of taken messages if that is due.
    pub(super) fn progress(&mut self, slots: u32) -> Result<(), LaneFault> {
        self.take_notice(slots)?;
        if self.reported == self.taken {
            return Ok(());
        }
        self.idle += 1;
        if self.urgent || self.idle >= Self::IDLE || self.taken - self.reported >= u64::from(slots / 2) {
            return self.write_count();
        }
        Ok(())
    }

    /// Writes no count any more.
    pub(super) fn give_up(&mut self) {
        (self.reported, self.urgent) = (self.taken, false);
    }

    fn take_notice(&mut self, slots: u32) -> Result<(), LaneFault> {
        if self.ring.try_notice() {
            self.arrived += 1;
            if self.arrived - self.taken > u64::from(slots) {
                return Err(violation(format!("it sent more than {slots} messages ahead")));
            }
        }
        Ok(())
    }

    fn write_count(&mut self) -> Result<(), LaneFault> {
        let (count, turned) = (self.taken.to_le_bytes(), (!self.taken).to_le_bytes());
        if self.write(Layout::TAKEN, &[IoSlice::new(&count), IoSlice::new(&turned)], false)? {
            (self.reported, self.urgent, self.idle) = (self.taken, false, 0);
        }
        Ok(())
    }

    /// Returns false if the queue is full.
    fn write(&self, at: usize, parts: &[IoSlice<'_>], notify: bool) -> Result<bool, LaneFault> {
        match self.channel.write(&self.remote).at(at as u64).notify(notify).bytes(parts) {
            Ok(()) => Ok(true),
            Err(ChannelError::Busy(_)) => {
                self.channel.poll();
                Ok(false)
            }
            Err(error) => Err(LaneFault::Lost(error)),
        }
    }
}

impl Drop for WriteWire {
    /// Tells the peer of all taken messages, so that the peer does not take this end for lost before it knows.
    fn drop(&mut self) {
        if self.reported != self.taken {
            // The peer may be gone.
            let _ = self.write_count();
        }
    }
}
