//! Tensors that many may read.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use bytemuck::checked::CheckedCastError;
use bytes::Bytes;

use super::copy::{Rows, pack};
use super::storage::{Heap, Storage};
use super::{Dtype, Element, Metadata, Shape, Strides, TensorError, TensorMut, TensorSpec};
use crate::memory::{Lease, RegisteredBuf};

/// A tensor whose content never changes. Clones, slices and permutations share its memory, which goes with the last of
/// them.
///
/// ```
/// use tonic_rdma::tensor::{Dtype, Shape, Tensor, TensorMut, TensorSpec};
///
/// let pool = tonic_rdma::memory::Pool::for_sending(1 << 20);
/// let spec = TensorSpec::new(Dtype::F32, Shape::new(&[2, 3])?)?;
/// let mut weights = TensorMut::in_pool(spec, &pool)?;
/// weights.as_mut_slice::<f32>()?.copy_from_slice(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
/// let weights: Tensor = weights.freeze();
/// assert_eq!(weights.slice(1..2)?.as_slice::<f32>()?, [4.0, 5.0, 6.0]);
/// assert_eq!(weights.transpose().to_contiguous()?.as_slice::<f32>()?, [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Tensor {
    pub(super) spec: TensorSpec,
    pub(super) strides: Strides,
    /// The first element, in elements of the storage. All others that the strides lead to are in the storage too, which
    /// is aligned for them.
    pub(super) offset: usize,
    pub(super) storage: Storage,
}

impl Tensor {
    /// The tensor whose elements `bytes` are, row-major.
    ///
    /// # Errors
    /// Another number of bytes than `spec` has, elements of variable length, or memory that is not aligned for them, for
    /// which there is [`copy_from`](Self::copy_from).
    pub fn from_bytes(spec: TensorSpec, bytes: Bytes) -> Result<Self, TensorError> {
        Self::dense(spec, Storage::Bytes(bytes))
    }

    /// The tensor whose elements are in a pool's memory, row-major.
    ///
    /// # Errors
    /// As [`from_bytes`](Self::from_bytes).
    pub fn from_lease(spec: TensorSpec, lease: Lease) -> Result<Self, TensorError> {
        Self::dense(spec, Storage::Lease(lease))
    }

    /// The tensor that `buffer` was filled with, row-major.
    ///
    /// # Errors
    /// As [`from_bytes`](Self::from_bytes).
    pub fn from_buffer(spec: TensorSpec, buffer: RegisteredBuf) -> Result<Self, TensorError> {
        Self::from_lease(spec, buffer.into_lease())
    }

    /// A tensor of a copy of `bytes`, which are its elements, row-major, wherever they lie.
    ///
    /// # Errors
    /// Another number of bytes than `spec` has, elements of variable length, or no memory.
    pub fn copy_from(spec: TensorSpec, bytes: &[u8]) -> Result<Self, TensorError> {
        check_length(&spec, bytes)?;
        let mut heap = Heap::zeroed(bytes.len())?;
        heap.bytes_mut().copy_from_slice(bytes);
        Self::dense(spec, Storage::Heap(Arc::new(heap)))
    }

    /// The tensor that `strides`, in elements, find in `bytes`, beginning with the first of them.
    ///
    /// # Errors
    /// Strides that lead out of the bytes or are not as many as dimensions, elements of variable length, or memory that
    /// is not aligned for them.
    pub fn from_strided(spec: TensorSpec, strides: Strides, bytes: Bytes) -> Result<Self, TensorError> {
        let (_, size) = spec.fixed()?;
        let available = (bytes.len() / size) as u64;
        let extent = strides.extent(spec.shape());
        if strides.steps().len() != spec.shape().rank() || extent.is_none_or(|extent| extent > available) {
            let (spec, strides) = (Box::new(spec), Box::new(strides));
            return Err(TensorError::Strides { spec, strides, available });
        }
        check_alignment(&spec, &bytes)?;
        Ok(Self { spec, strides, offset: 0, storage: Storage::Bytes(bytes) })
    }

    /// A tensor of elements of variable length, one for each element of `shape`, row-major.
    ///
    /// # Errors
    /// [`TensorError::Length`], which here counts elements.
    pub fn from_strings<S: Into<Bytes>>(
        shape: Shape,
        strings: impl IntoIterator<Item = S>,
    ) -> Result<Self, TensorError> {
        let spec = TensorSpec::new(Dtype::String, shape)?;
        let strings: Arc<[Bytes]> = strings.into_iter().map(Into::into).collect();
        let (expected, bytes) = (shape.elements(), strings.len() as u64);
        if bytes != expected {
            return Err(TensorError::Length { spec: Box::new(spec), expected, bytes });
        }
        let strides = Strides::row_major(&shape);
        Ok(Self { spec, strides, offset: 0, storage: Storage::Strings(strings) })
    }

    fn dense(spec: TensorSpec, storage: Storage) -> Result<Self, TensorError> {
        check_length(&spec, storage.bytes())?;
        check_alignment(&spec, storage.bytes())?;
        Ok(Self::from_checked(spec, storage))
    }

    /// The tensor in all of `storage`, whose length and alignment are right.
    pub(super) fn from_checked(spec: TensorSpec, storage: Storage) -> Self {
        Self { spec, strides: Strides::row_major(spec.shape()), offset: 0, storage }
    }

    /// Type and shape.
    pub fn spec(&self) -> &TensorSpec {
        &self.spec
    }

    /// Type of the elements.
    pub fn dtype(&self) -> Dtype {
        self.spec.dtype()
    }

    /// Lengths of the dimensions.
    pub fn shape(&self) -> &Shape {
        self.spec.shape()
    }

    /// Steps from element to element.
    pub fn strides(&self) -> &Strides {
        &self.strides
    }

    /// Whether the elements lie one after the other, row-major.
    pub fn is_contiguous(&self) -> bool {
        self.strides.is_contiguous(self.spec.shape())
    }

    /// What a peer is told of it before its [`bytes`](Self::bytes) move, if they are what moves: where it is contiguous
    /// and its elements have a size. For all others there is [`serialize`](super::serialize()).
    pub fn metadata(&self) -> Option<Metadata> {
        if self.is_contiguous() { Metadata::dense(self.spec).ok() } else { None }
    }

    /// The elements, row-major.
    ///
    /// # Errors
    /// Elements of another type, not one after the other, or of values that their type does not have.
    pub fn as_slice<T: Element>(&self) -> Result<&[T], TensorError> {
        self.check_contiguous()?;
        self.span()
    }

    /// The elements' bytes, row-major.
    ///
    /// # Errors
    /// Elements of variable length, or not one after the other.
    pub fn bytes(&self) -> Result<&[u8], TensorError> {
        Ok(&self.storage.bytes()[self.dense_range()?])
    }

    /// The elements' bytes, row-major, shared and not copied.
    ///
    /// # Errors
    /// As [`bytes`](Self::bytes).
    pub fn to_bytes(&self) -> Result<Bytes, TensorError> {
        Ok(self.storage.share(self.dense_range()?))
    }

    /// Where its bytes lie in a pool's memory: a device can send that range of the lease. Nothing if they are elsewhere,
    /// or not one after the other.
    pub fn registered(&self) -> Option<(Lease, Range<usize>)> {
        self.storage.registered(self.dense_range().ok()?)
    }

    /// Elements of variable length, row-major.
    ///
    /// # Errors
    /// [`TensorError::Variable`] if they have a fixed one.
    pub fn strings(&self) -> Result<impl Iterator<Item = &Bytes> + '_, TensorError> {
        let Storage::Strings(strings) = &self.storage else {
            return Err(TensorError::Variable(self.dtype()));
        };
        let rows = Rows::new(self.shape(), &self.strides, self.offset);
        let (length, step) = rows.inner();
        Ok(rows.flat_map(move |start| (0..length).map(move |place| &strings[start + place * step])))
    }

    /// Copies the elements to `destination`, row-major: into registered memory, say, to be sent from there.
    ///
    /// # Errors
    /// Elements of variable length, or a destination of another length.
    pub fn copy_to(&self, destination: &mut [u8]) -> Result<(), TensorError> {
        check_length(&self.spec, destination)?;
        let (_, size) = self.spec.fixed()?;
        let rows = Rows::new(self.shape(), &self.strides, self.offset);
        pack(self.storage.bytes(), size, rows, destination);
        Ok(())
    }

    /// The same elements one after the other: the same memory where they are, else a copy on the heap.
    ///
    /// # Errors
    /// No memory.
    pub fn to_contiguous(&self) -> Result<Self, TensorError> {
        if self.is_contiguous() {
            return Ok(self.clone());
        }
        if let Storage::Strings(_) = self.storage {
            return Self::from_strings(*self.shape(), self.strings()?.cloned());
        }
        let mut copy = TensorMut::zeroed(self.spec)?;
        self.copy_to(copy.bytes_mut())?;
        Ok(copy.freeze())
    }

    /// Makes it writable again without a copy, if this is the last reference to the memory, which has to be of a pool
    /// ([`from_buffer`](Self::from_buffer)) or of [`TensorMut`], and no more and no less than this tensor.
    ///
    /// # Errors
    /// The tensor, where not.
    #[expect(clippy::result_large_err, reason = "the error is the tensor itself")]
    pub fn try_into_mut(self) -> Result<TensorMut, Self> {
        let whole = self.spec.bytes() == Some(self.storage.bytes().len() as u64);
        if !whole || !self.is_contiguous() || self.offset != 0 {
            return Err(self);
        }
        let Self { spec, strides, offset, storage } = self;
        let storage = match storage {
            Storage::Heap(heap) => match Arc::try_unwrap(heap) {
                Ok(heap) => return Ok(TensorMut::from_heap(spec, heap)),
                Err(heap) => Storage::Heap(heap),
            },
            Storage::Lease(lease) => match lease.try_into_buffer() {
                Ok(buffer) => return Ok(TensorMut::from_checked(spec, buffer)),
                Err(lease) => Storage::Lease(lease),
            },
            other => other,
        };
        Err(Self { spec, strides, offset, storage })
    }

    /// All elements of the memory from the first of this tensor to the last, those included that the strides pass over.
    pub(in crate::tensor) fn span<T: Element>(&self) -> Result<&[T], TensorError> {
        let (actual, asked) = (self.dtype(), T::DTYPE);
        if actual != asked {
            return Err(TensorError::WrongDtype { actual, asked });
        }
        cast(actual, &self.storage.bytes()[self.span_range()?])
    }

    /// Range of the storage, in bytes, from the first element to the last.
    pub(in crate::tensor) fn span_range(&self) -> Result<Range<usize>, TensorError> {
        let (_, size) = self.spec.fixed()?;
        let extent = self.strides.extent(self.shape()).unwrap_or(0) as usize;
        // Within the storage, as every constructor saw to.
        Ok(self.offset * size..(self.offset + extent) * size)
    }

    /// The memory of [`span_range`](Self::span_range), shared.
    pub(in crate::tensor) fn span_bytes(&self) -> Result<Bytes, TensorError> {
        Ok(self.storage.share(self.span_range()?))
    }

    fn dense_range(&self) -> Result<Range<usize>, TensorError> {
        self.check_contiguous()?;
        self.span_range()
    }

    fn check_contiguous(&self) -> Result<(), TensorError> {
        if self.is_contiguous() { Ok(()) } else { Err(TensorError::NotContiguous(Box::new(self.spec))) }
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor({}, strides {:?})", self.spec, self.strides)
    }
}

/// The elements that `bytes` are.
pub(super) fn cast<T: Element>(dtype: Dtype, bytes: &[u8]) -> Result<&[T], TensorError> {
    if bytes.is_empty() {
        // Whose address may be anything.
        return Ok(&[]);
    }
    bytemuck::checked::try_cast_slice(bytes).map_err(|error| cast_error(dtype, bytes, error))
}

/// What a failed cast of `bytes` means.
pub(super) fn cast_error(dtype: Dtype, bytes: &[u8], error: CheckedCastError) -> TensorError {
    match error {
        CheckedCastError::PodCastError(_) => {
            TensorError::Misaligned { dtype, address: bytes.as_ptr() as usize }
        }
        CheckedCastError::InvalidBitPattern => {
            // Of all types, bool alone has such.
            let index = bytes.iter().position(|&byte| byte > 1).unwrap_or(0);
            TensorError::Value { dtype, index }
        }
    }
}

pub(super) fn check_length(spec: &TensorSpec, bytes: &[u8]) -> Result<(), TensorError> {
    let (expected, _) = spec.fixed()?;
    if bytes.len() == expected {
        return Ok(());
    }
    Err(TensorError::Length { spec: Box::new(*spec), expected: expected as u64, bytes: bytes.len() as u64 })
}

pub(super) fn check_alignment(spec: &TensorSpec, bytes: &[u8]) -> Result<(), TensorError> {
    let (dtype, address) = (spec.dtype(), bytes.as_ptr() as usize);
    if bytes.is_empty() || address.is_multiple_of(dtype.align()) {
        return Ok(());
    }
    Err(TensorError::Misaligned { dtype, address })
}
