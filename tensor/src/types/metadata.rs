//! Metadata of a tensor, which a peer needs before the tensor's bytes move, and the form in which the bytes move.
//!
//! The serialised form, in which tensors of strings and tensors that are not contiguous move.
//!
//! Elements of a fixed size: their bytes, packed and row-major. Elements of variable length, row-major:
//!
//! ```text
//!  ├─ length of element 0: u64, little-endian ─┼─ … ─┼─ length of element n-1 ─┼─ bytes of 0 ─┼─ … ─┼─ bytes of n-1 ─┤
//! ```
//!
//! The metadata has the number of elements and the length of the whole form.

use bytes::Bytes;

use super::tensor::fixed_size;
use super::{Dtype, Shape, Tensor, TensorError, TensorSpec};
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
    /// The form of [`serialize`](serialize()).
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
            Err(TensorError::Metadata { spec: Box::new(spec), layout: name, bytes })
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

/// Returns a tensor's metadata, and the bytes that move for it. It copies nothing if the elements have a fixed size and lie one
/// after the other.
///
/// ```
/// use tonic_rdma_tensor::{Shape, Tensor, deserialize, serialize};
///
/// let words = Tensor::from_strings(Shape::new(&[2])?, ["remote", "memory"])?;
/// let (metadata, bytes) = serialize(&words)?;
/// assert_eq!(bytes.len(), 2 * 8 + 12); // two lengths, and the bytes of both
/// assert_eq!(deserialize(&metadata, bytes)?.strings()?.count(), 2);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// The system has no memory.
pub fn serialize(tensor: &Tensor) -> Result<(Metadata, Bytes), TensorError> {
    let spec = *tensor.spec();
    if let Some(metadata) = tensor.metadata() {
        return Ok((metadata, tensor.to_bytes()?));
    }
    let bytes = match spec.dtype() {
        Dtype::String => serialize_strings(tensor)?,
        _ => tensor.to_contiguous()?.to_bytes()?,
    };
    Ok((Metadata { spec, layout: MetadataLayout::Serialized { length: bytes.len() as u64 } }, bytes))
}

/// Makes the tensor that moved as `bytes`. It copies only elements of fixed size that arrived misaligned.
///
/// ```
/// use bytes::Bytes;
/// use tonic_rdma_tensor::{Dtype, Metadata, Shape, TensorSpec, deserialize};
///
/// let metadata = Metadata::dense(TensorSpec::new(Dtype::U8, Shape::new(&[2])?)?)?;
/// let tensor = deserialize(&metadata, Bytes::from_static(&[1, 2]))?;
/// assert_eq!(tensor.as_slice::<u8>()?, [1, 2]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// The bytes are no tensor with this metadata, or the system has no memory. The function allocates memory in proportion to the
/// number of bytes.
pub fn deserialize(metadata: &Metadata, bytes: Bytes) -> Result<Tensor, TensorError> {
    let spec = metadata.spec;
    let expected = metadata.bytes();
    if bytes.len() as u64 != expected {
        return Err(TensorError::Length { spec: Box::new(spec), expected, bytes: bytes.len() as u64 });
    }
    match spec.dtype() {
        Dtype::String => deserialize_strings(&spec, &bytes),
        _ => match Tensor::from_bytes(spec, bytes.clone()) {
            Err(TensorError::Misaligned { .. }) => Tensor::copy_from(spec, &bytes),
            other => other,
        },
    }
}

fn serialize_strings(tensor: &Tensor) -> Result<Bytes, TensorError> {
    let mut total = 0_usize;
    for string in tensor.strings()? {
        // A tensor may have one string many times, so the sum can be larger than the memory.
        total = total.checked_add(STRING_PREFIX + string.len()).ok_or(TensorError::Memory(u64::MAX))?;
    }
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(total).map_err(|_| TensorError::Memory(total as u64))?;
    for string in tensor.strings()? {
        bytes.extend_from_slice(&(string.len() as u64).to_le_bytes());
    }
    for string in tensor.strings()? {
        bytes.extend_from_slice(string);
    }
    Ok(bytes.into())
}

fn deserialize_strings(spec: &TensorSpec, bytes: &Bytes) -> Result<Tensor, TensorError> {
    let fault = |element, fault| TensorError::Serialized { spec: Box::new(*spec), element, fault };
    let elements = spec.shape().elements();
    if !is_string_length(spec, bytes.len() as u64) {
        return Err(fault(0, "the number of bytes does not fit the number of elements"));
    }
    let mut at = elements as usize * STRING_PREFIX;
    let (lengths, _) = bytes[..at].as_chunks::<STRING_PREFIX>();
    let mut strings = Vec::new();
    strings.try_reserve_exact(lengths.len()).map_err(|_| TensorError::Memory(bytes.len() as u64))?;
    for (element, length) in lengths.iter().enumerate() {
        let length = u64::from_le_bytes(*length);
        let left = bytes.len() - at;
        if length > left as u64 {
            return Err(fault(element as u64, "an element longer than the rest"));
        }
        strings.push(bytes.slice(at..at + length as usize));
        at += length as usize;
    }
    if at != bytes.len() {
        return Err(fault(elements, "bytes left over"));
    }
    Tensor::from_strings(*spec.shape(), strings)
}
