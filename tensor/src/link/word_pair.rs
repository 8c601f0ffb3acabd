//! The pair of words of a slot or region.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use crate::error::ChannelError;
use tonic_rdma_verbs::memory::SharedRegion;

/// The words that belong to one slot or region on a link: a pair here, and a pair at the peer.
#[derive(Debug)]
pub(crate) struct WordPair {
    /// The number of the pair here.
    pub(crate) number: u32,
    /// The number of the pair at the peer.
    pub(crate) peer_number: u32,
    pub(crate) arrivals: Arrivals,
    owner: Weak<dyn PairOwner>,
    /// The number of bells that the peer rang for this pair.
    pub(crate) bells: Arc<AtomicU64>,
}

/// The owner of a pair, which learns when the link ends.
pub(crate) trait PairOwner: Send + Sync {
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
    pub(crate) fn new(number: u32, peer_number: u32, arrivals: Arrivals, owner: Weak<dyn PairOwner>) -> Self {
        Self { number, peer_number, arrivals, owner, bells: Arc::default() }
    }

    /// Returns the pair with its number at the peer, for an end that receives only counts.
    pub(crate) fn towards(&self, peer_number: u32, owner: Weak<dyn PairOwner>) -> Self {
        let bells = Arc::clone(&self.bells);
        Self { number: self.number, peer_number, arrivals: Arrivals::Count, owner, bells }
    }

    /// Counts a bell of the peer.
    pub(crate) fn ring(&self) {
        self.bells.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn link_ended(&self, fault: &ChannelError) {
        if let Some(owner) = self.owner.upgrade() {
            owner.link_ended(fault);
        }
    }
}
