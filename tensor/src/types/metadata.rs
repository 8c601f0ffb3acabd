//! Metadata of a tensor, which a peer needs before the tensor's bytes move, and the form in which the bytes
//! move.
//!
//! Tensors of strings, and tensors that are not contiguous, move in the serialised form. For elements of a
//! fixed size it has their bytes, packed and row-major. For elements of variable length it has, row-major:
//!
//! ```text
//!  ├─ length of element 0: u64, little-endian ─┼─ … ─┼─ length of element n-1 ─┼─ bytes of 0 ─┼─ … ─┼─ bytes of n-1 ─┤
//! ```
//!
//! The metadata has the number of elements and the length of the whole form.

use bytes::Bytes;

use super::tensor::fixed_size;
use super::{Dtype, Shape, Tensor, TensorSpec, ValueError};
use crate::error::{TensorError, TensorErrorKind};
use crate::wire::tensor_metadata::{WireLayout, WireMetadata};

/// Bytes of an element's length in the serialised form of elements of variable length.
const STRING_PREFIX: usize = size_of::<u64>();

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
    /// The form of [`Tensor::serialize`].
    Serialized {
        /// Number of bytes of that form.
        length: u64,
    },
}

impl Metadata {
    /// Makes the metadata of a tensor of `spec` whose elements are contiguous.
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
    /// The elements have no fixed size.
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
            shape: metadata.spec.shape().0,
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
            Err(ValueError::Metadata { spec: Box::new(spec), layout: name, bytes }.into())
        }
    }
}

/// Returns whether elements of variable length can be serialised as `bytes` bytes.
fn is_string_length(spec: &TensorSpec, bytes: u64) -> bool {
    let elements = spec.shape().elements();
    let least = elements.checked_mul(STRING_PREFIX as u64);
    bytes <= isize::MAX as u64
        && if elements == 0 { bytes == 0 } else { least.is_some_and(|least| least <= bytes) }
}

impl Tensor {
    /// Returns the metadata, and the bytes that move for this tensor. It copies nothing if the elements have
    /// a fixed size and are contiguous.
    ///
    /// ```
    /// use tonic_rdma_tensor::{Shape, Tensor};
    ///
    /// let words = Tensor::from_strings(Shape::new(&[2])?, ["remote", "memory"])?;
    /// let (metadata, bytes) = words.serialize()?;
    /// assert_eq!(bytes.len(), 2 * 8 + 12); // two lengths, and the bytes of both
    /// assert_eq!(Tensor::deserialize(&metadata, bytes)?.strings()?.count(), 2);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// The system has no memory.
    pub fn serialize(&self) -> Result<(Metadata, Bytes), TensorError> {
        let spec = *self.spec();
        if let Some(metadata) = self.metadata() {
            return Ok((metadata, self.to_bytes()?));
        }
        let bytes = match spec.dtype() {
            Dtype::String => serialize_strings(self)?,
            _ => self.to_contiguous()?.to_bytes()?,
        };
        Ok((Metadata { spec, layout: MetadataLayout::Serialized { length: bytes.len() as u64 } }, bytes))
    }

    /// Makes the tensor that moved as `bytes`. It copies only elements of fixed size that arrived misaligned.
    ///
    /// ```
    /// use bytes::Bytes;
    /// use tonic_rdma_tensor::{Dtype, Metadata, Shape, Tensor, TensorSpec};
    ///
    /// let metadata = Metadata::dense(TensorSpec::new(Dtype::U8, Shape::new(&[2])?)?)?;
    /// let tensor = Tensor::deserialize(&metadata, Bytes::from_static(&[1, 2]))?;
    /// assert_eq!(tensor.as_slice::<u8>()?, [1, 2]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// The bytes are no tensor with this metadata, or the system has no memory. The function allocates memory
    /// in proportion to the number of bytes.
    pub fn deserialize(metadata: &Metadata, bytes: Bytes) -> Result<Self, TensorError> {
        let spec = metadata.spec;
        let expected = metadata.bytes();
        if bytes.len() as u64 != expected {
            return Err(
                ValueError::Length { spec: Box::new(spec), expected, bytes: bytes.len() as u64 }.into()
            );
        }
        match spec.dtype() {
            Dtype::String => deserialize_strings(&spec, &bytes),
            _ => match Tensor::from_bytes(spec, bytes.clone()) {
                Err(error) if error.kind() == TensorErrorKind::Layout => Tensor::copy_from(spec, &bytes),
                other => other,
            },
        }
    }
}

fn serialize_strings(tensor: &Tensor) -> Result<Bytes, TensorError> {
    let mut total = 0_usize;
    for string in tensor.strings()? {
        // A tensor may have one string many times, so the sum can be larger than the memory.
        total = total.checked_add(STRING_PREFIX + string.len()).ok_or(ValueError::Memory(u64::MAX))?;
    }
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(total).map_err(|_| ValueError::Memory(total as u64))?;
    for string in tensor.strings()? {
        bytes.extend_from_slice(&(string.len() as u64).to_le_bytes());
    }
    for string in tensor.strings()? {
        bytes.extend_from_slice(string);
    }
    Ok(bytes.into())
}

fn deserialize_strings(spec: &TensorSpec, bytes: &Bytes) -> Result<Tensor, TensorError> {
    let fault = |element, fault| ValueError::Serialized { spec: Box::new(*spec), element, fault };
    let elements = spec.shape().elements();
    if !is_string_length(spec, bytes.len() as u64) {
        return Err(fault(0, "the number of bytes does not fit the number of elements").into());
    }
    let mut at = elements as usize * STRING_PREFIX;
    let (lengths, _) = bytes[..at].as_chunks::<STRING_PREFIX>();
    let mut strings = Vec::new();
    strings.try_reserve_exact(lengths.len()).map_err(|_| ValueError::Memory(bytes.len() as u64))?;
    for (element, length) in lengths.iter().enumerate() {
        let length = u64::from_le_bytes(*length);
        let left = bytes.len() - at;
        if length > left as u64 {
            return Err(fault(element as u64, "an element longer than the rest").into());
        }
        strings.push(bytes.slice(at..at + length as usize));
        at += length as usize;
    }
    if at != bytes.len() {
        return Err(fault(elements, "bytes left over").into());
    }
    Tensor::from_strings(*spec.shape(), strings)
}
