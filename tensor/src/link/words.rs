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

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
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
    /// The number of pairs of a page. Few in the unit tests, which use them up.
    pub(crate) const PAIRS: usize = if cfg!(test) { 1 << 6 } else { 1 << 14 };
    /// The largest number of a pair. In immediate data the bit above tells pairs from requests.
    pub(crate) const LAST: u32 = u32::MAX >> 1;
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

    /// Returns the position of the words of pair `pair`. Many numbers share a position, one after the other.
    pub(crate) fn position(pair: u32) -> usize {
        pair as usize % Self::PAIRS
    }

    /// Returns the memory, and the offset of a pair's count.
    pub(crate) fn count(&self, pair: u32) -> (&SharedRegion, usize) {
        (&self.memory, Self::position(pair) * PAIR)
    }

    /// Returns the epoch that the peer sleeps for.
    pub(crate) fn sleeper(&self, pair: u32) -> u64 {
        self.memory.load_u64(Self::position(pair) * PAIR + SLEEPER).unwrap_or(0)
    }

    /// Sets the count of a pair, for a peer whose device can't write it.
    pub(crate) fn set_count(&self, pair: u32, value: u64) {
        let _ = self.memory.store_u64(Self::position(pair) * PAIR, value);
    }

    /// Clears the words of a pair, which an earlier pair may have left.
    pub(crate) fn clear(&self, pair: u32) {
        self.set_count(pair, 0);
        let _ = self.memory.store_u64(Self::position(pair) * PAIR + SLEEPER, 0);
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

    /// Returns the address of a pair's count. `None` if the peer has no such pair.
    pub(crate) fn count(&self, pair: u32) -> Option<RemoteSegment> {
        self.word(pair, 0)
    }

    /// Returns the address of a pair's sleeper. `None` if the peer has no such pair.
    pub(crate) fn sleeper(&self, pair: u32) -> Option<RemoteSegment> {
        self.word(pair, SLEEPER)
    }

    fn word(&self, pair: u32, offset: usize) -> Option<RemoteSegment> {
        let start = WordPage::position(pair) * PAIR + offset;
        if pair <= WordPage::LAST { self.0.at(start as u64, 8) } else { None }
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
    /// The owner, until it gives the pair up, and the threads that write words of the peer for this pair.
    users: AtomicU32,
}

/// The owner of a pair, which learns when the link ends.
pub(crate) trait PairOwner: Send + Sync {
    /// Handles the end of the link, which ended with `fault`.
    fn link_ended(&self, fault: &TensorError);

    /// Notes that the peer has given the pair up, and sends nothing more for it.
    fn ended_by_peer(&self, pair: &WordPair);
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
        let (bells, users) = (Arc::default(), AtomicU32::new(1));
        Self { number, peer_number, arrivals, owner, bells, users }
    }

    /// Makes the pair of a request to the peer, whose number at the peer is not known yet.
    pub(crate) fn unanswered(number: u32) -> Self {
        Self::new(number, u32::MAX, Arrivals::Count, None)
    }

    /// Returns whether the pair has a number at the peer.
    pub(crate) fn is_known(&self) -> bool {
        self.peer_number <= WordPage::LAST
    }

    /// Begins a write to the words of the peer. Returns false if the owner has given the pair up.
    pub(crate) fn enter(&self) -> bool {
        let enter = |users: u32| users.checked_add(1).filter(|_| users > 0);
        self.users.fetch_update(Ordering::SeqCst, Ordering::SeqCst, enter).is_ok()
    }

    /// Ends a write, or the ownership. Returns whether nobody writes for this pair any more.
    pub(crate) fn leave(&self) -> bool {
        self.users.fetch_sub(1, Ordering::SeqCst) == 1
    }

    /// Returns the pair with its number at the peer, for a side that receives only counts.
    pub(crate) fn towards(&self, peer_number: u32) -> Self {
        let bells = Arc::clone(&self.bells);
        Self { bells, ..Self::new(self.number, peer_number, Arrivals::Count, None) }
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

    pub(crate) fn ended_by_peer(&self) {
        if let Some(owner) = self.owner.as_ref().and_then(Weak::upgrade) {
            owner.ended_by_peer(self);
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
