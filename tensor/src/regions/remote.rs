//! Regions of peers.

use std::sync::{Arc, Mutex};

use crate::error::ChannelError;
use crate::link::Link;
use crate::link::word_pair::WordPair;
use crate::regions::rights::Rights;
use tonic_rdma_verbs::RemoteSegment;
use tonic_rdma_verbs::internal::RemotePlace;

/// A region of a peer, with the rights that the peer gave. All clones refer to one region.
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
    /// The pair of words of the region, here and at the peer.
    pub(crate) pair: Arc<WordPair>,
    /// The number of notices that this end has sent to the peer.
    pub(crate) notices: Mutex<u64>,
}

impl RemoteRegion {
    /// Returns the name of the region.
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> u64 {
        self.shared.place.length
    }

    /// Returns whether the region has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the rights of this end.
    pub fn rights(&self) -> Rights {
        self.shared.rights
    }

    /// Returns the place of `length` bytes at `offset`.
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
