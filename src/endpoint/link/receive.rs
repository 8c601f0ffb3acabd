//! A connection's receive buffers: its own, or a share of the buffers of its completion queue.

use super::shared_receive::{BufferError, Promise, segments};
use super::work_id::{WorkId, WorkKind};
use crate::endpoint::fault::ConnectionFault;
use crate::protocol;
use tonic_rdma_verbs::memory::Block;
use tonic_rdma_verbs::{LocalSegment, OutOfBounds, QueuePair, QueuePairNumber, ReceiveRequest};

/// The receive buffers of one connection.
#[derive(Debug)]
pub(crate) enum Receives {
    /// Buffers that only this connection uses.
    Own(Ring),
    /// Buffers that all connections of the completion queue use.
    Shared(Share),
}

/// The buffers of one connection, posted to its queue pair.
#[derive(Debug)]
pub(crate) struct Ring {
    block: Block,
    slot_size: usize,
    segments: Vec<LocalSegment>,
}

/// A connection's share of shared buffers.
#[derive(Debug)]
pub(crate) struct Share {
    promise: Promise,
    owner: QueuePairNumber,
    /// Most buffers that the connection may have at a time.
    most: u32,
    /// Messages received since the window last grew.
    received: u32,
}

impl Ring {
    /// Divides `block` into `slots` buffers.
    pub(crate) fn new(block: Block, slots: u32, slot_size: usize) -> Result<Self, OutOfBounds> {
        let segments = segments(&block, slots, slot_size)?;
        Ok(Self { block, slot_size, segments })
    }
}

impl Share {
    /// Makes the share of the connection with the queue pair `owner`. The share may grow to `most` buffers.
    pub(crate) fn new(promise: Promise, owner: QueuePairNumber, most: u32) -> Self {
        Self { promise, owner, most, received: 0 }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.promise.buffers.post_all_of(self.owner);
    }
}

impl Receives {
    /// Posts the buffers that the peer needs before it may send.
    pub(crate) fn post_first(
        &self,
        queue_pair: &dyn QueuePair,
        connection: u32,
    ) -> Result<(), ConnectionFault> {
        let Self::Own(ring) = self else { return Ok(()) };
        (0..ring.segments.len() as u32).try_for_each(|slot| self.post(slot, queue_pair, connection))
    }

    /// Posts the buffer of `slot` again.
    pub(crate) fn post(
        &self,
        slot: u32,
        queue_pair: &dyn QueuePair,
        connection: u32,
    ) -> Result<(), ConnectionFault> {
        match self {
            Self::Own(ring) => {
                let wr_id = WorkId { kind: WorkKind::Receive, connection, value: slot }.to_bits();
                let into = std::slice::from_ref(&ring.segments[slot as usize]);
                Ok(queue_pair.post_receive(&[ReceiveRequest { wr_id, into }])?)
            }
            Self::Shared(share) => share.promise.buffers.post(slot).map_err(ConnectionFault::local),
        }
    }

    /// Notes that a message has come into the shared buffer `slot`.
    pub(crate) fn hold(&mut self, slot: u32) {
        if let Self::Shared(share) = self {
            share.promise.buffers.hold(slot, share.owner);
            share.received = share.received.saturating_add(1);
        }
    }

    /// Returns the memory of the buffer `slot`, and the offset of the buffer in it.
    pub(crate) fn slot(&self, slot: u32) -> Result<(&Block, usize), ConnectionFault> {
        match self {
            Self::Own(ring) => Ok((&ring.block, slot as usize * ring.slot_size)),
            Self::Shared(share) => {
                let found = share.promise.buffers.slot(slot);
                found.ok_or_else(|| ConnectionFault::local(BufferError::Unknown(slot)))
            }
        }
    }

    /// Gives back promised buffers beyond the protocol's window, and widens the window of a peer that sends a lot.
    pub(crate) fn adjust_window(&mut self, protocol: &mut protocol::Connection) {
        let Self::Shared(share) = self else { return };
        let window = protocol.window();
        share.promise.shrink_to(window);
        if share.received < window || window >= share.most {
            return;
        }
        share.received = 0;
        let more = window.min(share.most - window);
        // Without more buffers the window stays as it is.
        if share.promise.grow(more).is_ok() {
            protocol.widen(more);
        }
    }
}
