//! What a tensor is, without its content.

use std::fmt;

use super::{Dtype, Shape, ShapeError, TensorError};
use crate::wire::tensor_metadata as wire;

/// Type and shape of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    dtype: Dtype,
    shape: Shape,
}

impl TensorSpec {
    /// A tensor of `shape`, of elements of `dtype`.
    ///
    /// # Errors
    /// [`ShapeError::Bytes`] if its length in bytes is beyond `isize`.
    pub fn new(dtype: Dtype, shape: Shape) -> Result<Self, ShapeError> {
        shape.bytes(dtype.size().unwrap_or(1))?;
        Ok(Self { dtype, shape })
    }

    /// Type of the elements.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Lengths of the dimensions.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Bytes of all elements, if their type has a size.
    pub fn bytes(&self) -> Option<u64> {
        // Can't overflow: `new` saw to it.
        Some(self.shape.elements() * self.dtype.size()? as u64)
    }

    /// Bytes and size of an element.
    ///
    /// # Errors
    /// [`TensorError::Variable`].
    pub(super) fn fixed(&self) -> Result<(usize, usize), TensorError> {
        let size = self.dtype.size().ok_or(TensorError::Variable(self.dtype))?;
        Ok((self.shape.elements() as usize * size, size))
    }
}

impl fmt::Display for TensorSpec {
    /// As `float32[2, 3]`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.dtype, self.shape)
    }
}

/// What is told of a tensor that moves, checked. [`wire::Metadata`] is how it is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Metadata {
    /// What it is.
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
    /// What a tensor of `spec` moves as when its elements lie one after the other.
    ///
    /// # Errors
    /// [`TensorError::Variable`] if they have no size.
    pub fn dense(spec: TensorSpec) -> Result<Self, TensorError> {
        spec.fixed()?;
        Ok(Self { spec, layout: MetadataLayout::Dense })
    }

    /// Bytes that move.
    pub fn bytes(&self) -> u64 {
        match self.layout {
            MetadataLayout::Dense => self.spec.bytes().unwrap_or(0),
            MetadataLayout::Serialized { length } => length,
        }
    }
}

impl From<Metadata> for wire::Metadata {
    fn from(metadata: Metadata) -> Self {
        Self {
            dtype: metadata.spec.dtype.code(),
            layout: match metadata.layout {
                MetadataLayout::Dense => wire::Layout::Dense,
                MetadataLayout::Serialized { .. } => wire::Layout::Serialized,
            },
            shape: metadata.spec.shape.to_wire(),
            bytes: metadata.bytes(),
        }
    }
}

impl TryFrom<wire::Metadata> for Metadata {
    type Error = TensorError;

    /// # Errors
    /// An unknown type, a shape that overflows, or a length that no such tensor has.
    fn try_from(metadata: wire::Metadata) -> Result<Self, TensorError> {
        let spec = TensorSpec::new(Dtype::try_from(metadata.dtype)?, Shape::try_from(metadata.shape)?)?;
        let bytes = metadata.bytes;
        let (layout, name, possible) = match (metadata.layout, spec.bytes()) {
            (wire::Layout::Dense, length) => (MetadataLayout::Dense, "dense", length == Some(bytes)),
            (wire::Layout::Serialized, length) => {
                let possible = match length {
                    Some(length) => length == bytes,
                    None => super::serialize::is_possible(&spec, bytes),
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
