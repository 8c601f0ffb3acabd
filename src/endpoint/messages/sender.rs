//! What a handler may do while it transmits.

use std::io::IoSlice;
use std::marker::PhantomData;

use crate::endpoint::fault::ConnectionFault;
use tonic_rdma_verbs::RemoteSegment;
use tonic_rdma_verbs::memory::{Block, Lease, PoolError};

/// The sending side of a message connection, during [`MessageHandler::transmit`](super::MessageHandler::transmit).
#[derive(Debug)]
pub(crate) struct Sender<'a> {
    state: PhantomData<&'a mut ()>,
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
    /// Most slices of one message.
    pub(crate) const SLICES: usize = 14;

    /// Returns how many bytes one message may have now; 0 means to wait for the next call of `transmit`. The value is
    /// [`max_message`](super::MessageEndpoint::max_message) or 0.
    pub(crate) fn room(&self) -> usize {
        let _ = self.state;
        unimplemented!()
    }

    /// Sends one message, the concatenation of `slices`: at least 1 byte, at most [`room`](Self::room) bytes. The bytes are copied
    /// before this function returns. More than [`SLICES`](Self::SLICES) slices cost another copy.
    ///
    /// # Errors
    /// The message is too long or empty, or the device refuses it.
    pub(crate) fn send(&mut self, slices: &[IoSlice<'_>]) -> Result<(), ConnectionFault> {
        let _ = slices;
        unimplemented!()
    }

    /// Starts a fetch: reads the concatenation of `pieces` into one piece of registered memory, whose byte `aligned_at` lies at a
    /// multiple of 64. [`landed`](super::MessageHandler::landed) gets the memory, with the number `id`, after this function has
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
        let _ = (id, pieces, aligned_at);
        unimplemented!()
    }

    /// Ends the fetch `id`: no more READs are posted for it. `landed` is called without memory when the READs under way are over,
    /// maybe at once after `transmit` has returned; until then the peer must keep its memory. Does nothing if the fetch has landed.
    pub(crate) fn cancel_fetch(&mut self, id: u64) {
        let _ = id;
        unimplemented!()
    }

    /// Leases memory for content that the peer is to read ([`Block::remote`] names it). The caller keeps the block until the peer says
    /// that it has read it. `transmit` is called again some milliseconds after an error.
    ///
    /// # Errors
    /// There is no memory now.
    pub(crate) fn lease(&mut self, length: usize) -> Result<Block, PoolError> {
        let _ = length;
        unimplemented!()
    }

    /// Gives the peer the right to read `bytes`, if they lie in memory of a pool for sending
    /// ([`Pool::for_sending`](tonic_rdma_verbs::memory::Pool::for_sending)), and the settings allow that. Returns `None` if the bytes
    /// have to be copied.
    pub(crate) fn expose(&mut self, bytes: &[u8]) -> Option<Exposed> {
        let _ = bytes;
        unimplemented!()
    }
}
