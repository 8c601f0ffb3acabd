//! Elements in registered memory.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use bytemuck::Pod;

use crate::error::CollectiveError;
use crate::memory::pool::{Memory, MemoryPool};

/// Elements in memory that the device has registered. Other ranks read the elements from there, so an operation on a buffer
/// needs no copy of the elements at this rank.
///
/// A buffer is a `&mut [T]`. It moves into an operation, and comes back with the result. When a buffer is dropped, its memory
/// stays registered, and the next buffer of about the same size uses the memory again.
pub struct Buffer<T> {
    memory: Memory,
    length: usize,
    elements: PhantomData<T>,
}

impl<T: Pod> Buffer<T> {
    /// Makes a buffer of `length` elements, all zero.
    ///
    /// # Errors
    /// There is no memory, or its pinned part has reached `RDMA_PINNED_LIMIT`.
    pub(crate) fn zeroed(pool: &MemoryPool, length: usize) -> Result<Self, CollectiveError> {
        let bytes = length.checked_mul(size_of::<T>()).ok_or_else(|| {
            CollectiveError::Argument(
                format!("a buffer of {length} elements of {} bytes is larger than memory", size_of::<T>())
                    .into(),
            )
        })?;
        let mut memory = pool.take(bytes)?;
        if memory.is_used()
            && let Some(dirty) = memory.get_mut(..bytes)
        {
            dirty.fill(0);
        }
        Ok(Self { memory, length, elements: PhantomData })
    }

    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Returns whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Takes the buffer apart: its memory and the number of elements.
    pub(crate) fn into_parts(self) -> (Memory, usize) {
        (self.memory, self.length)
    }

    /// Puts a buffer together again. `memory` has at least `length` elements.
    pub(crate) fn from_parts(memory: Memory, length: usize) -> Self {
        Self { memory, length, elements: PhantomData }
    }

    /// Returns the memory. The elements begin at its first byte.
    #[cfg(test)]
    pub(crate) fn memory(&self) -> &Memory {
        &self.memory
    }
}

impl<T: Pod> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        let bytes = self.memory.get(..self.length * size_of::<T>()).unwrap_or_default();
        // The memory begins at a page, so it is aligned for every type.
        bytemuck::try_cast_slice(bytes).unwrap_or_default()
    }
}

impl<T: Pod> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        let bytes = self.memory.get_mut(..self.length * size_of::<T>()).unwrap_or_default();
        bytemuck::try_cast_slice_mut(bytes).unwrap_or_default()
    }
}

impl<T: Pod + fmt::Debug> fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}
