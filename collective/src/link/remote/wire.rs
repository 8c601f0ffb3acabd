//! The two ways in which messages travel between two ranks.

use std::io::IoSlice;

use crate::link::remote::message::{HEADER, Header, LINE, Layout, SHORT, SlotState, slot_state};
use crate::link::{LinkFault, violation};
use tonic_rdma_tensor::{Channel, ExportedRegion, RegionView, RemoteRegion, SharedRegion, TensorErrorKind};

/// Messages by views: each rank stores its messages in its own memory, and loads those of the peer from the
/// peer's memory.
///
/// ```text
///   section of this rank's outbox for the peer       the peer's section for this rank, by a view
///     taken   messages of the peer taken here          taken   messages of this rank taken there
///     slots   messages to the peer                     slots   messages from the peer
/// ```
pub(super) struct MappedWire {
    outbox: SharedRegion,
    /// The offset of the section for the peer.
    ours: usize,
    view: RegionView,
    /// The offset of the peer's section for this rank.
    theirs: usize,
}

impl MappedWire {
    pub(super) fn new(outbox: SharedRegion, ours: usize, view: RegionView, theirs: usize) -> Self {
        Self { outbox, ours, view, theirs }
    }

    /// Puts a message into the slot at `slot`.
    ///
    /// The first line is stored word by word: a store of a whole vector would have to wait for the words that
    /// it is made of.
    #[inline]
    pub(super) fn put(&self, slot: usize, header: Header, payload: &[u8]) -> Result<(), LinkFault> {
        let at = self.ours + slot;
        let (first, rest) = payload.split_at(payload.len().min(SHORT));
        if !rest.is_empty() {
            self.outbox.copy_in(at + LINE, rest).map_err(|_| outside())?;
        }
        let store = |offset, word| self.outbox.store_u64(at + offset, word).map_err(|_| outside());
        let (words, few) = first.as_chunks::<8>();
        for (index, word) in words.iter().enumerate() {
            store(HEADER + 8 * index, u64::from_ne_bytes(*word))?;
        }
        if !few.is_empty() {
            let mut word = [0; 8];
            word[..few.len()].copy_from_slice(few);
            store(HEADER + 8 * words.len(), u64::from_ne_bytes(word))?;
        }
        store(8, header.position.to_le())?;
        store(16, header.call.to_le())?;
        // The word comes last: a peer that sees the word sees the message.
        store(0, header.word.to_le())
    }

    /// Fetches the first cache lines of the free slot at `slot` for writing, as many as a payload of `length`
    /// bytes needs. The peer has loaded these lines before, so the next message would have to wait for them.
    /// The stores change no word that the peer polls.
    #[inline]
    pub(super) fn claim(&self, slot: usize, length: usize) -> Result<(), LinkFault> {
        /// The most lines; a longer message takes some time anyway.
        const MOST: usize = 4;
        let lines = (HEADER + length).div_ceil(LINE).min(MOST);
        for line in 0..lines {
            self.outbox.store_u64(self.ours + slot + LINE * line + 8, 0).map_err(|_| outside())?;
        }
        Ok(())
    }

    /// Returns the header of message `number`, if the message is in the slot at `slot`.
    #[inline]
    pub(super) fn poll(&self, slot: usize, number: u64, slots: u32) -> Result<Option<Header>, LinkFault> {
        let word = self.word(slot)?;
        match slot_state(word, number, slots) {
            SlotState::Arrived => {
                let (position, call) = (self.word(slot + 8)?, self.word(slot + 16)?);
                Ok(Some(Header { word, position, call }))
            }
            SlotState::NotYet => Ok(None),
            SlotState::Wrong => Err(wrong_word(word, number)),
        }
    }

    #[inline]
    fn word(&self, offset: usize) -> Result<u64, LinkFault> {
        self.view.load_u64(self.theirs + offset).map(u64::from_le).map_err(|_| outside())
    }

    /// Fills `into` with the words at `offset` of the section, in the order of bytes in memory.
    #[inline]
    pub(super) fn words(&self, offset: usize, into: &mut [u64]) -> Result<(), LinkFault> {
        for (index, word) in into.iter_mut().enumerate() {
            *word = self.view.load_u64(self.theirs + offset + 8 * index).map_err(|_| outside())?;
        }
        Ok(())
    }

    /// Copies payload bytes at `offset` of the section into `into`.
    #[inline]
    pub(super) fn copy_out(&self, offset: usize, into: &mut [u8]) -> Result<(), LinkFault> {
        self.view.copy_out(self.theirs + offset, into).map_err(|_| outside())
    }

    /// Returns how many messages of this rank the peer has taken, as the peer says.
    #[inline]
    pub(super) fn taken(&self) -> Result<u64, LinkFault> {
        self.view.load_u64(self.theirs + Layout::TAKEN).map(u64::from_le).map_err(|_| outside())
    }

    /// Tells the peer how many of its messages were taken. The peer loads this line only when it waits for
    /// room or a release, so the store costs little.
    #[inline]
    pub(super) fn report(&self, taken: u64) -> Result<(), LinkFault> {
        self.outbox.store_u64(self.ours + Layout::TAKEN, taken.to_le()).map_err(|_| outside())
    }
}

/// Makes the fault of a slot whose word is impossible.
#[cold]
pub(super) fn wrong_word(word: u64, number: u64) -> LinkFault {
    violation(format!("the slot of message {number} has the word {word:#x}, which is of another message"))
}

/// Makes the fault of an offset outside the memory. The set-up has compared the sizes, so it does not happen.
#[cold]
fn outside() -> LinkFault {
    violation("a slot does not lie within the memory of the links")
}

/// Messages by writes: each rank writes its messages into memory of the peer, and the peer learns of them by
/// notices.
///
/// ```text
///   ring of this rank for the peer, which the peer writes    the peer's ring for this rank, which this rank writes
///     taken   messages of this rank taken there                taken   messages of the peer taken here
///     slots   messages from the peer                           slots   messages to the peer
/// ```
///
/// A count of taken messages is written twice, the second time with all bits inverted. So the reader finds a
/// mixture of two counts, which a device that does not write 16 bytes at once may show.
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
    pub(super) fn put(&self, slot: usize, header: Header, payload: &[u8]) -> Result<bool, LinkFault> {
        self.write(slot, &[IoSlice::new(&header.to_bytes()), IoSlice::new(payload)], true)
    }

    /// Returns the header of message `number`, if the message has arrived.
    pub(super) fn poll(&mut self, slot: usize, number: u64, slots: u32) -> Result<Option<Header>, LinkFault> {
        if self.arrived <= number {
            self.take_notice(slots)?;
        }
        if self.arrived <= number {
            return Ok(None);
        }
        let mut bytes = [0; HEADER];
        self.copy_out(slot, &mut bytes)?;
        let header = Header::from_bytes(bytes);
        match slot_state(header.word, number, slots) {
            SlotState::Arrived => Ok(Some(header)),
            SlotState::NotYet | SlotState::Wrong => Err(wrong_word(header.word, number)),
        }
    }

    /// Copies payload bytes at `offset` of the ring into `into`.
    pub(super) fn copy_out(&self, offset: usize, into: &mut [u8]) -> Result<(), LinkFault> {
        self.ring.memory().copy_out(offset, into).map_err(|_| outside())
    }

    /// Returns how many messages of this rank the peer has taken, as the peer says, or `None` while the count
    /// changes.
    pub(super) fn taken(&mut self, slots: u32) -> Result<Option<u64>, LinkFault> {
        // Some devices carry out the peer's writes only when this rank polls for notices.
        self.take_notice(slots)?;
        let mut bytes = [0; 16];
        self.copy_out(Layout::TAKEN, &mut bytes)?;
        let [count, inverted] = bytemuck::pod_read_unaligned::<[u64; 2]>(&bytes).map(u64::from_le);
        let whole = count == !inverted || bytes == [0; 16];
        Ok(whole.then_some(count))
    }

    /// Notes that `taken` messages were taken. The peer learns of it in [`progress`](Self::progress), or at
    /// once if it waits for the release of memory, or if half of the slots are taken.
    pub(super) fn report(&mut self, taken: u64, urgent: bool, slots: u32) -> Result<(), LinkFault> {
        self.taken = taken;
        self.urgent |= urgent;
        self.idle = 0;
        if self.urgent || taken - self.reported >= u64::from(slots / 2) {
            return self.write_count();
        }
        Ok(())
    }

    /// Takes notices, and tells the peer of taken messages if that is due.
    pub(super) fn progress(&mut self, slots: u32) -> Result<(), LinkFault> {
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

    fn take_notice(&mut self, slots: u32) -> Result<(), LinkFault> {
        if self.ring.try_notice() {
            self.arrived += 1;
            if self.arrived - self.taken > u64::from(slots) {
                return Err(violation(format!("it sent more than {slots} messages ahead")));
            }
        }
        Ok(())
    }

    fn write_count(&mut self) -> Result<(), LinkFault> {
        let (count, inverted) = (self.taken.to_le_bytes(), (!self.taken).to_le_bytes());
        if self.write(Layout::TAKEN, &[IoSlice::new(&count), IoSlice::new(&inverted)], false)? {
            (self.reported, self.urgent, self.idle) = (self.taken, false, 0);
        }
        Ok(())
    }

    /// Returns false if the queue is full.
    fn write(&self, at: usize, parts: &[IoSlice<'_>], notify: bool) -> Result<bool, LinkFault> {
        match self.channel.write(&self.remote).at(at as u64).notify(notify).bytes(parts) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == TensorErrorKind::Busy => {
                self.channel.poll();
                Ok(false)
            }
            Err(error) => Err(error.into()),
        }
    }
}

impl Drop for WriteWire {
    /// Tells the peer of all taken messages, so that the peer does not report this rank as lost before it
    /// knows.
    fn drop(&mut self) {
        if self.reported != self.taken {
            // The peer may be gone.
            let _ = self.write_count();
        }
    }
}
