//! One end of a slot or region on a link.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use super::super::ChannelError;
use crate::memory::SharedRegion;

/// A slot's or region's place on a link: its pair of words here, and the peer's.
pub(in crate::tensor) struct End {
    pair: u32,
    peer_pair: u32,
    arrivals: Arrivals,
    owner: Weak<dyn Owner>,
    /// Bells of the peer's for this pair.
    bells: Arc<AtomicU64>,
}

/// Whom the end of the link concerns.
pub(in crate::tensor) trait Owner: Send + Sync {
    /// The link has ended with `fault`.
    fn link_ended(&self, fault: &ChannelError);
}

/// Where it shows that something has arrived.
#[derive(Debug)]
pub(in crate::tensor) enum Arrivals {
    /// In the tail of each buffer.
    Tails(Tails),
    /// In the pair's count.
    Count,
}

/// The buffers of a slot: `depth` of them, `stride` bytes apart, each with the epoch of its content at `tail`.
#[derive(Debug)]
pub(in crate::tensor) struct Tails {
    pub(in crate::tensor) memory: SharedRegion,
    pub(in crate::tensor) depth: u32,
    pub(in crate::tensor) stride: usize,
    pub(in crate::tensor) tail: usize,
    /// The epoch that comes next, where completions tell.
    pub(in crate::tensor) next: Arc<AtomicU64>,
}

impl Tails {
    /// Where the tail of `epoch` is.
    pub(in crate::tensor) fn offset(&self, epoch: u64) -> usize {
        (epoch % u64::from(self.depth)) as usize * self.stride + self.tail
    }

    /// The next one has arrived, as a completion tells: writes its tail.
    pub(super) fn arrived(&self, epoch: Option<u64>) -> Result<(), String> {
        let next = self.next.fetch_add(1, Ordering::Relaxed);
        if let Some(epoch) = epoch.filter(|epoch| *epoch != next) {
            return Err(format!("a slot was written with epoch {epoch}, {next} is due"));
        }
        self.memory.store_u64(self.offset(next), next).map_err(|error| error.to_string())
    }
}

impl End {
    pub(in crate::tensor) fn new(
        pair: u32,
        peer_pair: u32,
        arrivals: Arrivals,
        owner: Weak<dyn Owner>,
    ) -> Self {
        Self { pair, peer_pair, arrivals, owner, bells: Arc::default() }
    }

    /// The same pair, now that the peer's is known, for an end that receives only counts.
    pub(in crate::tensor) fn towards(&self, peer_pair: u32, owner: Weak<dyn Owner>) -> Self {
        let bells = Arc::clone(&self.bells);
        Self { pair: self.pair, peer_pair, arrivals: Arrivals::Count, owner, bells }
    }

    /// The peer rang the bell for it.
    pub(super) fn ring(&self) {
        self.bells.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts them.
    pub(super) fn bells(&self) -> &Arc<AtomicU64> {
        &self.bells
    }

    /// Its words here.
    pub(in crate::tensor) fn pair(&self) -> u32 {
        self.pair
    }

    /// Its words at the peer.
    pub(in crate::tensor) fn peer_pair(&self) -> u32 {
        self.peer_pair
    }

    pub(super) fn arrivals(&self) -> &Arrivals {
        &self.arrivals
    }

    pub(super) fn link_ended(&self, fault: &ChannelError) {
        if let Some(owner) = self.owner.upgrade() {
            owner.link_ended(fault);
        }
    }
}

impl std::fmt::Debug for End {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("End")
            .field("pair", &self.pair)
            .field("peer_pair", &self.peer_pair)
            .finish_non_exhaustive()
    }
}
