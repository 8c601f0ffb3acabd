//! The frozen buffers that were not sent yet, by address, and the look-up of sent slices.

use std::io::IoSlice;
use std::sync::Arc;

use super::record::SiteRecord;
use crate::memory::index::AddressIndex;

/// Length in bytes of the shortest slice or buffer that is traced. Connections copy shorter ones.
pub const SHORTEST: usize = 4096;

/// The unsent buffers of all allocators, because a connection does not know the allocators. A buffer is removed when it is
/// first sent, so that its other slices cost almost nothing, or when it is freed.
static UNSENT: AddressIndex<Arc<SiteRecord>> = AddressIndex::new();

/// Reports that `bytes` were sent. If they lie in a frozen buffer of a [`SiteAllocator`](super::SiteAllocator), the site of
/// the buffer counts as sending. Programs with their own transport call this. Connections of tonic-rdma report by
/// themselves.
///
/// The call costs one relaxed load while no frozen buffer is unsent, three loads for an address below or above all such
/// buffers, and a short lock otherwise.
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

/// Reports that the first `taken` bytes of `slices` were sent.
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

/// Adds a frozen buffer of the site of `record`. The caller keeps the buffer in place until it calls [`remove`].
pub(super) fn insert(bytes: &[u8], record: Arc<SiteRecord>) {
    UNSENT.insert(bytes.as_ptr() as usize, bytes.len(), record);
}

/// Removes the buffer at `start`. The caller does this before it frees the buffer.
pub(super) fn remove(start: *const u8) {
    drop(UNSENT.remove(start as usize));
}

/// Counts the unsent buffer that `bytes` lie in as sent.
fn look_up(bytes: &[u8]) {
    if let Some(record) = UNSENT.take(bytes.as_ptr() as usize, bytes.len()) {
        record.sent();
    }
}
