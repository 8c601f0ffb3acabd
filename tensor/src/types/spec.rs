//! Type and shape of a tensor, without its content.

use std::fmt;

use super::{Dtype, Shape, ShapeError, TensorError};
use crate::wire::tensor_metadata as wire;

/// Type and shape of a tensor.
///
/// ```
/// use tonic_rdma_tensor::{Dtype, Shape, TensorSpec};
///
/// let spec = TensorSpec::new(Dtype::F32, Shape::new(&[2, 3])?)?;
/// assert_eq!((spec.to_string().as_str(), spec.bytes()), ("float32[2, 3]", Some(24)));
/// # Ok::<(), tonic_rdma_tensor::ShapeError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    dtype: Dtype,
    shape: Shape,
}

impl TensorSpec {
    /// Makes the spec of a tensor of `shape` with elements of `dtype`.
    ///
    /// ```
    /// use tonic_rdma_tensor::{Dtype, Shape, TensorSpec};
    ///
    /// let images = TensorSpec::new(Dtype::U8, Shape::new(&[32, 224, 224, 3])?)?;
    /// let a_number = TensorSpec::new(Dtype::F64, Shape::new(&[])?)?;
    /// # assert_eq!((images.bytes(), a_number.bytes()), (Some(32 * 224 * 224 * 3), Some(8)));
    /// # Ok::<(), tonic_rdma_tensor::ShapeError>(())
    /// ```
    ///
    /// # Errors
    /// [`ShapeError::Bytes`] if its length in bytes does not fit into `isize`.
    pub fn new(dtype: Dtype, shape: Shape) -> Result<Self, ShapeError> {
        shape.bytes(dtype.size().unwrap_or(1))?;
        Ok(Self { dtype, shape })
    }

    /// Returns the type of the elements.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Returns the lengths of the dimensions.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Returns the number of bytes of all elements, if their type has a size.
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

/// What a peer learns of a tensor before its bytes move, checked. [`wire::Metadata`] is its form on the wire.
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
        spec.fixed()?;
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
