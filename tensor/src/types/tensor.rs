//! Tensors with shared, constant content.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

use super::checks::{cast, check_alignment, check_dtype, check_length, fixed_size};
use super::pack::{Rows, pack};
use super::storage::{Heap, Storage};
use super::{Dtype, Element, Metadata, Shape, Strides, TensorError, TensorMut, TensorSpec};
use tonic_rdma_verbs::memory::{Lease, RegisteredBuf};

/// A tensor whose content never changes. Clones, slices and permutations share its memory, which is freed with the last of
/// them.
///
/// ```
/// use tonic_rdma_tensor::{Dtype, Shape, Tensor, TensorMut, TensorSpec};
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
    /// Place of the first element, in elements of the storage. All elements lie in the storage, which is aligned for them.
    pub(super) offset: usize,
    pub(super) storage: Storage,
}

impl Tensor {
    /// Makes a tensor whose elements are `bytes`, row-major, without a copy.
    ///
    /// ```
    /// use bytes::Bytes;
    /// use tonic_rdma_tensor::{Dtype, Shape, Tensor, TensorSpec};
    ///
    /// let spec = TensorSpec::new(Dtype::U8, Shape::new(&[2, 2])?)?;
    /// let tensor = Tensor::from_bytes(spec, Bytes::from_static(&[1, 2, 3, 4]))?;
    /// assert_eq!(tensor.slice(1..2)?.as_slice::<u8>()?, [3, 4]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// `bytes` has another length than `spec`, the elements have a variable length, or the memory is not aligned for
    /// them. In the last case use [`copy_from`](Self::copy_from).
    pub fn from_bytes(spec: TensorSpec, bytes: Bytes) -> Result<Self, TensorError> {
        Self::dense(spec, Storage::Bytes(bytes))
    }

    /// Makes a tensor whose elements lie in a pool's memory, row-major, without a copy.
    ///
    /// ```
    /// use tonic_rdma::memory::Pool;
    /// use tonic_rdma_tensor::{Dtype, Shape, Tensor, TensorSpec};
    ///
    /// let mut buffer = Pool::for_sending(1 << 20).allocate(4)?;
    /// buffer.copy_from_slice(&[1, 2, 3, 4]);
    /// let spec = TensorSpec::new(Dtype::U8, Shape::new(&[4])?)?;
    /// let tensor = Tensor::from_lease(spec, buffer.into_lease())?;
    /// assert!(tensor.registered().is_some());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// The errors of [`from_bytes`](Self::from_bytes).
    pub fn from_lease(spec: TensorSpec, lease: Lease) -> Result<Self, TensorError> {
        Self::dense(spec, Storage::Lease(lease))
    }

    /// Makes a tensor of the content of `buffer`, row-major, without a copy.
    ///
    /// ```
    /// use tonic_rdma::memory::Pool;
    /// use tonic_rdma_tensor::{Dtype, Shape, Tensor, TensorSpec};
    ///
    /// let mut buffer = Pool::for_sending(1 << 20).allocate(4)?;
    /// buffer.copy_from_slice(&[1, 2, 3, 4]);
    /// let tensor = Tensor::from_buffer(TensorSpec::new(Dtype::U8, Shape::new(&[4])?)?, buffer)?;
    /// # assert_eq!(tensor.as_slice::<u8>()?, [1, 2, 3, 4]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// The errors of [`from_bytes`](Self::from_bytes).
    pub fn from_buffer(spec: TensorSpec, buffer: RegisteredBuf) -> Result<Self, TensorError> {
        Self::from_lease(spec, buffer.into_lease())
    }

    /// Makes a tensor on the heap with a copy of `bytes`, which are its elements, row-major. They need no alignment.
    ///
    /// ```
    /// use tonic_rdma_tensor::{Dtype, Shape, Tensor, TensorSpec};
    ///
    /// let spec = TensorSpec::new(Dtype::F32, Shape::new(&[1])?)?;
    /// let tensor = Tensor::copy_from(spec, &1.5_f32.to_le_bytes())?;
    /// assert_eq!(tensor.as_slice::<f32>()?, [1.5]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// `bytes` has another length than `spec`, the elements have a variable length, or the system has no memory.
    pub fn copy_from(spec: TensorSpec, bytes: &[u8]) -> Result<Self, TensorError> {
        check_length(&spec, bytes)?;
        let mut heap = Heap::zeroed(bytes.len())?;
        heap.bytes_mut().copy_from_slice(bytes);
        Self::dense(spec, Storage::Heap(Arc::new(heap)))
    }

    /// Makes a tensor whose elements lie in `bytes` at `strides`, which count elements. The first element is at the start.
    ///
    /// ```
    /// use bytes::Bytes;
    /// use tonic_rdma_tensor::{Dtype, Shape, Strides, Tensor, TensorSpec};
    ///
    /// // Every second byte.
    /// let spec = TensorSpec::new(Dtype::U8, Shape::new(&[2])?)?;
    /// let strides = Strides::new(&[2]).expect("one step");
    /// let tensor = Tensor::from_strided(spec, strides, Bytes::from_static(&[1, 2, 3]))?;
    /// assert_eq!(tensor.to_contiguous()?.as_slice::<u8>()?, [1, 3]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// The strides lead out of the bytes, their number is not the number of dimensions, the elements have a variable length, or
    /// the memory is not aligned for them.
    pub fn from_strided(spec: TensorSpec, strides: Strides, bytes: Bytes) -> Result<Self, TensorError> {
        let (_, size) = fixed_size(&spec)?;
        let available = (bytes.len() / size) as u64;
        let extent = strides.extent(spec.shape());
        if strides.steps().len() != spec.shape().rank() || extent.is_none_or(|extent| extent > available) {
            let (spec, strides) = (Box::new(spec), Box::new(strides));
            return Err(TensorError::Strides { spec, strides, available });
        }
        check_alignment(&spec, &bytes)?;
        Ok(Self { spec, strides, offset: 0, storage: Storage::Bytes(bytes) })
    }

    /// Makes a tensor of elements of variable length ([`Dtype::String`]), one for each element of `shape`, row-major.
    ///
    /// ```
    /// use tonic_rdma_tensor::{Shape, Tensor};
    ///
    /// let words = Tensor::from_strings(Shape::new(&[2])?, ["remote", "memory"])?;
    /// assert_eq!(words.strings()?.next().map(|word| word.len()), Some(6));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`TensorError::Length`] if the number of strings is not the number of elements. It counts elements here.
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

    /// Makes the tensor that fills `storage`, whose length and alignment are right.
    pub(super) fn from_checked(spec: TensorSpec, storage: Storage) -> Self {
        Self { spec, strides: Strides::row_major(spec.shape()), offset: 0, storage }
    }

    /// Returns type and shape.
    pub fn spec(&self) -> &TensorSpec {
        &self.spec
    }

    /// Returns the type of the elements.
    pub fn dtype(&self) -> Dtype {
        self.spec.dtype()
    }

    /// Returns the lengths of the dimensions.
    pub fn shape(&self) -> &Shape {
        self.spec.shape()
    }

    /// Returns the steps from element to element.
    pub fn strides(&self) -> &Strides {
        &self.strides
    }

    /// Returns whether the elements lie one after the other, row-major.
    pub fn is_contiguous(&self) -> bool {
        self.strides.is_contiguous(self.spec.shape())
    }

    /// Returns the metadata for the tensor's [`bytes`](Self::bytes), or `None` if the tensor is not contiguous or its elements
    /// have a variable length. Such tensors move in the form of [`serialize`](super::serialize()).
    pub fn metadata(&self) -> Option<Metadata> {
        if self.is_contiguous() { Metadata::dense(self.spec).ok() } else { None }
    }

    /// Returns the elements, row-major.
    ///
    /// # Errors
    /// The elements have another type, don't lie one after the other, or have values that their type does not have.
    pub fn as_slice<T: Element>(&self) -> Result<&[T], TensorError> {
        self.check_contiguous()?;
        self.span()
    }

    /// Returns the elements' bytes, row-major.
    ///
    /// # Errors
    /// The elements have a variable length, or don't lie one after the other.
    pub fn bytes(&self) -> Result<&[u8], TensorError> {
        Ok(&self.storage.bytes()[self.dense_range()?])
    }

    /// Returns the elements' bytes, row-major, without a copy.
    ///
    /// # Errors
    /// The errors of [`bytes`](Self::bytes).
    pub fn to_bytes(&self) -> Result<Bytes, TensorError> {
        Ok(self.storage.share(self.dense_range()?))
    }

    /// Returns the place of the tensor's bytes in a pool's memory: a lease, and a range of its bytes. A device can send the
    /// bytes from there. Returns `None` if the bytes lie elsewhere, or the elements do not lie one after the other.
    ///
    /// A tensor of [`from_bytes`](Self::from_bytes) may lie in a pool without the knowledge of the library that allocated it
    /// ([`memory::trace`](tonic_rdma_verbs::memory::trace)). The lease then holds these `Bytes`, so that the library can neither
    /// change nor free them while they are sent.
    pub fn registered(&self) -> Option<(Lease, Range<usize>)> {
        self.storage.registered(self.dense_range().ok()?)
    }

    /// Returns the elements of variable length, row-major.
    ///
    /// # Errors
    /// [`TensorError::Variable`] if the elements have a fixed length.
    pub fn strings(&self) -> Result<impl Iterator<Item = &Bytes> + '_, TensorError> {
        let Storage::Strings(strings) = &self.storage else {
            return Err(TensorError::Variable(self.dtype()));
        };
        let rows = Rows::new(self.shape(), &self.strides, self.offset);
        let (length, step) = rows.inner();
        Ok(rows.flat_map(move |start| (0..length).map(move |place| &strings[start + place * step])))
    }

    /// Copies the elements to `destination`, row-major. The destination can be registered memory to send from.
    ///
    /// # Errors
    /// The elements have a variable length, or `destination` has another length.
    pub fn copy_to(&self, destination: &mut [u8]) -> Result<(), TensorError> {
        check_length(&self.spec, destination)?;
        let (_, size) = fixed_size(&self.spec)?;
        let rows = Rows::new(self.shape(), &self.strides, self.offset);
        pack(self.storage.bytes(), size, rows, destination);
        Ok(())
    }

    /// Returns a tensor with these elements one after the other. It shares the memory if the elements lie one after the other
    /// already. Otherwise the elements are copied to the heap.
    ///
    /// # Errors
    /// The system has no memory.
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

    /// Makes the tensor writable again without a copy. The tensor has to be the last reference to its memory and fill it, and the
    /// memory has to come from a pool ([`from_buffer`](Self::from_buffer)) or from [`TensorMut`].
    ///
    /// # Errors
    /// The tensor itself, if one of these conditions does not hold.
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

    /// Returns all elements of the memory from the tensor's first element to its last, with the elements between its steps.
    pub(crate) fn span<T: Element>(&self) -> Result<&[T], TensorError> {
        check_dtype::<T>(self.dtype())?;
        cast(self.dtype(), &self.storage.bytes()[self.span_range()?])
    }

    /// Returns the range of the storage, in bytes, from the first element to the last.
    pub(crate) fn span_range(&self) -> Result<Range<usize>, TensorError> {
        let (_, size) = fixed_size(&self.spec)?;
        let extent = self.strides.extent(self.shape()).unwrap_or(0) as usize;
        // The range lies within the storage, because every constructor has checked it.
        Ok(self.offset * size..(self.offset + extent) * size)
    }

    /// Returns the bytes of [`span_range`](Self::span_range), shared.
    pub(crate) fn span_bytes(&self) -> Result<Bytes, TensorError> {
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
