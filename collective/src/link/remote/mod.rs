//! Links over tensor channels.
//!
//! ```text
//!   RemoteLinks ── RankLink ×(N−1) ─┬─ Wire ─┬─ MappedWire   messages lie in the sender's memory, and the receiver loads them
//!                                   │        └─ WriteWire    messages are written into the receiver's memory
//!                                   ├─ PeerRegions           regions of the peer, by number
//!                                   └─ ElementRead           the bytes of a reference: by a view, or by READs
//! ```
//!
//! This module decides nothing about operations, and waits for nothing after the set-up
//! ([`open`](RemoteLinks::open)). It checks every number of a peer. A peer that breaks a rule fails its own
//! link only.

mod element_read;
mod message;
mod open;
mod rank_link;
#[cfg(test)]
mod tests;
mod wire;

use self::element_read::Sink;
use self::message::ElementReference;
use self::rank_link::{LinkContext, RankLink};
use crate::link::{LinkError, LinkFault, RankLinks, Tag, violation};
use crate::memory::Memory;
use tonic_rdma_tensor::ExportedRegion;

pub(crate) use self::message::{LinkCounters, LinkSettings};

/// The links between this rank and all other ranks. [`open`](Self::open) makes them.
pub(crate) struct RemoteLinks {
    /// One for each rank, none for this rank.
    peers: Vec<Option<Box<RankLink>>>,
    inline: usize,
    /// The number of the pool of the memory that peers can read from.
    pool: u64,
    /// Whether a link goes by writes, which need `progress`.
    writes: bool,
    common: LinkContext,
    rounds: u32,
    /// The memory in which messages to peers with views lie.
    _outbox: ExportedRegion,
}

impl RemoteLinks {
    /// Calls of `progress` between two checks of all channels. The group watches the channels too, and says
    /// sooner that a rank is [lost](Self::lose).
    const CHECK_EVERY: u32 = 4096;

    /// Returns what these links have moved.
    pub(crate) fn counters(&self) -> LinkCounters {
        self.common.counters
    }

    /// Counts from 0 again.
    pub(crate) fn restart_counters(&mut self) {
        self.common.counters = LinkCounters::default();
    }

    /// Runs `work` over the link to a rank. A violation ends this link. After the loss of the peer, messages
    /// that had arrived are still received.
    #[inline]
    fn with<T>(
        &mut self,
        rank: usize,
        work: impl FnOnce(&mut RankLink, &mut LinkContext) -> Result<T, LinkFault>,
    ) -> Result<T, LinkError> {
        let Some(Some(peer)) = self.peers.get_mut(rank) else { return Err(no_link(rank)) };
        let worked = peer.check().and_then(|()| work(peer, &mut self.common));
        worked.map_err(|fault| LinkError { rank, cause: peer.note(fault) })
    }

    /// Ends these links after a failure: nothing more is written to peers, because they may withdraw their
    /// memory from now on.
    pub(crate) fn give_up(&mut self) {
        self.peers.iter_mut().flatten().for_each(|peer| peer.give_up());
    }

    /// Notes why a rank is lost, if the channel to it has closed. What had arrived before is still received.
    pub(crate) fn lose(&mut self, rank: usize, reason: &str) {
        if let Some(Some(peer)) = self.peers.get_mut(rank) {
            peer.check_channel(Some(reason));
        }
    }

    #[cold]
    fn check_channels(&mut self) {
        for peer in self.peers.iter_mut().flatten() {
            peer.check_channel(None);
            peer.regions.sweep();
        }
    }
}

impl RankLinks for RemoteLinks {
    type Memory = Memory;

    fn inline(&self) -> usize {
        self.inline
    }

    fn has_delivered(&mut self) -> bool {
        std::mem::take(&mut self.common.delivered)
    }

    fn offers(&self, memory: &Memory) -> bool {
        memory.pool() == self.pool
    }

    #[inline]
    fn send(&mut self, to: usize, tag: Tag, payload: &[u8]) -> Result<bool, LinkError> {
        self.with(to, |peer, common| peer.send(tag, payload, &mut common.counters))
    }

    fn send_reference(
        &mut self,
        to: usize,
        tag: Tag,
        memory: &Memory,
        offset: usize,
        length: usize,
    ) -> Result<Option<u64>, LinkError> {
        let reference =
            ElementReference { number: memory.number(), offset: offset as u64, length: length as u64 };
        self.with(to, |peer, common| {
            if offset.checked_add(length).is_none_or(|end| end > memory.len()) {
                return Err(violation(format!(
                    "this rank refers to {length} bytes at offset {offset} of memory of {}",
                    memory.len()
                )));
            }
            peer.send_reference(tag, reference, &mut common.counters)
        })
    }

    #[inline]
    fn taken(&mut self, to: usize) -> Result<u64, LinkError> {
        self.with(to, |peer, _| peer.taken())
    }

    #[inline]
    fn peek(&mut self, from: usize) -> Result<Option<(Tag, usize)>, LinkError> {
        self.with(from, |peer, _| peer.peek())
    }

    #[inline]
    fn receive(&mut self, from: usize, then: &mut dyn FnMut(usize, &[u8])) -> Result<bool, LinkError> {
        self.with(from, |peer, common| peer.receive(Sink::Chunks(then), common))
    }

    #[inline]
    fn receive_into(&mut self, from: usize, into: &mut [u8]) -> Result<bool, LinkError> {
        self.with(from, |peer, common| peer.receive(Sink::Memory(into), common))
    }

    #[inline]
    fn progress(&mut self) -> Result<(), LinkError> {
        self.rounds = self.rounds.wrapping_add(1);
        if self.rounds.is_multiple_of(Self::CHECK_EVERY) {
            self.check_channels();
        }
        if self.writes {
            for rank in 0..self.peers.len() {
                if self.peers[rank].is_some() {
                    self.with(rank, |peer, _| peer.progress())?;
                }
            }
        }
        Ok(())
    }
}

#[cold]
fn no_link(rank: usize) -> LinkError {
    LinkError { rank, cause: violation(format!("this rank has no link to rank {rank}")) }
}
