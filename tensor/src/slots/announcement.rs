//! What a dynamic slot holds: where a tensor is, and what it is (§3.3). Of fixed length, so that the slot need not know what
//! will come.

use crate::error::ChannelError;
use crate::wire::tensor_metadata::WireMetadata;
use tonic_rdma_verbs::internal::RemotePlace;
use tonic_rdma_verbs::{RemoteSegment, Rkey};

/// Where a tensor is, and what it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Announcement {
    pub(crate) metadata: WireMetadata,
    pub(crate) place: RemotePlace,
}

impl Announcement {
    /// WireMetadata, address, length, key, and four bytes of nothing.
    pub(crate) const LENGTH: usize = WireMetadata::LENGTH + 24;

    pub(crate) fn encode(&self) -> [u8; Self::LENGTH] {
        let mut bytes = [0; Self::LENGTH];
        let (metadata, rest) = bytes.split_at_mut(WireMetadata::LENGTH);
        metadata.copy_from_slice(&self.metadata.encode());
        rest[..8].copy_from_slice(&self.place.start.address.to_le_bytes());
        rest[8..16].copy_from_slice(&self.place.length.to_le_bytes());
        rest[16..20].copy_from_slice(&self.place.start.rkey.0.to_le_bytes());
        bytes
    }

    pub(crate) fn decode(bytes: &[u8; Self::LENGTH]) -> Result<Self, ChannelError> {
        let (metadata, rest) = bytes.split_at(WireMetadata::LENGTH);
        let metadata = WireMetadata::decode(metadata).map_err(ChannelError::local)?;
        let &[a0, a1, a2, a3, a4, a5, a6, a7, l0, l1, l2, l3, l4, l5, l6, l7, k0, k1, k2, k3, ..] = rest
        else {
            return Err(ChannelError::local("a note that ends early"));
        };
        let start = RemoteSegment {
            address: u64::from_le_bytes([a0, a1, a2, a3, a4, a5, a6, a7]),
            rkey: Rkey(u32::from_le_bytes([k0, k1, k2, k3])),
        };
        let length = u64::from_le_bytes([l0, l1, l2, l3, l4, l5, l6, l7]);
        if length != metadata.bytes {
            return Err(ChannelError::local(format!("{length} bytes for a tensor of {}", metadata.bytes)));
        }
        Ok(Self { metadata, place: RemotePlace { start, length } })
    }
}
