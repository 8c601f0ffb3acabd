//! The bytes of a tensor, in the form in which they move.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

use crate::error::ChannelError;
use crate::link::Link;
use crate::memory::landing::Landing;
use crate::types::{Tensor, serialize};
use crate::wire::tensor_metadata::WireMetadata;
use tonic_rdma_verbs::Access;
use tonic_rdma_verbs::internal::{Grant, LocalMemory};
use tonic_rdma_verbs::memory::Lease;

/// The bytes of a tensor that move, and their metadata. Clones share the bytes.
#[derive(Clone, Debug)]
pub(crate) struct Payload {
    pub(crate) metadata: WireMetadata,
    content: Content,
}

#[derive(Clone, Debug)]
enum Content {
    /// Memory that devices can read.
    Registered(Lease, Range<usize>),
    /// Any other memory.
    Bytes(Bytes),
}

impl Payload {
    /// Returns the payload of `tensor`: the elements themselves if they lie one after the other and have a fixed size,
    /// otherwise the serialised form.
    pub(crate) fn of(tensor: &Tensor) -> Result<Self, ChannelError> {
        match (tensor.metadata(), tensor.registered()) {
            (Some(metadata), Some((lease, range))) => {
                Ok(Self { metadata: metadata.into(), content: Content::Registered(lease, range) })
            }
            _ => {
                let (metadata, bytes) = serialize(tensor)?;
                Ok(Self { metadata: metadata.into(), content: Content::Bytes(bytes) })
            }
        }
    }

    /// Returns the number of bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.metadata.bytes
    }

    /// Returns whether devices can read the bytes where they are.
    pub(crate) fn is_registered(&self) -> bool {
        matches!(self.content, Content::Registered(..))
    }

    /// Returns the bytes.
    pub(crate) fn as_slice(&self) -> &[u8] {
        match &self.content {
            Content::Registered(lease, range) => lease.get(range.clone()).unwrap_or_default(),
            Content::Bytes(bytes) => bytes,
        }
    }

    /// Returns memory to write the bytes from, and their offset in it.
    pub(crate) fn local(&self, landing: &Landing) -> Result<(LocalMemory, u64), ChannelError> {
        match &self.content {
            Content::Registered(lease, range) => Ok((LocalMemory::Lease(lease.clone()), range.start as u64)),
            Content::Bytes(bytes) => {
                let mut copy = landing.take(bytes.len() as u64)?;
                copy[..bytes.len()].copy_from_slice(bytes);
                Ok((LocalMemory::Region(copy), 0))
            }
        }
    }

    /// Gives the peer of `link` the right to read the bytes.
    pub(crate) fn grant(&self, link: &Arc<Link>) -> Result<Grant, ChannelError> {
        match &self.content {
            Content::Registered(lease, range) => {
                let part = lease.part(range.clone()).map_err(ChannelError::local)?;
                link.grant_lease(&part)
            }
            Content::Bytes(bytes) => {
                let mut copy = link.landing.take(bytes.len() as u64)?;
                copy[..bytes.len()].copy_from_slice(bytes);
                let (copy, range) = (copy.share(), 0..bytes.len());
                link.grant(&copy, range, Access::REMOTE_READ)
            }
        }
    }
}
