//! Frozen buffers that were not sent yet, by address, and the look-up of what is sent.

use std::io::IoSlice;
use std::sync::Arc;

use super::record::SiteRecord;
use crate::memory::index::AddressIndex;

/// Length, in bytes, below which slices and buffers are not looked at: connections gather these by copying.
pub const SHORTEST: usize = 4096;

/// Those of all allocators: a connection does not know which there are. A buffer leaves it when it is first sent, so
/// that its other slices cost next to nothing, or when it is freed.
static UNSENT: AddressIndex<Arc<SiteRecord>> = AddressIndex::new();

/// Reports that `bytes` were sent. If they lie in a frozen buffer of a [`SiteAllocator`](super::SiteAllocator), its site
/// counts as one that sends. This is for transports of a program's own: connections of this crate report by themselves.
///
/// It costs one relaxed load while no frozen buffer is unsent, three loads for an address that no such buffer can have, and
/// a short lock otherwise.
///
/// ```
/// use tonic_rdma_verbs::memory::Pool;
/// use tonic_rdma_verbs::memory::sites::{SiteAllocator, SiteSettings, sent};
///
/// let sites = SiteAllocator::new(Pool::for_sending(1 << 30), SiteSettings::default());
/// let payload = sites.allocate(1 << 20).freeze();
/// // A transport of your own has written the first half:
/// sent(&payload[..1 << 19]);
/// assert_eq!(sites.report().sites[0].sent, 1);
/// ```
#[inline]
pub fn sent(bytes: &[u8]) {
    if bytes.len() >= SHORTEST && UNSENT.len() > 0 {
        look_up(bytes);
    }
}

/// Says that the first `taken` bytes of `slices` were sent.
#[inline]
pub fn sent_slices(slices: &[IoSlice<'_>], mut taken: usize) {
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
pub(super) fn insert(bytes: &[u8], record: Arc<SiteRecord>) {
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
