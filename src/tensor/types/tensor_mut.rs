//! Tensors that one owner fills.

use std::fmt;
use std::sync::Arc;

use super::storage::{Heap, Storage};
use super::tensor::{cast, cast_error, check_alignment, check_length};
use super::{Element, Tensor, TensorError, TensorSpec};
use crate::memory::{Pool, PoolError, RegisteredBuf};

/// A tensor that its one owner fills, row-major, and then [`freeze`](Self::freeze)s.
pub struct TensorMut {
    spec: TensorSpec,
    memory: Memory,
}

enum Memory {
    Registered(RegisteredBuf),
    Heap(Heap),
}

/// Why a pool gave no tensor.
#[derive(Debug, thiserror::Error)]
pub enum AllocateError {
    /// The pool has no memory for it.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// It is no tensor that a pool can hold.
    #[error(transparent)]
    Tensor(#[from] TensorError),
}

impl TensorMut {
    /// A tensor of zeros on the heap, which has to be copied to be sent over RDMA.
    ///
    /// # Errors
    /// Elements of variable length, or no memory.
    pub fn zeroed(spec: TensorSpec) -> Result<Self, TensorError> {
        let (length, _) = spec.fixed()?;
        Ok(Self::from_heap(spec, Heap::zeroed(length)?))
    }

    /// A tensor in a pool's memory, to be sent from there. Its content is whatever the memory was last used for in this
    /// pool, or zeros.
    ///
    /// # Errors
    /// Elements of variable length, or no memory in the pool.
    pub fn in_pool(spec: TensorSpec, pool: &Pool) -> Result<Self, AllocateError> {
        let (length, _) = spec.fixed()?;
        Ok(Self::from_buffer(spec, pool.allocate(length)?)?)
    }

    /// A tensor in `buffer`, with the content that this has.
    ///
    /// # Errors
    /// Another number of bytes than `spec` has, or elements of variable length.
    pub fn from_buffer(spec: TensorSpec, buffer: RegisteredBuf) -> Result<Self, TensorError> {
        check_length(&spec, &buffer)?;
        check_alignment(&spec, &buffer)?;
        Ok(Self::from_checked(spec, buffer))
    }

    /// A tensor in `buffer`, whose length and alignment are right.
    pub(super) fn from_checked(spec: TensorSpec, buffer: RegisteredBuf) -> Self {
        Self { spec, memory: Memory::Registered(buffer) }
    }

    /// A tensor in `heap`, whose length is right.
    pub(super) fn from_heap(spec: TensorSpec, heap: Heap) -> Self {
        Self { spec, memory: Memory::Heap(heap) }
    }

    /// Type and shape.
    pub fn spec(&self) -> &TensorSpec {
        &self.spec
    }

    /// The elements, row-major.
    ///
    /// # Errors
    /// Elements of another type, or of values that their type does not have.
    pub fn as_slice<T: Element>(&self) -> Result<&[T], TensorError> {
        self.check_dtype::<T>()?;
        cast(self.spec.dtype(), self.bytes())
    }

    /// The elements to write to, row-major.
    ///
    /// # Errors
    /// Elements of another type, or of values that their type does not have: bools of a pool are to be filled by
    /// [`bytes_mut`](Self::bytes_mut) first.
    pub fn as_mut_slice<T: Element>(&mut self) -> Result<&mut [T], TensorError> {
        // The check by a shared reference first, since it can tell which element is wrong.
        self.as_slice::<T>()?;
        let dtype = self.spec.dtype();
        let bytes = self.bytes_mut();
        if bytes.is_empty() {
            return Ok(&mut []);
        }
        bytemuck::checked::try_cast_slice_mut(bytes).map_err(|error| cast_error(dtype, &[], error))
    }

    /// The elements' bytes, row-major.
    pub fn bytes(&self) -> &[u8] {
        match &self.memory {
            Memory::Registered(buffer) => buffer,
            Memory::Heap(heap) => heap.bytes(),
        }
    }

    /// The elements' bytes to write to, row-major.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        match &mut self.memory {
            Memory::Registered(buffer) => buffer,
            Memory::Heap(heap) => heap.bytes_mut(),
        }
    }

    /// Makes it immutable and shareable.
    pub fn freeze(self) -> Tensor {
        let storage = match self.memory {
            Memory::Registered(buffer) => Storage::Lease(buffer.into_lease()),
            Memory::Heap(heap) => Storage::Heap(Arc::new(heap)),
        };
        Tensor::from_checked(self.spec, storage)
    }

    fn check_dtype<T: Element>(&self) -> Result<(), TensorError> {
        let (actual, asked) = (self.spec.dtype(), T::DTYPE);
        if actual == asked { Ok(()) } else { Err(TensorError::WrongDtype { actual, asked }) }
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
