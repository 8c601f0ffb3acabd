//! Words that two ends write to one another: what has been released, and who sleeps.
//!
//! Each end has a page of pairs, which the other end may write. A pair belongs to one slot or region, and has
//!
//! - the **count**: at a sender, the epoch that the receiver has released last; at a region's owner, the times that the peer
//!   has told of a change; and
//! - the **sleeper**: the epoch that the peer waits for in its sleep. Whoever brings it rings a bell: a frame, whose
//!   completion wakes the peer.

use crate::error::ChannelError;
use tonic_rdma_verbs::internal::{Grant, RemotePlace};
use tonic_rdma_verbs::memory::SharedRegion;
use tonic_rdma_verbs::{Access, ProtectionDomain, RemoteSegment};

/// This end's page.
#[derive(Debug)]
pub(crate) struct Words {
    memory: SharedRegion,
    grant: Grant,
}

/// Pairs of a page.
const PAIRS: usize = 1 << 14;
const PAIR: usize = 16;
const SLEEPER: usize = 8;

impl Words {
    /// Bytes of a page.
    pub(crate) const LENGTH: usize = PAIRS * PAIR;

    /// Lets the peers of `domain` write `memory`.
    pub(crate) fn new(memory: SharedRegion, domain: &dyn ProtectionDomain) -> Result<Self, ChannelError> {
        let grant = Grant::of_region(domain, &memory, Access::REMOTE_WRITE).map_err(ChannelError::memory)?;
        Ok(Self { memory, grant })
    }

    /// Where the peer writes.
    pub(crate) fn place(&self) -> RemotePlace {
        self.grant.place()
    }

    /// Pairs that a page has.
    pub(crate) const PAIRS: usize = PAIRS;

    /// The memory, and where the count of a pair is in it.
    pub(crate) fn count(&self, pair: u32) -> (&SharedRegion, usize) {
        (&self.memory, pair as usize * PAIR)
    }

    /// The epoch that the peer sleeps for.
    pub(crate) fn sleeper(&self, pair: u32) -> u64 {
        self.memory.load_u64(pair as usize * PAIR + SLEEPER).unwrap_or(0)
    }

    /// Sets the count of a pair, on behalf of a peer whose device can't.
    pub(crate) fn set_count(&self, pair: u32, value: u64) {
        let _ = self.memory.store_u64(pair as usize * PAIR, value);
    }
}

/// The peer's page.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PeerWords(RemotePlace);

impl PeerWords {
    /// The page at `place`, if it has a page's length.
    pub(crate) fn new(place: RemotePlace) -> Option<Self> {
        (place.length >= Words::LENGTH as u64).then_some(Self(place))
    }

    /// Whether there is such a pair.
    pub(crate) fn has(pair: u32) -> bool {
        (pair as usize) < PAIRS
    }

    /// Where the count of a pair is.
    pub(crate) fn count(&self, pair: u32) -> Option<RemoteSegment> {
        self.0.at(u64::from(pair) * PAIR as u64, 8)
    }

    /// Where the sleeper of a pair is.
    pub(crate) fn sleeper(&self, pair: u32) -> Option<RemoteSegment> {
        self.0.at(u64::from(pair) * PAIR as u64 + SLEEPER as u64, 8)
    }
}
