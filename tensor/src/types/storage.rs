//! The memory that elements are in.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

use super::TensorError;
use tonic_rdma_verbs::internal::find_sendable;
use tonic_rdma_verbs::memory::Lease;

/// What keeps the elements of a tensor, and never changes.
#[derive(Clone, Debug)]
pub(super) enum Storage {
    /// Any memory.
    Bytes(Bytes),
    /// Of a pool.
    Lease(Lease),
    /// Allocated here.
    Heap(Arc<Heap>),
    /// Elements of variable length.
    Strings(Arc<[Bytes]>),
}

impl Storage {
    /// The bytes, of which elements of variable length have none in common.
    pub(super) fn bytes(&self) -> &[u8] {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Lease(lease) => lease,
            Self::Heap(heap) => heap.bytes(),
            Self::Strings(_) => &[],
        }
    }

    /// The bytes of `range`, which lies within them.
    pub(super) fn share(&self, range: Range<usize>) -> Bytes {
        let all = match self {
            Self::Bytes(bytes) => bytes.clone(),
            Self::Lease(lease) => lease.clone().into_bytes(),
            Self::Heap(heap) => Bytes::from_owner(HeapOwner(Arc::clone(heap))),
            Self::Strings(_) => Bytes::new(),
        };
        all.slice(range)
    }

    /// Where the bytes of `range` are in a pool's memory, if they are.
    pub(super) fn registered(&self, range: Range<usize>) -> Option<(Lease, Range<usize>)> {
        match self {
            Self::Lease(lease) => Some((lease.clone(), range)),
            Self::Bytes(bytes) => {
                let length = range.len();
                Some((find_sendable(bytes.get(range)?)?, 0..length))
            }
            Self::Heap(_) | Self::Strings(_) => None,
        }
    }
}

/// Memory of the heap, aligned for every type of element.
pub(super) struct Heap {
    words: Box<[u128]>,
    length: usize,
}

impl Heap {
    /// `length` bytes of zeros.
    ///
    /// # Errors
    /// [`TensorError::Memory`].
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

/// `Arc<Heap>`, as `Bytes` wants its owners.
struct HeapOwner(Arc<Heap>);

impl AsRef<[u8]> for HeapOwner {
    fn as_ref(&self) -> &[u8] {
        self.0.bytes()
    }
}
