//! Frozen buffers that were not sent yet, by address, and the look-up of what is sent.

use std::io::IoSlice;
use std::sync::Arc;

use super::record::Record;
use crate::memory::index::Index;

/// Slices and buffers below are not looked at, in bytes: connections gather them by copying.
pub const SHORTEST: usize = 4096;

/// Those of all allocators: a connection does not know which there are. A buffer leaves it when it is first sent, so
/// that its other slices cost next to nothing, or when it is freed.
static UNSENT: Index<Arc<Record>> = Index::new();

/// Says that `bytes` were sent, or a part of them; if they lie in a buffer of a
/// [`SiteAllocator`](super::SiteAllocator), its site has sent. For transports of a program's own: the connections of
/// this crate do so by themselves.
///
/// Costs one relaxed load while every frozen buffer has been sent (or there is none), three for an address that none
/// can have, and a short lock otherwise.
#[inline]
pub fn sent(bytes: &[u8]) {
    if bytes.len() >= SHORTEST && UNSENT.len() > 0 {
        look_up(bytes);
    }
}

/// Says that the first `taken` bytes of `slices` were sent.
#[inline]
pub(crate) fn sent_slices(slices: &[IoSlice<'_>], mut taken: usize) {
    if taken < SHORTEST || UNSENT.len() == 0 {
        return;
    }
    for slice in slices {
        let part = slice.len().min(taken);
        sent(&slice[..part]);
        taken -= part;
        if taken == 0 {
            break;
        }
    }
}

/// A buffer of `record`'s site was frozen; as long as it is among the unsent, the caller keeps it where it is.
pub(super) fn insert(bytes: &[u8], record: Arc<Record>) {
    UNSENT.insert(bytes.as_ptr() as usize, bytes.len(), record);
}

/// The buffer at `start` is about to be freed.
pub(super) fn remove(start: *const u8) {
    drop(UNSENT.remove(start as usize));
}

fn look_up(bytes: &[u8]) {
    if let Some(record) = UNSENT.take(bytes.as_ptr() as usize, bytes.len()) {
        record.sent();
    }
}
