//! Announcements: a sender of a dynamic slot writes one for each tensor (§3.3). Their length is fixed, so that the slot fits
//! tensors of any shape.

use bytes::{Buf, BufMut};

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
        let mut fields = &mut bytes[..];
        fields.put_slice(&self.metadata.encode());
        fields.put_u64_le(self.place.start.address);
        fields.put_u64_le(self.place.length);
        fields.put_u32_le(self.place.start.rkey.0);
        bytes
    }

    pub(crate) fn decode(bytes: &[u8; Self::LENGTH]) -> Result<Self, AnnouncementError> {
        let (metadata, mut fields) = bytes.split_at(WireMetadata::LENGTH);
        let metadata = WireMetadata::decode(metadata)?;
        // The fields have a fixed length, so none of them is missing.
        let (address, length) = (fields.get_u64_le(), fields.get_u64_le());
        let start = RemoteSegment { address, rkey: Rkey(fields.get_u32_le()) };
        if length != metadata.bytes {
            return Err(AnnouncementError::Length { place: length, tensor: metadata.bytes });
        }
        Ok(Self { metadata, place: RemotePlace { start, length } })
    }
}
