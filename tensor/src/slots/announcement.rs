//! Announcements: a sender of a dynamic slot writes one for each tensor (§3.3). Their length is fixed, so that the slot fits
//! tensors of any shape.

use crate::wire::tensor_metadata::{MetadataError, WireMetadata};
use tonic_rdma_verbs::internal::RemotePlace;
use tonic_rdma_verbs::{RemoteSegment, Rkey};

/// The metadata of a tensor, and the place where it lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Announcement {
    pub(crate) metadata: WireMetadata,
    pub(crate) place: RemotePlace,
}

/// The reason why bytes are no announcement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum AnnouncementError {
    #[error("an announcement that ends early")]
    Short,
    #[error(transparent)]
    Metadata(#[from] MetadataError),
    #[error("{place} bytes for a tensor of {tensor}")]
    Length { place: u64, tensor: u64 },
}

impl Announcement {
    /// Metadata, address, length, key, and four unused bytes.
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

    pub(crate) fn decode(bytes: &[u8; Self::LENGTH]) -> Result<Self, AnnouncementError> {
        let (metadata, rest) = bytes.split_at(WireMetadata::LENGTH);
        let metadata = WireMetadata::decode(metadata)?;
        let &[a0, a1, a2, a3, a4, a5, a6, a7, l0, l1, l2, l3, l4, l5, l6, l7, k0, k1, k2, k3, ..] = rest
        else {
            return Err(AnnouncementError::Short);
        };
        let start = RemoteSegment {
            address: u64::from_le_bytes([a0, a1, a2, a3, a4, a5, a6, a7]),
            rkey: Rkey(u32::from_le_bytes([k0, k1, k2, k3])),
        };
        let length = u64::from_le_bytes([l0, l1, l2, l3, l4, l5, l6, l7]);
        if length != metadata.bytes {
            return Err(AnnouncementError::Length { place: length, tensor: metadata.bytes });
        }
        Ok(Self { metadata, place: RemotePlace { start, length } })
    }
}
