//! Memory of tensor elements.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

use super::TensorError;
use tonic_rdma_verbs::internal::{find_sendable, find_traced};
use tonic_rdma_verbs::memory::Lease;

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
    /// Returns the bytes, or an empty slice for elements of variable length, which do not lie in one piece.
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
            Self::Bytes(bytes) => {
                let length = range.len();
                let part = bytes.get(range.clone())?;
                let lease = find_sendable(part).or_else(|| find_traced(&bytes.slice(range)))?;
                Some((lease, 0..length))
            }
            Self::Heap(_) | Self::Strings(_) => None,
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
    /// [`TensorError::Memory`] if the system has no memory.
    pub(super) fn zeroed(length: usize) -> Result<Self, TensorError> {
        let words = bytemuck::allocation::try_zeroed_slice_box(length.div_ceil(size_of::<u128>()))
            .map_err(|()| TensorError::Memory(length as u64))?;
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
