//! Tensors that their one owner writes.

use std::fmt;
use std::sync::Arc;

use super::tensor::{
    Heap, Storage, cast, cast_error, check_alignment, check_dtype, check_length, fixed_size,
};
use super::{Element, Tensor, TensorSpec};
use crate::error::{TensorError, TensorErrorKind};
use tonic_rdma_verbs::memory::{Pool, RegisteredBuf};

/// A tensor that its one owner writes, row-major, and then [`freeze`](Self::freeze)s.
///
/// ```
/// use tonic_rdma_tensor::{Dtype, Shape, TensorMut, TensorSpec};
///
/// let mut identity = TensorMut::zeroed(TensorSpec::new(Dtype::F32, Shape::new(&[2, 2])?)?)?;
/// let elements = identity.as_mut_slice::<f32>()?;
/// (elements[0], elements[3]) = (1.0, 1.0);
/// let identity = identity.freeze();
/// assert_eq!(identity.as_slice::<f32>()?, [1.0, 0.0, 0.0, 1.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct TensorMut {
    spec: TensorSpec,
    memory: Memory,
}

enum Memory {
    Registered(RegisteredBuf),
    Heap(Heap),
}

impl TensorMut {
    /// Makes a tensor of zeros on the heap. Sending it over RDMA copies it.
    ///
    /// ```
    /// use tonic_rdma_tensor::{Dtype, Shape, TensorMut, TensorSpec};
    ///
    /// let zeros = TensorMut::zeroed(TensorSpec::new(Dtype::I64, Shape::new(&[3])?)?)?;
    /// assert_eq!(zeros.as_slice::<i64>()?, [0, 0, 0]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// The elements have a variable length, or the system has no memory.
    pub fn zeroed(spec: TensorSpec) -> Result<Self, TensorError> {
        let (length, _) = fixed_size(&spec)?;
        Ok(Self::from_heap(spec, Heap::zeroed(length)?))
    }

    /// Makes a tensor in a pool's memory, which a device can send from there. Its content is arbitrary:
    /// zeros, or the last content of the memory in this pool.
    ///
    /// ```
    /// use tonic_rdma::memory::Pool;
    /// use tonic_rdma_tensor::{Dtype, Shape, TensorMut, TensorSpec};
    ///
    /// let pool = Pool::for_sending(1 << 20);
    /// let mut weights = TensorMut::in_pool(TensorSpec::new(Dtype::F32, Shape::new(&[256])?)?, &pool)?;
    /// weights.as_mut_slice::<f32>()?.fill(0.5);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// The elements have a variable length, or the pool has no memory.
    pub fn in_pool(spec: TensorSpec, pool: &Pool) -> Result<Self, TensorError> {
        let (length, _) = fixed_size(&spec)?;
        let buffer = pool.allocate(length);
        let no_memory = |error| TensorError::caused(TensorErrorKind::NoMemory, "", error);
        Self::from_buffer(spec, buffer.map_err(no_memory)?)
    }

    /// Makes a tensor with the content of `buffer`.
    ///
    /// ```
    /// use tonic_rdma::memory::Pool;
    /// use tonic_rdma_tensor::{Dtype, Shape, TensorMut, TensorSpec};
    ///
    /// let mut buffer = Pool::for_sending(1 << 20).allocate(4)?;
    /// buffer.copy_from_slice(&[1, 2, 3, 4]);
    /// let tensor = TensorMut::from_buffer(TensorSpec::new(Dtype::U8, Shape::new(&[2, 2])?)?, buffer)?;
    /// assert_eq!(tensor.as_slice::<u8>()?, [1, 2, 3, 4]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// `buffer` has another number of bytes than `spec`, or the elements have a variable length.
    pub fn from_buffer(spec: TensorSpec, buffer: RegisteredBuf) -> Result<Self, TensorError> {
        check_length(&spec, &buffer)?;
        check_alignment(&spec, &buffer)?;
        Ok(Self::from_checked(spec, buffer))
    }

    /// Makes a tensor in `buffer`, whose length and alignment are right.
    pub(super) fn from_checked(spec: TensorSpec, buffer: RegisteredBuf) -> Self {
        Self { spec, memory: Memory::Registered(buffer) }
    }

    /// Makes a tensor in `heap`, whose length is right.
    pub(super) fn from_heap(spec: TensorSpec, heap: Heap) -> Self {
        Self { spec, memory: Memory::Heap(heap) }
    }

    /// Returns type and shape.
    pub fn spec(&self) -> &TensorSpec {
        &self.spec
    }

    /// Returns the elements, row-major.
    ///
    /// # Errors
    /// The elements have another type, or values that their type does not have.
    pub fn as_slice<T: Element>(&self) -> Result<&[T], TensorError> {
        check_dtype::<T>(self.spec.dtype())?;
        cast(self.spec.dtype(), self.bytes())
    }

    /// Returns the elements to write to, row-major.
    ///
    /// # Errors
    /// The elements have another type, or values that their type does not have. Initialise bools in a pool's
    /// memory with [`bytes_mut`](Self::bytes_mut) first.
    pub fn as_mut_slice<T: Element>(&mut self) -> Result<&mut [T], TensorError> {
        // The check by a shared reference comes first, because its error names the wrong element.
        self.as_slice::<T>()?;
        let dtype = self.spec.dtype();
        let bytes = self.bytes_mut();
        if bytes.is_empty() {
            return Ok(&mut []);
        }
        bytemuck::checked::try_cast_slice_mut(bytes).map_err(|error| cast_error(dtype, &[], error))
    }

    /// Returns the elements' bytes, row-major.
    pub fn bytes(&self) -> &[u8] {
        match &self.memory {
            Memory::Registered(buffer) => buffer,
            Memory::Heap(heap) => heap.bytes(),
        }
    }

    /// Returns the elements' bytes to write to, row-major.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        match &mut self.memory {
            Memory::Registered(buffer) => buffer,
            Memory::Heap(heap) => heap.bytes_mut(),
        }
    }

    /// Makes the tensor immutable and shareable.
    pub fn freeze(self) -> Tensor {
        let storage = match self.memory {
            Memory::Registered(buffer) => Storage::Lease(buffer.into_lease()),
            Memory::Heap(heap) => Storage::Heap(Arc::new(heap)),
        };
        Tensor::from_checked(self.spec, storage)
    }
}

impl fmt::Debug for TensorMut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = match self.memory {
            Memory::Registered(_) => "registered",
            Memory::Heap(_) => "heap",
        };
        write!(f, "TensorMut({}, {place})", self.spec)
    }
}
