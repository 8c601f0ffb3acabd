//! Messages by views: each end stores its messages in its own memory, and loads those of the peer from the peer's memory.
//!
//! ```text
//!   section of this rank's board for the peer      the peer's section for this rank, by a view
//!     taken   messages of the peer taken here        taken   messages of this rank taken there
//!     slots   messages to the peer                   slots   messages from the peer
//! ```

use tonic_rdma_tensor::{RegionView, SharedRegion};

use crate::lane::remote::message::{HEADER, Head, LINE, Layout, Look, SHORT, look};
use crate::lane::{LaneFault, violation};

/// The memory of both ends.
pub(super) struct ViewWire {
    board: SharedRegion,
    /// The offset of the section for the peer.
    ours: usize,
    view: RegionView,
    /// The offset of the peer's section for this rank.
    theirs: usize,
}

impl ViewWire {
    pub(super) fn new(board: SharedRegion, ours: usize, view: RegionView, theirs: usize) -> Self {
        Self { board, ours, view, theirs }
    }

    /// Puts a message into the slot at `slot`.
    ///
    /// The first line is stored word by word: a store of a whole vector would have to wait for the words that it is made of.
    #[inline]
    pub(super) fn put(&self, slot: usize, head: Head, payload: &[u8]) -> Result<(), LaneFault> {
        let at = self.ours + slot;
        let (first, rest) = payload.split_at(payload.len().min(SHORT));
        if !rest.is_empty() {
            self.board.copy_in(at + LINE, rest).map_err(|_| outside())?;
        }
        let store = |offset, word| self.board.store_u64(at + offset, word).map_err(|_| outside());
        let (words, few) = first.as_chunks::<8>();
        for (index, word) in words.iter().enumerate() {
            store(HEADER + 8 * index, u64::from_ne_bytes(*word))?;
        }
        if !few.is_empty() {
            let mut word = [0; 8];
            word[..few.len()].copy_from_slice(few);
            store(HEADER + 8 * words.len(), u64::from_ne_bytes(word))?;
        }
        store(8, head.place.to_le())?;
        store(16, head.call.to_le())?;
        // The word comes last: a peer that sees the word sees the message.
        store(0, head.word.to_le())
    }

    /// Has this processor get the first lines of the free slot at `slot` for writing, as many as a payload of `length` bytes needs. The
    /// peer has looked at these lines before, so the next message would have to wait for them. The stores change no word that the peer
    /// looks at.
    #[inline]
    pub(super) fn claim(&self, slot: usize, length: usize) -> Result<(), LaneFault> {
        /// The most lines; a longer message takes some time anyway.
        const MOST: usize = 4;
        let lines = (HEADER + length).div_ceil(LINE).min(MOST);
        for line in 0..lines {
            self.board.store_u64(self.ours + slot + LINE * line + 8, 0).map_err(|_| outside())?;
        }
        Ok(())
    }

    /// Returns the head of message `number`, if the message is in the slot at `slot`.
    #[inline]
    pub(super) fn look(&self, slot: usize, number: u64, slots: u32) -> Result<Option<Head>, LaneFault> {
        let word = self.word(slot)?;
        match look(word, number, slots) {
            Look::Arrived => {
                let (place, call) = (self.word(slot + 8)?, self.word(slot + 16)?);
                Ok(Some(Head { word, place, call }))
            }
            Look::NotYet => Ok(None),
            Look::Wrong => Err(wrong_word(word, number)),
        }
    }

    #[inline]
    fn word(&self, offset: usize) -> Result<u64, LaneFault> {
        self.view.load_u64(self.theirs + offset).map(u64::from_le).map_err(|_| outside())
    }

    /// Fills `into` with words of the payload that begins at `offset` of the slots, in the order of bytes in memory.
    #[inline]
    pub(super) fn words(&self, offset: usize, into: &mut [u64]) -> Result<(), LaneFault> {
        for (index, word) in into.iter_mut().enumerate() {
            *word = self.view.load_u64(self.theirs + offset + 8 * index).map_err(|_| outside())?;
        }
        Ok(())
    }

    /// Copies payload bytes at `offset` of the slots into `into`.
    #[inline]
    pub(super) fn copy_out(&self, offset: usize, into: &mut [u8]) -> Result<(), LaneFault> {
        self.view.copy_out(self.theirs + offset, into).map_err(|_| outside())
    }

    /// Returns how many messages of this rank the peer has taken, as the peer says.
    #[inline]
    pub(super) fn taken(&self) -> Result<u64, LaneFault> {
        self.view.load_u64(self.theirs + Layout::TAKEN).map(u64::from_le).map_err(|_| outside())
    }

    /// Tells the peer how many of its messages were taken. The peer looks at this line only when it waits for room or a release, so
    /// the store costs little.
    #[inline]
    pub(super) fn report(&self, taken: u64) -> Result<(), LaneFault> {
        self.board.store_u64(self.ours + Layout::TAKEN, taken.to_le()).map_err(|_| outside())
    }
}

/// Makes the fault of a slot whose word is impossible.
#[cold]
pub(super) fn wrong_word(word: u64, number: u64) -> LaneFault {
    violation(format!("the slot of message {number} has the word {word:#x}, which is of another message"))
}

/// Makes the fault of an offset outside the memory. The set-up has compared the sizes, so it does not happen.
#[cold]
fn outside() -> LaneFault {
    violation("a slot does not lie within the memory of the lanes")
}
