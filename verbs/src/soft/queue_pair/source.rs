//! The local bytes of a request: segments of registered memory, or slices that the caller lends.

use crate::soft::domain::Domain;
use crate::{Access, LocalSegment, Payload, copy_bytes, copy_for_peer, copy_past_caches};

/// Bytes of a word. A transfer that is placed in order stores its last word at once, after all its other
/// bytes.
pub(super) const WORD: u64 = size_of::<u64>() as u64;

impl Payload<'_> {
    /// Returns whether all segments may be read.
    #[inline]
    pub(super) fn is_registered(&self, domain: &Domain) -> bool {
        match self {
            Self::Registered(segments) => are_registered(segments, domain, Access::LOCAL_READ),
            Self::Inline(_) => true,
        }
    }

    /// Copies `length` bytes from `offset` on to `to`, in the ring.
    ///
    /// # Safety
    /// - `to` must be valid for writing `length` bytes, which no reference covers.
    /// - There must be `length` bytes from `offset` on, and [`is_registered`](Self::is_registered) must have
    ///   returned true since the locks of the queue pair were taken.
    #[inline]
    pub(super) unsafe fn copy_out(&self, offset: u64, length: u64, to: *mut u8) {
        let one = match self {
            Self::Inline([slice]) => slice.as_ptr(),
            Self::Registered([segment]) => segment.address() as *const u8,
            // SAFETY: the contract is the same.
            _ => return unsafe { self.copy_parts_out(offset, length, to) },
        };
        // SAFETY: as in `copy_parts_out`; the one part has all bytes.
        unsafe { copy_for_peer(one.wrapping_add(offset as usize), to, length as usize) };
    }

    /// Copies `length` bytes from `offset` on to `to`, from several slices or segments.
    ///
    /// # Safety
    /// Those of [`copy_out`](Self::copy_out).
    unsafe fn copy_parts_out(&self, offset: u64, length: u64, to: *mut u8) {
        let (mut skip, mut left, mut to) = (offset, length, to);
        let mut copy = |from: *const u8, available: u64| {
            let from = from.wrapping_add(skip.min(available) as usize);
            let count = (available - skip.min(available)).min(left);
            skip -= skip.min(available);
            // SAFETY:
            // - the source lies in a slice that the caller lent, or in a segment that was found registered
            //   under the locks of the queue pair, so that it stays registered (see `Domain::remove_region`);
            //   and
            // - the destination is valid for the bytes that are left, as the caller promises.
            unsafe { copy_for_peer(from, to, count as usize) };
            to = to.wrapping_add(count as usize);
            left -= count;
            left > 0
        };
        let _ = match self {
            Self::Registered(segments) => {
                segments.iter().all(|segment| copy(segment.address() as *const u8, segment.length()))
            }
            Self::Inline(slices) => slices.iter().all(|slice| copy(slice.as_ptr(), slice.len() as u64)),
        };
    }
}

/// Returns whether the segments are registered in `domain`, with the right `access`.
pub(super) fn are_registered(segments: &[LocalSegment], domain: &Domain, access: Access) -> bool {
    segments
        .iter()
        .filter(|segment| segment.length() > 0)
        .all(|segment| domain.find_local(segment.lkey(), segment.address(), segment.length(), access))
}

/// Copies `length` bytes from `from` to the bytes of `segments` from `offset` on. If `ends_a_word`, these are
/// the last bytes of the destination, and its last word is stored last, and at once, where it is aligned.
///
/// # Safety
/// - `from` must be valid for reading `length` bytes.
/// - The segments must have `length` bytes from `offset` on, and must have been
///   [found registered](are_registered) for writing since the locks of the queue pair were taken.
pub(super) unsafe fn scatter(
    segments: &[LocalSegment],
    offset: u64,
    from: *const u8,
    length: u64,
    stores: Stores,
) {
    let (mut skip, mut left, mut from) = (offset, length, from);
    for segment in segments {
        if left == 0 {
            break;
        }
        if skip >= segment.length() {
            skip -= segment.length();
            continue;
        }
        let count = (segment.length() - skip).min(left);
        let to = (segment.address() + skip) as *mut u8;
        skip = 0;
        left -= count;
        let last = Stores { ends_a_word: stores.ends_a_word && left == 0, ..stores };
        // SAFETY: both ranges are parts of those that the caller promises.
        unsafe { store(from, to, count, last) };
        from = from.wrapping_add(count as usize);
    }
}

/// The way to store bytes at their destination.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Stores {
    /// Whether the last word is stored last, and at once.
    pub(super) ends_a_word: bool,
    /// Whether the bytes go past the caches.
    pub(super) past_caches: bool,
}

/// Copies `length` bytes.
///
/// # Safety
/// - `from` must be valid for reading `length` bytes, and `to` for writing them; the ranges must not overlap.
#[inline]
pub(super) unsafe fn store(from: *const u8, to: *mut u8, length: u64, stores: Stores) {
    let ends_a_word =
        stores.ends_a_word && length >= WORD && (to as u64).wrapping_add(length).is_multiple_of(WORD);
    let before = if ends_a_word { (length - WORD) as usize } else { length as usize };
    // SAFETY: the bytes are a part of those that the caller promises.
    unsafe {
        if stores.past_caches { copy_past_caches(from, to, before) } else { copy_bytes(from, to, before) }
    }
    if ends_a_word {
        let mut word = [0; WORD as usize];
        // SAFETY: the last word of the source; `word` is ours.
        unsafe { copy_bytes(from.wrapping_add(before), word.as_mut_ptr(), word.len()) };
        // SAFETY: the last word of the destination is aligned, as computed above.
        unsafe { store_word(to.wrapping_add(before), word) };
    }
}

/// Stores a word at once, after all earlier stores of this thread.
///
/// # Safety
/// - `to` must be valid for writing a word, and aligned to a word.
pub(super) unsafe fn store_word(to: *mut u8, word: [u8; WORD as usize]) {
    use std::sync::atomic::{AtomicU64, Ordering::Release};
    // SAFETY:
    // - `to` is valid and aligned, as the caller promises; and
    // - other threads may load the word at any time, as `HostMemory::load_u64` does.
    let last_word = unsafe { &*to.cast::<AtomicU64>() };
    // SYNC: pairs with `HostMemory::load_u64`: a thread that sees the word also sees all earlier stores.
    last_word.store(u64::from_ne_bytes(word), Release);
}
