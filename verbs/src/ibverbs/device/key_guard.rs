//! A workaround for soft-iWARP.
//!
//! The kernel names each queue that a program maps by a *key*: the offset in the device's file, from 0 on, at the
//! lowest gap that fits. To libsiw, the driver's half in libibverbs, the key `0x90000` means that there is no key
//! (`SIW_INVAL_UOBJ_KEY` in rdma/siw-abi.h). So an object that gets this key can't be created. The next object gets
//! this key again, so no later object can be created either. With queue pairs of two pages this happens after some
//! seventy of them. (rdma-core 44 to 65.)

use ibverbs_sys as sys;

use super::raw_context::RawContext;
use crate::VerbsError;
use crate::ibverbs::library::{Owned, last_error};

/// `vendor_id` of soft-iWARP.
const SOFT_IWARP: u32 = 0x62_6d74;
/// Entries of a completion queue that reaches beyond the bad key; an entry has 32 bytes.
const ENTRIES: i32 = 0x90000 / 32 + 1;

/// Creates an unused completion queue that occupies the bad key. It must be dropped before the device is closed. Call this for a
/// device that was just opened, so that its objects have the first keys. Returns `None` for other drivers.
pub(super) fn guard_key(raw: &RawContext, vendor: u32) -> Result<Option<Owned<sys::ibv_cq>>, VerbsError> {
    if vendor != SOFT_IWARP {
        return Ok(None);
    }
    let nothing = std::ptr::null_mut();
    // SAFETY: the context is open, and no code uses the queue, which the caller drops before the context.
    let queue = unsafe {
        let queue = (raw.library.create_cq)(raw.context.as_ptr(), ENTRIES, nothing, std::ptr::null_mut(), 0);
        Owned::new(queue, raw.library.destroy_cq, "destroying the completion queue that keeps a bad key")
    };
    let error = || last_error("creating the completion queue that keeps a bad key from others");
    queue.map(Some).ok_or_else(error)
}
