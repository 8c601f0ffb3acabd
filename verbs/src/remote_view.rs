//! Views: memory of a peer that this process has mapped for reading.

use std::fmt::{self, Debug};
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Acquire};

use super::copy::{copy_to_read, for_each_chunk};
use super::host_memory::aligned;
use super::{VerbsError, VerbsErrorKind};

/// Memory of a peer that this process has mapped for reading
/// ([`LocalQueuePair::view`](super::LocalQueuePair::view)). A read of the memory costs one load: it takes no
/// request, no completion and no work of the peer. Clones share one mapping.
///
/// The peer may change the bytes at any time, so they are copied. A copy that is made while the peer writes
/// may have old and new bytes. The mapping stays as long as the view, so all calls are safe after the peer
/// took the memory back, or died. The bytes are then old, or are what the peer uses the memory for now.
#[derive(Clone)]
pub struct RemoteView {
    base: NonNull<u8>,
    length: usize,
    owner: Arc<dyn ViewOwner>,
}

/// The owner of a view's mapping.
pub(crate) trait ViewOwner: Debug + Send + Sync {
    /// Returns whether the peer still gives the right to read the memory, and is there. If the peer took the
    /// right back, and stored new bytes that this thread has read before this call, then this function
    /// returns false.
    fn is_current(&self) -> bool;
}

// SAFETY: the memory is reached only by `copy_bytes` and atomics, which are sound from any thread; the owner
// is `Send` and `Sync`.
unsafe impl Send for RemoteView {}
// SAFETY: the reasons for `Send` hold for `Sync`.
unsafe impl Sync for RemoteView {}

impl RemoteView {
    /// Makes a view of `length` bytes at `base`.
    ///
    /// # Safety
    /// - `base` must be valid for reads of `length` bytes as long as `owner` lives; and
    /// - no reference to the bytes may exist.
    pub(crate) unsafe fn new(base: NonNull<u8>, length: usize, owner: Arc<dyn ViewOwner>) -> Self {
        Self { base, length, owner }
    }

    /// Returns the length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.length
    }

    /// Returns whether there are no bytes.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Returns whether the peer's right is still valid: the peer has not taken the memory back, its queue
    /// pair is in use, and its process lives. If this function returns true after a copy, then no copied byte
    /// was stored after the peer took the memory back.
    pub fn is_current(&self) -> bool {
        self.owner.is_current()
    }

    /// Loads the 8 bytes at `offset` at once, with acquire semantics. If the peer stored these bytes with
    /// release semantics, then this thread also sees the earlier stores of that thread of the peer.
    ///
    /// # Errors
    /// The bytes do not lie within the view, or their address is not a multiple of 8.
    #[inline]
    pub fn load_u64(&self, offset: usize) -> Result<u64, VerbsError> {
        let word = aligned(self.at(offset, size_of::<AtomicU64>())?, offset)?;
        // SAFETY:
        // - `at` checked that the word lies in the view, which is valid for reads as long as `self` lives;
        // - the word is aligned, as `aligned` checked; and
        // - an atomic may be changed at any time, also by other processes. This code only loads.
        let word = unsafe { &*word };
        // SYNC: pairs with `HostMemory::store_u64` of the owner.
        Ok(word.load(Acquire))
    }

    /// Copies from `offset` into all of `destination`.
    ///
    /// # Errors
    /// There are not enough bytes after `offset`. Nothing was copied.
    #[inline]
    pub fn copy_out(&self, offset: usize, destination: &mut [u8]) -> Result<(), VerbsError> {
        let from = self.at(offset, destination.len())?;
        // SAFETY:
        // - `at` checked that the source lies in the view, which is valid for reads;
        // - the peer may write to the source at the same time, as `copy_bytes` allows; and
        // - `destination` belongs to the caller alone, so it is not a part of the view, to which no reference
        //   exists.
        unsafe { copy_to_read(from, destination.as_mut_ptr(), destination.len()) };
        Ok(())
    }

    /// Passes the bytes of `range` to `then` in consecutive chunks, through a small buffer that stays in the
    /// processor's cache. Every chunk but the last has a multiple of 64 bytes. The first byte of each chunk
    /// is aligned to 64 bytes.
    ///
    /// # Errors
    /// The range is not within the view. `then` was not called.
    pub fn for_each_chunk(&self, range: Range<usize>, then: impl FnMut(&[u8])) -> Result<(), VerbsError> {
        let length = range.end.saturating_sub(range.start);
        let from = self.at(range.start, length)?;
        // SAFETY: `at` checked that the source lies in the view, which is valid for reads. The peer may write
        // to the source at the same time, as `for_each_chunk` allows.
        unsafe { for_each_chunk(from, length, then) };
        Ok(())
    }

    #[inline]
    fn at(&self, offset: usize, length: usize) -> Result<*const u8, VerbsError> {
        VerbsError::check_bounds(offset, length, self.length)?;
        Ok(self.base.as_ptr().cast_const().wrapping_add(offset))
    }
}

impl Debug for RemoteView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RemoteView({:p}, {} bytes)", self.base, self.length)
    }
}

/// The reason why there is no view of memory of a peer. It is not a [`VerbsError`] inside the crate, because
/// many READs find no view, and a `VerbsError` costs an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoView {
    /// This device maps no memory of this peer: it is a network card, or the peer's process belongs to
    /// another user, or the peer gives no right to read.
    Never,
    /// The memory is not mapped yet. The first READ of it makes the peer offer it, and some milliseconds
    /// later it is mapped. The bounds on mapped memory may delay that.
    NotYet,
    /// The key is not valid: the peer has taken the memory back, or the bytes do not lie within it.
    Revoked,
}

impl From<NoView> for VerbsError {
    fn from(reason: NoView) -> Self {
        match reason {
            NoView::Never => {
                Self::new(VerbsErrorKind::Unsupported, "this device maps no memory of this peer")
            }
            NoView::NotYet => Self::new(VerbsErrorKind::NotMapped, "the peer's memory is not mapped yet"),
            NoView::Revoked => Self::new(VerbsErrorKind::Revoked, "the peer has taken the memory back"),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;
    use crate::HostMemory;

    #[derive(Debug)]
    struct HeldMemory(HostMemory);

    impl ViewOwner for HeldMemory {
        fn is_current(&self) -> bool {
            true
        }
    }

    /// Returns a view of this process's own memory, with the numbers of the bytes as content.
    fn view(length: usize) -> (RemoteView, Arc<HeldMemory>) {
        let memory = HostMemory::shared(length, 4096).unwrap();
        let content: Vec<u8> = (0..length).map(|at| (at % 251) as u8).collect();
        memory.copy_in(0, &content).unwrap();
        let held = Arc::new(HeldMemory(memory));
        // SAFETY: the owner keeps the memory alive, and lends no reference to it.
        let view =
            unsafe { RemoteView::new(held.0.as_ptr(), length, Arc::clone(&held) as Arc<dyn ViewOwner>) };
        (view, held)
    }

    #[test]
    fn words_and_bytes_come_from_their_offset() {
        let (view, held) = view(4096);
        held.0.store_u64(4088, 77).unwrap();
        assert_eq!((view.load_u64(4088), view.len(), view.is_empty()), (Ok(77), 4096, false));
        let mut bytes = [0; 5];
        view.copy_out(1000, &mut bytes).unwrap();
        assert_eq!(bytes, [247, 248, 249, 250, 0]);
    }

    #[test]
    fn bytes_outside_and_misaligned_words_are_refused() {
        let (view, _held) = view(4096);
        for offset in [4089, 4096, usize::MAX, usize::MAX - 7] {
            let beyond = VerbsError::out_of_bounds(offset, 8, 4096);
            assert_eq!(view.load_u64(offset), Err(beyond.clone()));
            assert_eq!(view.copy_out(offset, &mut [0; 8]), Err(beyond));
        }
        assert_eq!(view.load_u64(12), Err(VerbsError::misaligned(12)));
        let beyond = VerbsError::out_of_bounds(4000, 97, 4096);
        assert_eq!(view.for_each_chunk(4000..4097, |_| panic!("called")), Err(beyond));
    }

    #[test]
    fn chunks_are_consecutive_and_aligned() {
        let (view, _held) = view(1 << 16);
        for range in [0..0, 5..6, 3..8192, 100..8292, 100..8293, 7..(1 << 16)] {
            let mut all = Vec::new();
            let mut short = 0;
            view.for_each_chunk(range.clone(), |chunk| {
                assert!(chunk.as_ptr().cast::<[u64; 8]>().addr().is_multiple_of(64) && !chunk.is_empty());
                assert_eq!(short, 0, "only the last chunk is short");
                short = chunk.len() % 64;
                all.extend_from_slice(chunk);
            })
            .unwrap();
            let expected: Vec<u8> = range.map(|at| (at % 251) as u8).collect();
            assert!(all == expected);
        }
    }
}
