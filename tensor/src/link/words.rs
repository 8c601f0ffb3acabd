//! Words of eight bytes, which each side of a link writes into the memory of the other side. By them a side
//! reports what it has released, and that it sleeps. [`Notification`] lists the other ways in which a side
//! learns of an arrival.
//!
//! Each side has a page of pairs of words, which the other side may write. A pair belongs to one slot or
//! region, and has two words:
//!
//! - The **count**. At a sender: the epoch that the receiver has released last. At the owner of a region: the
//!   number of notices that the peer has sent.
//! - The **sleeper**: the epoch that the peer waits for while it sleeps. The side that brings this epoch
//!   rings a bell, which is a frame whose completion wakes the peer.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use crate::error::TensorError;
use tonic_rdma_verbs::memory::SharedRegion;
use tonic_rdma_verbs::unstable::{Grant, RemoteRange};
use tonic_rdma_verbs::{Access, ProtectionDomain, RemoteSegment};

/// The page of this side, which the peer writes.
#[derive(Debug)]
pub(crate) struct WordPage {
    memory: SharedRegion,
    grant: Grant,
}

/// The length of a pair, in bytes.
const PAIR: usize = 16;
/// The offset of the sleeper in its pair, in bytes.
const SLEEPER: usize = 8;

impl WordPage {
    /// The number of pairs of a page.
    pub(crate) const PAIRS: usize = 1 << 14;
    /// The length of a page in bytes.
    pub(crate) const LENGTH: usize = Self::PAIRS * PAIR;

    /// Lets the peers of `domain` write `memory`.
    pub(crate) fn new(memory: SharedRegion, domain: &dyn ProtectionDomain) -> Result<Self, TensorError> {
        let grant = Grant::of_region(domain, &memory, Access::REMOTE_WRITE).map_err(TensorError::memory)?;
        Ok(Self { memory, grant })
    }

    /// Returns the memory that the peer writes to.
    pub(crate) fn memory_range(&self) -> RemoteRange {
        self.grant.range()
    }

    /// Returns the memory, and the offset of a pair's count.
    pub(crate) fn count(&self, pair: u32) -> (&SharedRegion, usize) {
        (&self.memory, pair as usize * PAIR)
    }

    /// Returns the epoch that the peer sleeps for.
    pub(crate) fn sleeper(&self, pair: u32) -> u64 {
        self.memory.load_u64(pair as usize * PAIR + SLEEPER).unwrap_or(0)
    }

    /// Sets the count of a pair, for a peer whose device can't write it.
    pub(crate) fn set_count(&self, pair: u32, value: u64) {
        let _ = self.memory.store_u64(pair as usize * PAIR, value);
    }
}

/// The page of the peer, which this side writes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PeerWordPage(RemoteRange);

impl PeerWordPage {
    /// Returns the page at `place`, if `place` is long enough.
    pub(crate) fn new(place: RemoteRange) -> Option<Self> {
        (place.length >= WordPage::LENGTH as u64).then_some(Self(place))
    }

    /// Returns whether there is such a pair.
    pub(crate) fn has(pair: u32) -> bool {
        (pair as usize) < WordPage::PAIRS
    }

    /// Returns the address of a pair's count.
    pub(crate) fn count(&self, pair: u32) -> Option<RemoteSegment> {
        self.0.at(u64::from(pair) * PAIR as u64, 8)
    }

    /// Returns the address of a pair's sleeper.
    pub(crate) fn sleeper(&self, pair: u32) -> Option<RemoteSegment> {
        self.0.at(u64::from(pair) * PAIR as u64 + SLEEPER as u64, 8)
    }
}

/// The words that belong to one slot or region on a link: a pair here, and a pair at the peer.
#[derive(Debug)]
pub(crate) struct WordPair {
    /// The number of the pair here.
    pub(crate) number: u32,
    /// The number of the pair at the peer.
    pub(crate) peer_number: u32,
    pub(crate) arrivals: Arrivals,
    /// The slot or region to notify when the link ends, if there is one.
    owner: Option<Weak<dyn PairOwner>>,
    /// The number of bells that the peer rang for this pair.
    pub(crate) bells: Arc<AtomicU64>,
}

/// The owner of a pair, which learns when the link ends.
pub(crate) trait PairOwner: Send + Sync {
    /// Handles the end of the link, which ended with `fault`.
    fn link_ended(&self, fault: &TensorError);
}

/// The memory that shows an arrival.
#[derive(Debug)]
pub(crate) enum Arrivals {
    /// The tail of each buffer.
    Tails(Tails),
    /// The count of the pair.
    Count,
}

/// The buffers of a slot: `depth` of them, `stride` bytes apart. At offset `tail` each has the epoch of its
/// content.
#[derive(Debug)]
pub(crate) struct Tails {
    pub(crate) memory: SharedRegion,
    pub(crate) depth: u32,
    pub(crate) stride: usize,
    pub(crate) tail: usize,
    /// The epoch of the next arrival. Used only if completions or frames report arrivals.
    pub(crate) next: Arc<AtomicU64>,
}

impl Tails {
    /// Returns the offset of the tail of `epoch`.
    pub(crate) fn offset(&self, epoch: u64) -> usize {
        (epoch % u64::from(self.depth)) as usize * self.stride + self.tail
    }

    /// Writes the tail of the next epoch, because a completion or a frame reports its arrival.
    ///
    /// # Errors
    /// The frame reports another `epoch`.
    pub(crate) fn arrived(&self, epoch: Option<u64>) -> Result<(), TensorError> {
        let next = self.next.fetch_add(1, Ordering::Relaxed);
        if let Some(epoch) = epoch.filter(|epoch| *epoch != next) {
            return Err(TensorError::other(format!("a slot was written with epoch {epoch}, {next} is due")));
        }
        self.memory.store_u64(self.offset(next), next).map_err(TensorError::local)
    }
}

impl WordPair {
    pub(crate) fn new(
        number: u32,
        peer_number: u32,
        arrivals: Arrivals,
        owner: Option<Weak<dyn PairOwner>>,
    ) -> Self {
        Self { number, peer_number, arrivals, owner, bells: Arc::default() }
    }

    /// Returns the pair with its number at the peer, for a side that receives only counts.
    pub(crate) fn towards(&self, peer_number: u32) -> Self {
        let bells = Arc::clone(&self.bells);
        Self { number: self.number, peer_number, arrivals: Arrivals::Count, owner: None, bells }
    }

    /// Counts a bell of the peer.
    pub(crate) fn count_bell(&self) {
        self.bells.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn link_ended(&self, fault: &TensorError) {
        if let Some(owner) = self.owner.as_ref().and_then(Weak::upgrade) {
            owner.link_ended(fault);
        }
    }
}

/// The way in which a side learns that the peer has written to its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notification {
    /// The receiver polls a word that is written last. Needs two devices that place in order.
    Word,
    /// A completion with immediate data. Needs two devices that have immediate data.
    Immediate,
    /// A message that follows the write.
    Message,
}
