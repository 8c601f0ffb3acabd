//! One end of a slot or region on a link.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use crate::error::ChannelError;
use tonic_rdma_verbs::memory::SharedRegion;

/// A slot's or region's place on a link: its pair of words here, and the peer's.
pub(crate) struct WordPair {
    number: u32,
    peer_number: u32,
    arrivals: Arrivals,
    owner: Weak<dyn Owner>,
    /// Bells of the peer's for this pair.
    bells: Arc<AtomicU64>,
}

/// Whom the end of the link concerns.
pub(crate) trait Owner: Send + Sync {
    /// The link has ended with `fault`.
    fn link_ended(&self, fault: &ChannelError);
}

/// Where it shows that something has arrived.
#[derive(Debug)]
pub(crate) enum Arrivals {
    /// In the tail of each buffer.
    Tails(Tails),
    /// In the pair's count.
    Count,
}

/// The buffers of a slot: `depth` of them, `stride` bytes apart, each with the epoch of its content at `tail`.
#[derive(Debug)]
pub(crate) struct Tails {
    pub(crate) memory: SharedRegion,
    pub(crate) depth: u32,
    pub(crate) stride: usize,
    pub(crate) tail: usize,
    /// The epoch that comes next, where completions tell.
    pub(crate) next: Arc<AtomicU64>,
}

impl Tails {
    /// Where the tail of `epoch` is.
    pub(crate) fn offset(&self, epoch: u64) -> usize {
        (epoch % u64::from(self.depth)) as usize * self.stride + self.tail
    }

    /// The next one has arrived, as a completion tells: writes its tail.
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

    /// The same pair, now that the peer's is known, for an end that receives only counts.
    pub(crate) fn towards(&self, peer_number: u32, owner: Weak<dyn Owner>) -> Self {
        let bells = Arc::clone(&self.bells);
        Self { number: self.number, peer_number, arrivals: Arrivals::Count, owner, bells }
    }

    /// The peer rang the bell for it.
    pub(crate) fn ring(&self) {
        self.bells.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts them.
    pub(crate) fn bells(&self) -> &Arc<AtomicU64> {
        &self.bells
    }

    /// Its words here.
    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    /// Its words at the peer.
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
