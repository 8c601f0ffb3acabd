//! Tensors with shared, constant content: their memory, views of it, and copies in row-major order.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use bytemuck::checked::CheckedCastError;
use bytes::Bytes;

use super::{Dtype, Element, Metadata, Shape, Strides, TensorMut, TensorSpec, ValueError};
use crate::error::TensorError;
use tonic_rdma_verbs::memory::{Lease, RegisteredBuf};
use tonic_rdma_verbs::unstable::{find_sendable, find_traced};

/// A tensor whose content never changes. Clones, slices and permutations share its memory, which is freed
/// with the last of them.
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
    /// Offset of the first element, in elements from the start of the storage. All elements lie in the
    /// storage, which is aligned for them.
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
    /// `bytes` has another length than `spec`, the elements have a variable length, or the memory is not
    /// aligned for them. In the last case use [`copy_from`](Self::copy_from).
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

    /// Makes a tensor on the heap with a copy of `bytes`, which are its elements, row-major. They need no
    /// alignment.
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
    /// `bytes` has another length than `spec`, the elements have a variable length, or the system has no
    /// memory.
    pub fn copy_from(spec: TensorSpec, bytes: &[u8]) -> Result<Self, TensorError> {
        check_length(&spec, bytes)?;
        let mut heap = Heap::zeroed(bytes.len())?;
        heap.bytes_mut().copy_from_slice(bytes);
        Self::dense(spec, Storage::Heap(Arc::new(heap)))
    }

    /// Makes a tensor whose elements lie in `bytes` at `strides`, which count elements. The first element is
    /// at the start.
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
    /// The strides lead out of the bytes, their number is not the number of dimensions, the elements have a
    /// variable length, or the memory is not aligned for them.
    pub fn from_strided(spec: TensorSpec, strides: Strides, bytes: Bytes) -> Result<Self, TensorError> {
        let (_, size) = fixed_size(&spec)?;
        let available = (bytes.len() / size) as u64;
        let extent = strides.extent(spec.shape());
        if strides.steps().len() != spec.shape().rank() || extent.is_none_or(|extent| extent > available) {
            let (spec, strides) = (Box::new(spec), Box::new(strides));
            return Err(ValueError::Strides { spec, strides, available }.into());
        }
        check_alignment(&spec, &bytes)?;
        Ok(Self { spec, strides, offset: 0, storage: Storage::Bytes(bytes) })
    }

    /// Makes a tensor of elements of variable length ([`Dtype::String`]), one for each element of `shape`,
    /// row-major.
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
    /// The number of strings is not the number of elements.
    pub fn from_strings<S: Into<Bytes>>(
        shape: Shape,
        strings: impl IntoIterator<Item = S>,
    ) -> Result<Self, TensorError> {
        let spec = TensorSpec::new(Dtype::String, shape)?;
        let strings: Arc<[Bytes]> = strings.into_iter().map(Into::into).collect();
        let (expected, bytes) = (shape.elements(), strings.len() as u64);
        if bytes != expected {
            return Err(ValueError::Length { spec: Box::new(spec), expected, bytes }.into());
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

    /// Returns whether the elements are contiguous, row-major.
    pub fn is_contiguous(&self) -> bool {
        self.strides.is_contiguous(self.spec.shape())
    }

    /// Returns the metadata for the tensor's [`bytes`](Self::bytes), or `None` if the tensor is not
    /// contiguous or its elements have a variable length. Such tensors move in the form of
    /// [`serialize`](Self::serialize).
    pub fn metadata(&self) -> Option<Metadata> {
        if self.is_contiguous() { Metadata::dense(self.spec).ok() } else { None }
    }

    /// Returns the elements, row-major.
    ///
    /// # Errors
    /// The elements have another type, are not contiguous, or have values that their type does not have.
    pub fn as_slice<T: Element>(&self) -> Result<&[T], TensorError> {
        self.check_contiguous()?;
        self.span()
    }

    /// Returns the elements' bytes, row-major.
    ///
    /// # Errors
    /// The elements have a variable length, or are not contiguous.
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

    /// Returns where the tensor's bytes are in a pool's memory: a lease, and a range of its bytes. A device
    /// can send the bytes from there. Returns `None` if the bytes lie elsewhere, or the elements are not
    /// contiguous.
    ///
    /// Memory of the heap may lie in a pool, because the program's allocator took it from there
    /// ([`memory::trace`](tonic_rdma_verbs::memory::trace)). The lease then holds this memory, so that it
    /// is neither changed nor freed while it is sent.
    pub fn registered(&self) -> Option<(Lease, Range<usize>)> {
        self.storage.registered(self.dense_range().ok()?)
    }

    /// Returns the elements of variable length, row-major.
    ///
    /// # Errors
    /// The elements have a fixed length.
    pub fn strings(&self) -> Result<impl Iterator<Item = &Bytes> + '_, TensorError> {
        let Storage::Strings(strings) = &self.storage else {
            return Err(ValueError::Variable(self.dtype()).into());
        };
        let rows = Rows::new(self.shape(), &self.strides, self.offset);
        let (length, step) = rows.inner;
        Ok(rows.flat_map(move |start| (0..length).map(move |place| &strings[start + place * step])))
    }

    /// Copies the elements to `destination`, row-major. The destination can be registered memory to send
    /// from.
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

    /// Returns a tensor with these elements one after the other. It shares the memory if the elements lie one
    /// after the other already. Otherwise the elements are copied to the heap.
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

    /// Makes the tensor writable again without a copy. The tensor has to be the last reference to its memory
    /// and fill it, and the memory has to come from a pool ([`from_buffer`](Self::from_buffer)) or from
    /// [`TensorMut`].
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

    /// Returns all elements of the memory from the tensor's first element to its last, with the elements
    /// between its steps.
    pub(crate) fn span<T: Element>(&self) -> Result<&[T], TensorError> {
        check_dtype::<T>(self.dtype())?;
        cast(self.dtype(), &self.storage.bytes()[self.span_range()?])
    }

    /// Returns the range of the storage, in bytes, from the first element to the last.
    fn span_range(&self) -> Result<Range<usize>, TensorError> {
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
        if self.is_contiguous() { Ok(()) } else { Err(ValueError::NotContiguous(Box::new(self.spec)).into()) }
    }

    /// Returns the rows of `range`. The first dimension counts rows. The result shares the memory.
    ///
    /// # Errors
    /// The range goes beyond the first dimension or backwards, or the tensor is a scalar, which has no rows.
    pub fn slice(&self, range: Range<u64>) -> Result<Self, TensorError> {
        let Range { start, end } = range;
        let within = self.shape().dims().first().filter(|&&rows| start <= end && end <= rows);
        if within.is_none() {
            return Err(ValueError::Slice { spec: Box::new(self.spec), start, end }.into());
        }
        let (mut dims, rank) = ([0; Shape::MAX_RANK], self.shape().rank());
        dims[..rank].copy_from_slice(self.shape().dims());
        dims[0] = end - start;
        let spec = TensorSpec::new(self.dtype(), Shape::new(&dims[..rank])?)?;
        // A slice without elements starts at the tensor's start, because its first row may lie beyond the
        // end.
        let skipped = if spec.shape().elements() == 0 { 0 } else { start * self.strides.steps()[0] };
        let storage = self.storage.clone();
        Ok(Self { spec, strides: self.strides, offset: self.offset + skipped as usize, storage })
    }

    /// Returns the tensor with its dimensions in another order: dimension `i` of the result is dimension
    /// `axes[i]` of this tensor. The result shares the memory.
    ///
    /// # Errors
    /// `axes` does not name each dimension once.
    pub fn permute(&self, axes: &[usize]) -> Result<Self, TensorError> {
        let rank = self.shape().rank();
        let mut seen = [false; Shape::MAX_RANK];
        let valid = axes.len() == rank
            && axes.iter().all(|&axis| axis < rank && !std::mem::replace(&mut seen[axis], true));
        if !valid {
            let axes = axes.iter().copied().take(Shape::MAX_RANK).collect();
            return Err(ValueError::Axes { spec: Box::new(self.spec), axes }.into());
        }
        let (mut dims, mut steps) = ([0; Shape::MAX_RANK], [0; Shape::MAX_RANK]);
        for (place, &axis) in axes.iter().enumerate() {
            dims[place] = self.shape().dims()[axis];
            steps[place] = self.strides.steps()[axis];
        }
        let spec = TensorSpec::new(self.dtype(), Shape::new(&dims[..rank])?)?;
        let strides = Strides::new(&steps[..rank]).unwrap_or(self.strides);
        Ok(Self { spec, strides, offset: self.offset, storage: self.storage.clone() })
    }

    /// Returns the tensor with its dimensions in reverse order. The result shares the memory.
    pub fn transpose(&self) -> Self {
        let mut axes = [0; Shape::MAX_RANK];
        let axes = &mut axes[..self.shape().rank()];
        for (place, axis) in axes.iter_mut().rev().enumerate() {
            *axis = place;
        }
        // The axes name each dimension once, so this does not fail.
        self.permute(axes).unwrap_or_else(|_| self.clone())
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor({}, strides {:?})", self.spec, self.strides)
    }
}

/// The starts of a tensor's rows, in elements from the start of its storage, in row-major order. A row is the
/// longest innermost run of elements with a constant step.
#[derive(Debug)]
pub(super) struct Rows {
    /// Length, step and current index of each dimension outside the row, the slowest first.
    outer: Vec<(u64, u64, u64)>,
    /// The length of each row, and the step between its elements.
    inner: (usize, usize),
    /// The start of the next row.
    at: usize,
    /// The number of rows that have not been returned.
    remaining: u64,
}

impl Rows {
    /// Makes the rows of a tensor of `shape` and `strides` whose first element is at `offset`.
    pub(super) fn new(shape: &Shape, strides: &Strides, offset: usize) -> Self {
        let mut merged: Vec<(u64, u64)> = Vec::with_capacity(shape.rank());
        for (&length, &step) in shape.dims().iter().zip(strides.steps()).filter(|&(&length, _)| length != 1) {
            match merged.last_mut() {
                // One step of the outer dimension is as long as the whole inner dimension: both are one run.
                Some(outer) if step.checked_mul(length) == Some(outer.1) => *outer = (outer.0 * length, step),
                _ => merged.push((length, step)),
            }
        }
        let (length, step) = merged.pop().unwrap_or((1, 1));
        let remaining =
            if shape.elements() == 0 { 0 } else { merged.iter().map(|&(length, _)| length).product() };
        let outer = merged.into_iter().map(|(length, step)| (length, step, 0)).collect();
        Self { outer, inner: (length as usize, step as usize), at: offset, remaining }
    }
}

impl Iterator for Rows {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        self.remaining = self.remaining.checked_sub(1)?;
        let start = self.at;
        for (length, step, place) in self.outer.iter_mut().rev() {
            *place += 1;
            if *place < *length {
                self.at += *step as usize;
                break;
            }
            self.at -= (*step * (*length - 1)) as usize;
            *place = 0;
        }
        Some(start)
    }
}

/// Copies the elements of `rows`, each of `size` bytes, from `source` to `destination`, one after the other.
/// All rows lie in the source, and fill the destination.
fn pack(source: &[u8], size: usize, rows: Rows, destination: &mut [u8]) {
    match size {
        1 => pack_elements::<1>(source, rows, destination),
        2 => pack_elements::<2>(source, rows, destination),
        4 => pack_elements::<4>(source, rows, destination),
        8 => pack_elements::<8>(source, rows, destination),
        _ => pack_elements::<16>(source, rows, destination),
    }
}

fn pack_elements<const SIZE: usize>(source: &[u8], rows: Rows, destination: &mut [u8]) {
    let (source, _) = source.as_chunks::<SIZE>();
    let (mut destination, _) = destination.as_chunks_mut::<SIZE>();
    let (length, step) = rows.inner;
    for start in rows {
        let (row, rest) = destination.split_at_mut(length);
        match step {
            0 => row.fill(source[start]),
            1 => row.copy_from_slice(&source[start..start + length]),
            _ => {
                for (to, from) in row.iter_mut().zip(source[start..].iter().step_by(step)) {
                    *to = *from;
                }
            }
        }
        destination = rest;
    }
}

/// The memory of a tensor's elements, which never changes.
#[derive(Clone, Debug)]
pub(super) enum Storage {
    /// Any memory.
    Bytes(Bytes),
    /// Memory of a pool.
    Lease(Lease),
    /// Memory that this module allocated.
    Heap(Arc<Heap>),
    /// Elements of variable length.
    Strings(Arc<[Bytes]>),
}

impl Storage {
    /// Returns the bytes, or an empty slice for elements of variable length, which are not contiguous.
    pub(super) fn bytes(&self) -> &[u8] {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Lease(lease) => lease,
            Self::Heap(heap) => heap.bytes(),
            Self::Strings(_) => &[],
        }
    }

    /// Returns the bytes of `range`, shared. The range lies within the storage.
    pub(super) fn share(&self, range: Range<usize>) -> Bytes {
        let all = match self {
            Self::Bytes(bytes) => bytes.clone(),
            Self::Lease(lease) => lease.clone().into_bytes(),
            Self::Heap(heap) => Bytes::from_owner(HeapOwner(Arc::clone(heap))),
            Self::Strings(_) => Bytes::new(),
        };
        all.slice(range)
    }

    /// Returns the place of the bytes of `range` in a pool's memory, if they lie in one.
    pub(super) fn registered(&self, range: Range<usize>) -> Option<(Lease, Range<usize>)> {
        match self {
            Self::Lease(lease) => Some((lease.clone(), range)),
            Self::Bytes(_) | Self::Heap(_) => {
                let bytes = self.bytes().get(range.clone())?;
                let lease = find_sendable(bytes).or_else(|| find_traced(bytes, || self.share(range)))?;
                Some((lease, 0..bytes.len()))
            }
            Self::Strings(_) => None,
        }
    }
}

/// Memory on the heap, aligned for every element type.
pub(super) struct Heap {
    words: Box<[u128]>,
    length: usize,
}

impl Heap {
    /// Allocates `length` bytes of zeros.
    ///
    /// # Errors
    /// The system has no memory.
    pub(super) fn zeroed(length: usize) -> Result<Self, TensorError> {
        let words = bytemuck::allocation::try_zeroed_slice_box(length.div_ceil(size_of::<u128>()))
            .map_err(|()| ValueError::Memory(length as u64))?;
        Ok(Self { words, length })
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.length]
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.words)[..self.length]
    }
}

impl std::fmt::Debug for Heap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Heap({} bytes)", self.length)
    }
}

/// An `Arc<Heap>` that can own `Bytes`.
struct HeapOwner(Arc<Heap>);

impl AsRef<[u8]> for HeapOwner {
    fn as_ref(&self) -> &[u8] {
        self.0.bytes()
    }
}

/// Returns the number of bytes of all elements, and of one element.
///
/// # Errors
/// The elements have no fixed size.
pub(super) fn fixed_size(spec: &TensorSpec) -> Result<(usize, usize), TensorError> {
    let size = spec.dtype().size().ok_or(ValueError::Variable(spec.dtype()))?;
    Ok((spec.shape().elements() as usize * size, size))
}

/// Checks that elements of this type are asked for as what they are.
pub(super) fn check_dtype<T: Element>(actual: Dtype) -> Result<(), TensorError> {
    let asked = T::DTYPE;
    if actual == asked { Ok(()) } else { Err(ValueError::WrongDtype { actual, asked }.into()) }
}

/// Returns the elements in `bytes`.
pub(super) fn cast<T: Element>(dtype: Dtype, bytes: &[u8]) -> Result<&[T], TensorError> {
    if bytes.is_empty() {
        // An empty slice may have any address, which a cast would refuse.
        return Ok(&[]);
    }
    bytemuck::checked::try_cast_slice(bytes).map_err(|error| cast_error(dtype, bytes, error))
}

/// Returns the error for a failed cast of `bytes`.
pub(super) fn cast_error(dtype: Dtype, bytes: &[u8], error: CheckedCastError) -> TensorError {
    match error {
        CheckedCastError::PodCastError(_) => {
            ValueError::Misaligned { dtype, address: bytes.as_ptr() as usize }.into()
        }
        CheckedCastError::InvalidBitPattern => {
            // Only bool has invalid bit patterns.
            let index = bytes.iter().position(|&byte| byte > 1).unwrap_or(0);
            ValueError::Value { dtype, index }.into()
        }
    }
}

pub(super) fn check_length(spec: &TensorSpec, bytes: &[u8]) -> Result<(), TensorError> {
    let (expected, _) = fixed_size(spec)?;
    if bytes.len() == expected {
        return Ok(());
    }
    Err(ValueError::Length { spec: Box::new(*spec), expected: expected as u64, bytes: bytes.len() as u64 }
        .into())
}

pub(super) fn check_alignment(spec: &TensorSpec, bytes: &[u8]) -> Result<(), TensorError> {
    let (dtype, address) = (spec.dtype(), bytes.as_ptr() as usize);
    if bytes.is_empty() || address.is_multiple_of(dtype.align()) {
        return Ok(());
    }
    Err(ValueError::Misaligned { dtype, address }.into())
}
