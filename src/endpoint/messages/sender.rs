//! What a handler may do while it transmits.

use std::io::IoSlice;

use super::fetches::Fetches;
use super::memory::MessageMemory;
use crate::endpoint::counters::Counters;
use crate::endpoint::fault::ConnectionFault;
use crate::endpoint::link::Link;
use crate::protocol::{self, Blocked};
use tonic_rdma_verbs::RemoteSegment;
use tonic_rdma_verbs::memory::{Block, Lease, PoolError, Quota};

/// The sending side of a message connection, during [`MessageHandler::transmit`](super::MessageHandler::transmit).
#[derive(Debug)]
pub(crate) struct Sender<'a> {
    pub(super) link: &'a mut Link,
    pub(super) protocol: &'a mut protocol::Connection,
    pub(super) memory: &'a mut MessageMemory,
    pub(super) fetches: &'a mut Fetches,
    pub(super) counters: &'a Counters,
    /// Memory was refused.
    pub(super) refused: bool,
}

/// A part of the content of a fetch, in order.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Piece<'a> {
    /// Bytes of the peer's memory.
    Remote {
        /// The address, and the key of the peer's region.
        from: RemoteSegment,
        /// The length in bytes.
        length: u64,
    },
    /// Bytes that came in a message. They are copied.
    Inline(&'a [u8]),
}

/// Memory of the application that the peer may read.
#[derive(Debug)]
pub(crate) struct Exposed {
    /// The address and the key for the peer.
    pub(crate) remote: RemoteSegment,
    /// Keeps the bytes in place. Hold it until the peer says that it has read them.
    pub(crate) lease: Lease,
}

/// The reason why a fetch can't be started.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FetchError {
    /// There is no memory now. Keep the fetch: `transmit` is called again when there may be memory.
    #[error("there is no registered memory free: {0}")]
    NoMemory(PoolError),
    /// The content is longer than all memory for landing, so the fetch can never be started.
    #[error("a fetch of {length} bytes, where at most {most} can land (landing budget)")]
    TooLong {
        /// The length of the content.
        length: u64,
        /// The landing budget.
        most: u64,
    },
}

impl Sender<'_> {
    /// Most slices of one message that cost no copy.
    pub(crate) const SLICES: usize = Link::SLICES - 1;

    /// Counts that the handler has messages that have to wait for room.
    pub(crate) fn note_stall(&mut self) {
        match self.protocol.blocked_on() {
            Some(Blocked::Credits) => self.counters.credit_stalls.add(1),
            _ => self.counters.send_stalls.add(1),
        }
    }

    /// Returns how many bytes one message may have now; 0 means to wait for the next call of `transmit`. The value is
    /// the length of the longest message, or 0.
    pub(crate) fn room(&self) -> usize {
        self.protocol.eager_room()
    }

    /// Sends one message, the concatenation of `slices`: at least 1 byte, at most [`room`](Self::room) bytes. The bytes are copied
    /// before this function returns. More than [`SLICES`](Self::SLICES) slices cost another copy.
    ///
    /// # Errors
    /// The message is too long or empty, or the device refuses it.
    pub(crate) fn send(&mut self, slices: &[IoSlice<'_>]) -> Result<(), ConnectionFault> {
        let length: usize = slices.iter().map(|slice| slice.len()).sum();
        if length == 0 {
            return Err(ConnectionFault::local("a message without bytes"));
        }
        if slices.len() > Self::SLICES {
            let mut whole = Vec::with_capacity(length);
            slices.iter().for_each(|slice| whole.extend_from_slice(slice));
            return self.post(length, &[IoSlice::new(&whole)]);
        }
        self.post(length, slices)
    }

    fn post(&mut self, length: usize, slices: &[IoSlice<'_>]) -> Result<(), ConnectionFault> {
        let header = self.protocol.send_eager(length).map_err(ConnectionFault::local)?;
        let mut message = [IoSlice::new(&[]); Link::SLICES];
        message[0] = IoSlice::new(&header);
        message[1..=slices.len()].copy_from_slice(slices);
        let in_place = self.link.post_message(&message[..=slices.len()])?.min(length);
        self.counters.eager_sent.add(1);
        self.counters.eager_sent_bytes.add(length as u64);
        self.counters.work_requests.add(1);
        self.counters.copies_avoided_bytes.add(in_place as u64);
        Ok(())
    }

    /// Starts a fetch: reads the concatenation of `pieces` into one piece of registered memory, whose byte `aligned_at` lies at a
    /// multiple of 64. [`landed`](super::MessageHandler::landed) gets the memory, with the number `id`, after `transmit` has
    /// returned. Many fetches take turns.
    ///
    /// # Errors
    /// There is no memory now, or the content is too long ever to land.
    pub(crate) fn fetch(
        &mut self,
        id: u64,
        pieces: &[Piece<'_>],
        aligned_at: usize,
    ) -> Result<(), FetchError> {
        let length = pieces.iter().fold(0_u64, |sum, piece| sum.saturating_add(piece.length()));
        let landing = self.memory.lease(length, aligned_at);
        let landing =
            landing.inspect_err(|error| self.refused |= matches!(error, FetchError::NoMemory(_)))?;
        self.fetches.add(id, pieces, landing);
        Ok(())
    }

    /// Ends the fetch `id`: no more READs are posted for it. `landed` is called without memory when the READs under way are over,
    /// maybe at once after `transmit` has returned; until then the peer must keep its memory. Does nothing if the fetch has landed.
    pub(crate) fn cancel_fetch(&mut self, id: u64) {
        self.fetches.cancel(id);
    }

    /// Leases memory for content that the peer is to read ([`Block::remote`] names it). The caller keeps the block until the peer says
    /// that it has read it. `transmit` is called again some milliseconds after an error.
    ///
    /// # Errors
    /// There is no memory now.
    pub(crate) fn lease(&mut self, length: usize) -> Result<Block, PoolError> {
        let leased = self.link.pool().lease(length, Quota::Send);
        match &leased {
            Ok(_) => self.counters.offered_copied_bytes.add(length as u64),
            Err(_) => self.refused = true,
        }
        leased
    }

    /// Gives the peer the right to read `bytes`, if they lie in memory of a pool for sending
    /// ([`Pool::for_sending`](tonic_rdma_verbs::memory::Pool::for_sending)), and the settings allow that. Returns `None` if the bytes
    /// have to be copied.
    pub(crate) fn expose(&mut self, bytes: &[u8]) -> Option<Exposed> {
        let exposed = self.memory.expose(bytes)?;
        self.counters.offered_in_place_bytes.add(bytes.len() as u64);
        Some(exposed)
    }
}

impl Piece<'_> {
    fn length(&self) -> u64 {
        match self {
            Self::Remote { length, .. } => *length,
            Self::Inline(bytes) => bytes.len() as u64,
        }
    }
}
