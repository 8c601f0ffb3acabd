//! A tensor's bytes, in the form in which they move.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

use super::ChannelError;
use super::landing::Landing;
use super::link::Link;
use super::types::{Tensor, serialize};
use crate::wire::tensor_metadata::Metadata;
use tonic_rdma_verbs::Access;
use tonic_rdma_verbs::internal::{Grant, LocalMemory};
use tonic_rdma_verbs::memory::Lease;

/// What moves of a tensor. Clones are the same bytes.
#[derive(Clone, Debug)]
pub(super) struct Payload {
    metadata: Metadata,
    content: Content,
}

#[derive(Clone, Debug)]
enum Content {
    /// In memory that devices can read.
    Registered(Lease, Range<usize>),
    /// Anywhere else.
    Bytes(Bytes),
}

impl Payload {
    /// What moves of `tensor`: its elements as they are if they lie one after the other and have a size, otherwise its
    /// serialised form.
    pub(super) fn of(tensor: &Tensor) -> Result<Self, ChannelError> {
        match (tensor.metadata(), tensor.registered()) {
            (Some(metadata), Some((lease, range))) => {
                Ok(Self { metadata: metadata.into(), content: Content::Registered(lease, range) })
            }
            _ => {
                let (metadata, bytes) = serialize(tensor).map_err(ChannelError::local)?;
                Ok(Self { metadata: metadata.into(), content: Content::Bytes(bytes) })
            }
        }
    }

    pub(super) fn metadata(&self) -> Metadata {
        self.metadata
    }

    /// How many.
    pub(super) fn bytes(&self) -> u64 {
        self.metadata.bytes
    }

    /// The bytes themselves.
    pub(super) fn as_slice(&self) -> &[u8] {
        match &self.content {
            Content::Registered(lease, range) => lease.get(range.clone()).unwrap_or_default(),
            Content::Bytes(bytes) => bytes,
        }
    }

    /// Memory to write them from, and where in it they begin.
    pub(super) fn local(&self, landing: &Landing) -> Result<(LocalMemory, u64), ChannelError> {
        match &self.content {
            Content::Registered(lease, range) => Ok((LocalMemory::Lease(lease.clone()), range.start as u64)),
            Content::Bytes(bytes) => {
                let mut copy = landing.take(bytes.len() as u64)?;
                copy[..bytes.len()].copy_from_slice(bytes);
                Ok((LocalMemory::Region(copy), 0))
            }
        }
    }

    /// Lets the peer of `link` read them.
    pub(super) fn grant(&self, link: &Arc<Link>) -> Result<Grant, ChannelError> {
        match &self.content {
            Content::Registered(lease, range) => {
                let part = lease.part(range.clone()).map_err(ChannelError::local)?;
                link.grant_lease(&part)
            }
            Content::Bytes(bytes) => {
                let mut copy = link.landing().take(bytes.len() as u64)?;
                copy[..bytes.len()].copy_from_slice(bytes);
                let (copy, range) = (copy.share(), 0..bytes.len());
                link.grant(&copy, range, Access::REMOTE_READ)
            }
        }
    }
}
