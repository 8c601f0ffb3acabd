//! Metadata of a tensor: a peer needs it before the tensor's bytes move.

use super::checks::fixed_size;
use super::{Dtype, Shape, TensorError, TensorSpec};
use crate::wire::tensor_metadata::{WireLayout, WireMetadata};

/// Bytes of an element's length in the serialised form of elements of variable length.
pub(super) const STRING_PREFIX: usize = size_of::<u64>();

/// Type, shape and form of a tensor that moves. A peer needs them before the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Metadata {
    /// Type and shape.
    pub spec: TensorSpec,
    /// Form of the bytes.
    pub layout: MetadataLayout,
}

/// Form in which the bytes of a tensor move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetadataLayout {
    /// The elements as they lie in memory, row-major.
    Dense,
    /// The form of [`serialize`](super::serialize()).
    Serialized {
        /// Number of bytes of that form.
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

    /// Returns the number of bytes that move.
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

    /// Checks metadata from the wire.
    ///
    /// # Errors
    /// The type is unknown, the shape overflows, or no such tensor has this length.
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
