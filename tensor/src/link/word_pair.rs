//! The pair of words of a slot or region.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use crate::error::ChannelError;
use tonic_rdma_verbs::memory::SharedRegion;

/// The words that belong to one slot or region on a link: a pair here, and a pair at the peer.
pub(crate) struct WordPair {
    number: u32,
    peer_number: u32,
    arrivals: Arrivals,
    owner: Weak<dyn Owner>,
    /// The number of bells that the peer rang for this pair.
    bells: Arc<AtomicU64>,
}

/// The owner of a pair, which learns when the link ends.
pub(crate) trait Owner: Send + Sync {
    /// Handles the end of the link, which ended with `fault`.
    fn link_ended(&self, fault: &ChannelError);
}

/// The memory that shows an arrival.
#[derive(Debug)]
pub(crate) enum Arrivals {
    /// The tail of each buffer.
    Tails(Tails),
    /// The count of the pair.
    Count,
}

/// The buffers of a slot: `depth` of them, `stride` bytes apart. At offset `tail` each has the epoch of its content.
#[derive(Debug)]
pub(crate) struct Tails {
    pub(crate) memory: SharedRegion,
    pub(crate) depth: u32,
    pub(crate) stride: usize,
    pub(crate) tail: usize,
    /// The next epoch, where completions report arrivals.
    pub(crate) next: Arc<AtomicU64>,
}

impl Tails {
    /// Returns the offset of the tail of `epoch`.
    pub(crate) fn offset(&self, epoch: u64) -> usize {
        (epoch % u64::from(self.depth)) as usize * self.stride + self.tail
    }

    /// Writes the tail of the next epoch, because a completion reports its arrival.
    pub(crate) fn arrived(&self, epoch: Option<u64>) -> Result<(), ChannelError> {
        let next = self.next.fetch_add(1, Ordering::Relaxed);
        if let Some(epoch) = epoch.filter(|epoch| *epoch != next) {
            return Err(ChannelError::local(format!("a slot was written with epoch {epoch}, {next} is due")));
        }
        self.memory.store_u64(self.offset(next), next).map_err(ChannelError::local)
    }
}

impl WordPair {
    pub(crate) fn new(number: u32, peer_number: u32, arrivals: Arrivals, owner: Weak<dyn Owner>) -> Self {
        Self { number, peer_number, arrivals, owner, bells: Arc::default() }
    }

    /// Returns the pair with its number at the peer, for an end that receives only counts.
    pub(crate) fn towards(&self, peer_number: u32, owner: Weak<dyn Owner>) -> Self {
        let bells = Arc::clone(&self.bells);
        Self { number: self.number, peer_number, arrivals: Arrivals::Count, owner, bells }
    }

    /// Counts a bell of the peer.
    pub(crate) fn ring(&self) {
        self.bells.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the counter of bells.
    pub(crate) fn bells(&self) -> &Arc<AtomicU64> {
        &self.bells
    }

    /// Returns the number of the pair here.
    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    /// Returns the number of the pair at the peer.
    pub(crate) fn peer_number(&self) -> u32 {
        self.peer_number
    }

    pub(crate) fn arrivals(&self) -> &Arrivals {
        &self.arrivals
    }

    pub(crate) fn link_ended(&self, fault: &ChannelError) {
        if let Some(owner) = self.owner.upgrade() {
            owner.link_ended(fault);
        }
    }
}

impl std::fmt::Debug for WordPair {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WordPair")
            .field("number", &self.number)
            .field("peer_number", &self.peer_number)
            .finish_non_exhaustive()
    }
}
