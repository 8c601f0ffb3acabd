//! Regions of peers.

use std::sync::{Arc, Mutex};

use crate::error::ChannelError;
use crate::link::Link;
use crate::link::word_pair::WordPair;
use crate::regions::rights::Rights;
use tonic_rdma_verbs::RemoteSegment;
use tonic_rdma_verbs::internal::RemotePlace;

/// A peer's region, as far as the peer lets us use it. Clones are the same.
#[derive(Clone, Debug)]
pub struct RemoteRegion {
    pub(crate) shared: Arc<RemoteShared>,
}

#[derive(Debug)]
pub(crate) struct RemoteShared {
    pub(crate) name: Arc<str>,
    pub(crate) link: Arc<Link>,
    pub(crate) place: RemotePlace,
    pub(crate) rights: Rights,
    /// Its words here, and at the peer.
    pub(crate) pair: Arc<WordPair>,
    /// Changes that the peer was told of.
    pub(crate) notices: Mutex<u64>,
}

impl RemoteRegion {
    /// Returns the name that it was offered under.
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> u64 {
        self.shared.place.length
    }

    /// Returns whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns what this end may do with it.
    pub fn rights(&self) -> Rights {
        self.shared.rights
    }

    /// The place of `length` bytes at `offset`.
    pub(crate) fn at(&self, offset: u64, length: u64) -> Result<RemoteSegment, ChannelError> {
        let available = self.len();
        let out = ChannelError::OutOfRange { which: "remote", offset, length, available };
        self.shared.place.at(offset, length).ok_or(out)
    }
}

impl Drop for RemoteShared {
    fn drop(&mut self) {
        self.link.remove_pair(&self.pair);
    }
}
