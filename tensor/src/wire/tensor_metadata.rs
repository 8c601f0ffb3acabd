//! The wire form of a tensor's metadata: type, shape, and number of bytes.
//!
//! ```text
//!  0         1        2      3      4       6      8                 16              24                 144
//!  ├─────────┼────────┼──────┼──────┼───────┼──────┼─────────────────┼───────────────┼── … ──────────────┤
//!  │ version │ layout │ rank │ zero │ dtype │ zero │ length in bytes │ dimension 0   │ … dimension 15    │
//! ```
//!
//! Dimensions from the rank on are zero. Decoding checks neither the code of the type nor the length.
//! `Metadata` in `types` is the checked form: its type exists, and its length fits its type and shape.

use bytes::Buf as _;
use tonic_rdma_verbs::unstable::Versions;

/// Maximum number of dimensions of a tensor.
pub const MAX_RANK: usize = 16;

/// A peer's description of a tensor, not checked yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WireMetadata {
    /// Code of the type of the elements.
    pub dtype: u16,
    /// Form of the bytes.
    pub layout: WireLayout,
    /// Length of each dimension.
    pub shape: WireShape,
    /// Number of bytes that move.
    pub bytes: u64,
}

/// Form in which the bytes of a tensor move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WireLayout {
    /// One element after the other, row-major, as they lie in memory.
    Dense = 1,
    /// A serialised form, for elements of variable length and for elements that are not contiguous.
    Serialized = 2,
}

/// The lengths of at most [`MAX_RANK`] dimensions.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct WireShape {
    rank: u8,
    /// Zero from `rank` on.
    lengths: [u64; MAX_RANK],
}

/// A fault of encoded metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MetadataError {
    /// The number of bytes is wrong.
    #[error("tensor metadata of {0} bytes, not {length}", length = WireMetadata::LENGTH)]
    Length(usize),
    /// This side does not know the version.
    #[error("tensor metadata of version {0}, not {version}", version = WireMetadata::VERSIONS)]
    Version(u8),
    /// There is no such layout.
    #[error("tensor metadata with unknown layout {0}")]
    Layout(u8),
    /// There are too many dimensions.
    #[error("tensor metadata with rank {0}, more than {MAX_RANK}")]
    Rank(usize),
    /// A reserved byte is not zero.
    #[error("tensor metadata with reserved byte {0} not zero")]
    Reserved(usize),
    /// A dimension beyond the rank is not zero.
    #[error("tensor metadata of rank {rank} with a dimension {dimension}")]
    Unused {
        /// The rank.
        rank: u8,
        /// The dimension, from 0.
        dimension: usize,
    },
}

impl WireMetadata {
    /// Number of bytes of encoded metadata.
    pub const LENGTH: usize = 16 + 8 * MAX_RANK;
    /// There was no version before 1.
    const VERSIONS: Versions = Versions::only(1);

    /// Encodes the metadata.
    pub fn encode(&self) -> [u8; Self::LENGTH] {
        let mut bytes = [0; Self::LENGTH];
        bytes[0] = Self::VERSIONS.newest as u8;
        bytes[1] = self.layout as u8;
        bytes[2] = self.shape.rank;
        bytes[4..6].copy_from_slice(&self.dtype.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.bytes.to_le_bytes());
        let (words, _) = bytes[16..].as_chunks_mut::<8>();
        for (word, length) in words.iter_mut().zip(self.shape.lengths) {
            *word = length.to_le_bytes();
        }
        bytes
    }

    /// Decodes metadata. It does not check whether the type exists, or whether a tensor can have this shape.
    ///
    /// # Errors
    /// [`MetadataError`]: no metadata of this version has these bytes.
    pub fn decode(bytes: &[u8]) -> Result<Self, MetadataError> {
        let Ok(bytes) = <&[u8; Self::LENGTH]>::try_from(bytes) else {
            return Err(MetadataError::Length(bytes.len()));
        };
        if !Self::VERSIONS.speaks(bytes[0].into()) {
            return Err(MetadataError::Version(bytes[0]));
        }
        let layout = match bytes[1] {
            1 => WireLayout::Dense,
            2 => WireLayout::Serialized,
            other => return Err(MetadataError::Layout(other)),
        };
        if let Some(at) = [3, 6, 7].into_iter().find(|&at| bytes[at] != 0) {
            return Err(MetadataError::Reserved(at));
        }
        let mut lengths = [0; MAX_RANK];
        for (length, word) in lengths.iter_mut().zip(bytes[16..].as_chunks::<8>().0) {
            *length = u64::from_le_bytes(*word);
        }
        let shape = WireShape::from_parts(bytes[2], lengths)?;
        let dtype = u16::from_le_bytes([bytes[4], bytes[5]]);
        Ok(Self { dtype, layout, shape, bytes: (&bytes[8..]).get_u64_le() })
    }
}

impl WireShape {
    /// Makes the shape with these lengths.
    ///
    /// # Errors
    /// [`MetadataError::Rank`] if there are more than [`MAX_RANK`].
    pub fn new(lengths: &[u64]) -> Result<Self, MetadataError> {
        let mut dims = Self { rank: 0, lengths: [0; MAX_RANK] };
        let Some(used) = dims.lengths.get_mut(..lengths.len()) else {
            return Err(MetadataError::Rank(lengths.len()));
        };
        used.copy_from_slice(lengths);
        dims.rank = lengths.len() as u8;
        Ok(dims)
    }

    fn from_parts(rank: u8, lengths: [u64; MAX_RANK]) -> Result<Self, MetadataError> {
        let Some(unused) = lengths.get(usize::from(rank)..) else {
            return Err(MetadataError::Rank(rank.into()));
        };
        match unused.iter().position(|&length| length != 0) {
            Some(at) => Err(MetadataError::Unused { rank, dimension: usize::from(rank) + at }),
            None => Ok(Self { rank, lengths }),
        }
    }

    /// Returns the lengths, one for each dimension.
    pub fn as_slice(&self) -> &[u64] {
        &self.lengths[..usize::from(self.rank)]
    }

    /// Returns the number of dimensions.
    pub fn rank(&self) -> usize {
        self.rank.into()
    }
}

impl std::fmt::Debug for WireShape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.as_slice().fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn metadata() -> impl Strategy<Value = WireMetadata> {
        let lengths = prop::collection::vec(any::<u64>(), 0..=MAX_RANK);
        (any::<u16>(), any::<bool>(), lengths, any::<u64>()).prop_map(|(dtype, dense, lengths, bytes)| {
            let layout = if dense { WireLayout::Dense } else { WireLayout::Serialized };
            WireMetadata { dtype, layout, shape: WireShape::new(&lengths).unwrap(), bytes }
        })
    }

    proptest! {
        #[test]
        fn metadata_are_decoded_as_they_were_encoded(metadata in metadata()) {
            prop_assert_eq!(WireMetadata::decode(&metadata.encode()), Ok(metadata));
        }

        /// Checks that bytes which can be decoded encode to equal bytes: there is one way to write metadata.
        #[test]
        fn any_bytes_are_metadata_or_an_error(
            metadata in metadata(),
            changes in prop::collection::vec((0..WireMetadata::LENGTH, any::<u8>()), 0..3),
        ) {
            let mut bytes = metadata.encode();
            for (at, value) in changes {
                bytes[at] = value;
            }
            if let Ok(metadata) = WireMetadata::decode(&bytes) {
                prop_assert_eq!(metadata.encode(), bytes);
            }
        }

        #[test]
        fn bytes_of_any_length_are_metadata_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            prop_assert!(bytes.len() == WireMetadata::LENGTH || WireMetadata::decode(&bytes) == Err(MetadataError::Length(bytes.len())));
        }
    }

    #[test]
    fn errors_name_the_fault() {
        let good = WireMetadata {
            dtype: 1,
            layout: WireLayout::Dense,
            shape: WireShape::new(&[2, 3]).unwrap(),
            bytes: 24,
        };
        let cases = [
            (0, 0, MetadataError::Version(0)),
            (0, 2, MetadataError::Version(2)),
            (1, 0, MetadataError::Layout(0)),
            (1, 3, MetadataError::Layout(3)),
            (2, 17, MetadataError::Rank(17)),
            (2, 255, MetadataError::Rank(255)),
            (2, 1, MetadataError::Unused { rank: 1, dimension: 1 }),
            (143, 1, MetadataError::Unused { rank: 2, dimension: 15 }),
            (3, 1, MetadataError::Reserved(3)),
            (7, 1, MetadataError::Reserved(7)),
        ];
        for (at, value, expected) in cases {
            let mut bytes = good.encode();
            bytes[at] = value;
            assert_eq!(WireMetadata::decode(&bytes), Err(expected));
        }
        assert_eq!(WireShape::new(&[1; 17]), Err(MetadataError::Rank(17)));
        assert_eq!(WireShape::new(&[]).unwrap().rank(), 0);
    }
}
