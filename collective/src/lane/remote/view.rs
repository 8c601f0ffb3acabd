//! Messages by views: each end stores its messages in its own memory, and loads those of the peer from the peer's memory.
//!
//! ```text
//!   section of this rank's board for the peer      the peer's section for this rank, by a view
//!     taken   messages of the peer taken here        taken   messages of this rank taken there
//!     slots   messages to the peer                   slots   messages from the peer
//! ```

use tonic_rdma_tensor::{RegionView, SharedRegion};

use crate::lane::LaneFault;
use crate::lane::remote::fault::violation;
use crate::lane::remote::message::{LINE, Layout, Line, Look, look};

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

    /// Puts a message into the slot at `slot`. `rest` is the payload behind the first line.
    #[inline]
    pub(super) fn put(&self, slot: usize, line: &Line, word: u64, rest: &[u8]) -> Result<(), LaneFault> {
        let at = self.ours + slot;
        if !rest.is_empty() {
            self.board.copy_in(at + LINE, rest).map_err(|_| outside())?;
        }
        self.board.copy_in(at + 8, &line[8..]).map_err(|_| outside())?;
        // The word comes last: a peer that sees the word sees the message.
        self.board.store_u64(at, word.to_le()).map_err(|_| outside())
    }

    /// Has this processor get the first line of the free slot at `slot` for writing. The peer has looked at this line before, so the
    /// next message would have to wait for the line. The store changes no word that the peer looks at.
    #[inline]
    pub(super) fn claim(&self, slot: usize) -> Result<(), LaneFault> {
        self.board.store_u64(self.ours + slot + 8, 0).map_err(|_| outside())
    }

    /// Returns the word and the first line of message `number`, if the message is in the slot at `slot`.
    #[inline]
    pub(super) fn look(
        &self,
        slot: usize,
        number: u64,
        slots: u32,
    ) -> Result<Option<(u64, Line)>, LaneFault> {
        let at = self.theirs + slot;
        let word = u64::from_le(self.view.load_u64(at).map_err(|_| outside())?);
        match look(word, number, slots) {
            Look::Arrived => {
                let mut line = [0; LINE];
                self.view.copy_out(at + 8, &mut line[8..]).map_err(|_| outside())?;
                Ok(Some((word, line)))
            }
            Look::NotYet => Ok(None),
            Look::Wrong => Err(wrong_word(word, number)),
        }
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
