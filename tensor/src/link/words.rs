//! Words that two ends write into one another's memory: releases, and notes that an end sleeps.
//!
//! Each end has a page of pairs, which the other end may write. A pair belongs to one slot or region, and has two words:
//!
//! - The **count**. At a sender: the epoch that the receiver has released last. At the owner of a region: the number of notices
//!   that the peer has sent.
//! - The **sleeper**: the epoch that the peer waits for while it sleeps. The end that brings this epoch rings a bell, which is
//!   a frame whose completion wakes the peer.

use crate::error::ChannelError;
use tonic_rdma_verbs::internal::{Grant, RemotePlace};
use tonic_rdma_verbs::memory::SharedRegion;
use tonic_rdma_verbs::{Access, ProtectionDomain, RemoteSegment};

/// The page of this end.
#[derive(Debug)]
pub(crate) struct Words {
    memory: SharedRegion,
    grant: Grant,
}

/// The number of pairs of a page.
const PAIRS: usize = 1 << 14;
const PAIR: usize = 16;
const SLEEPER: usize = 8;

impl Words {
    /// The length of a page in bytes.
    pub(crate) const LENGTH: usize = PAIRS * PAIR;

    /// Lets the peers of `domain` write `memory`.
    pub(crate) fn new(memory: SharedRegion, domain: &dyn ProtectionDomain) -> Result<Self, ChannelError> {
        let grant = Grant::of_region(domain, &memory, Access::REMOTE_WRITE).map_err(ChannelError::memory)?;
        Ok(Self { memory, grant })
    }

    /// Returns the place that the peer writes to.
    pub(crate) fn place(&self) -> RemotePlace {
        self.grant.place()
    }

    /// The number of pairs of a page.
    pub(crate) const PAIRS: usize = PAIRS;

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

/// The page of the peer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PeerWords(RemotePlace);

impl PeerWords {
    /// Returns the page at `place`, if `place` is long enough.
    pub(crate) fn new(place: RemotePlace) -> Option<Self> {
        (place.length >= Words::LENGTH as u64).then_some(Self(place))
    }

    /// Returns whether there is such a pair.
    pub(crate) fn has(pair: u32) -> bool {
        (pair as usize) < PAIRS
    }

    /// Returns the place of a pair's count.
    pub(crate) fn count(&self, pair: u32) -> Option<RemoteSegment> {
        self.0.at(u64::from(pair) * PAIR as u64, 8)
    }

    /// Returns the place of a pair's sleeper.
    pub(crate) fn sleeper(&self, pair: u32) -> Option<RemoteSegment> {
        self.0.at(u64::from(pair) * PAIR as u64 + SLEEPER as u64, 8)
    }
}
