//! What a peer has to know of a tensor before its bytes move.

use super::checks::fixed_size;
use super::{Dtype, Shape, TensorError, TensorSpec};
use crate::wire::tensor_metadata::{WireLayout, WireMetadata};

/// Bytes of the length that stands before each element of variable length, see [`serialize`](super::serialize()).
pub(super) const STRING_PREFIX: usize = size_of::<u64>();

/// What a peer learns of a tensor before its bytes move, checked. [`WireMetadata`] is its form on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Metadata {
    /// Type and shape.
    pub spec: TensorSpec,
    /// How its bytes move.
    pub layout: MetadataLayout,
}

/// How bytes stand for the elements of a tensor that moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetadataLayout {
    /// As the elements themselves, row-major.
    Dense,
    /// In the form of [`serialize`](super::serialize).
    Serialized {
        /// Bytes of that form.
        length: u64,
    },
}

impl Metadata {
    /// Makes the metadata of a tensor of `spec` whose elements lie one after the other.
    ///
    /// ```
    /// use tonic_rdma_tensor::{Dtype, Metadata, Shape, TensorSpec};
    ///
    /// let metadata = Metadata::dense(TensorSpec::new(Dtype::F32, Shape::new(&[2, 3])?)?)?;
    /// assert_eq!(metadata.bytes(), 24);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`TensorError::Variable`] if the elements have no fixed size.
    pub fn dense(spec: TensorSpec) -> Result<Self, TensorError> {
        fixed_size(&spec)?;
        Ok(Self { spec, layout: MetadataLayout::Dense })
    }

    /// Returns how many bytes move.
    pub fn bytes(&self) -> u64 {
        match self.layout {
            MetadataLayout::Dense => self.spec.bytes().unwrap_or(0),
            MetadataLayout::Serialized { length } => length,
        }
    }
}

impl From<Metadata> for WireMetadata {
    fn from(metadata: Metadata) -> Self {
        Self {
            dtype: metadata.spec.dtype().code(),
            layout: match metadata.layout {
                MetadataLayout::Dense => WireLayout::Dense,
                MetadataLayout::Serialized { .. } => WireLayout::Serialized,
            },
            shape: metadata.spec.shape().to_wire(),
            bytes: metadata.bytes(),
        }
    }
}

impl TryFrom<WireMetadata> for Metadata {
    type Error = TensorError;

    /// # Errors
    /// An unknown type, a shape that overflows, or a length that no such tensor has.
    fn try_from(metadata: WireMetadata) -> Result<Self, TensorError> {
        let spec = TensorSpec::new(Dtype::try_from(metadata.dtype)?, Shape::try_from(metadata.shape)?)?;
        let bytes = metadata.bytes;
        let (layout, name, possible) = match (metadata.layout, spec.bytes()) {
            (WireLayout::Dense, length) => (MetadataLayout::Dense, "dense", length == Some(bytes)),
            (WireLayout::Serialized, length) => {
                let possible = match length {
                    Some(length) => length == bytes,
                    None => is_string_length(&spec, bytes),
                };
                (MetadataLayout::Serialized { length: bytes }, "serialised", possible)
            }
        };
        if possible {
            Ok(Self { spec, layout })
        } else {
            Err(TensorError::Metadata { spec: Box::new(spec), layout: name, bytes })
        }
    }
}

/// Returns whether elements of variable length can be serialised as `bytes` bytes.
pub(super) fn is_string_length(spec: &TensorSpec, bytes: u64) -> bool {
    let elements = spec.shape().elements();
    let least = elements.checked_mul(STRING_PREFIX as u64);
    bytes <= isize::MAX as u64
        && if elements == 0 { bytes == 0 } else { least.is_some_and(|least| least <= bytes) }
}
