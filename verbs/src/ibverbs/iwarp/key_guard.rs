//! What soft-iWARP needs that other devices don't.
//!
//! The kernel names each queue that a program is to map by a *key*: the offset in the device's file, from 0 on, where the
//! lowest gap that fits is. To libsiw, the driver's half in libibverbs, `0x90000` means that there is no key
//! (`SIW_INVAL_UOBJ_KEY` in rdma/siw-abi.h): whatever is given that one can't be created, and as it is given the same key
//! again, nor can anything after it. With queue pairs of two pages that is after some seventy of them. (rdma-core 44 to 65.)

use std::ptr::NonNull;

use ibverbs_sys as sys;

use crate::VerbsError;
use crate::ibverbs::device::raw_context::RawContext;
use crate::ibverbs::library::Library;
use crate::ibverbs::library::last_error;

/// `vendor_id` of soft-iWARP.
const SOFT_IWARP: u32 = 0x62_6d74;
/// A completion queue of so many entries, 32 bytes each, reaches beyond the bad key.
const ENTRIES: i32 = 0x90000 / 32 + 1;

/// A completion queue that nobody uses, over the key that must not be given to anything. To be dropped before the device
/// is closed.
#[derive(Debug)]
pub(crate) struct KeyGuard {
    library: &'static Library,
    queue: NonNull<sys::ibv_cq>,
}

// SAFETY: libibverbs is thread-safe, and the queue is only ever destroyed.
unsafe impl Send for KeyGuard {}
// SAFETY: as above.
unsafe impl Sync for KeyGuard {}

impl KeyGuard {
    /// Guards a device that was just opened, so that what is created has the first keys; nothing if it has another driver.
    pub(crate) fn new(raw: &RawContext, vendor: u32) -> Result<Option<Self>, VerbsError> {
        if vendor != SOFT_IWARP {
            return Ok(None);
        }
        let nothing = std::ptr::null_mut();
        // SAFETY: the context is open.
        let queue = unsafe {
            (raw.library.create_cq)(raw.context.as_ptr(), ENTRIES, nothing, std::ptr::null_mut(), 0)
        };
        let queue = NonNull::new(queue)
            .ok_or_else(|| last_error("creating the completion queue that keeps a bad key from others"))?;
        Ok(Some(Self { library: raw.library, queue }))
    }
}

impl Drop for KeyGuard {
    fn drop(&mut self) {
        // SAFETY: the queue is used by nobody, and its context still open.
        let _ = unsafe { (self.library.destroy_cq)(self.queue.as_ptr()) };
    }
}
