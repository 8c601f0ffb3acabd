//! Protection domains, and the memory that is registered in them.

pub(crate) mod device_memory;
pub(crate) mod memory_region;

use std::ptr::NonNull;
use std::sync::Arc;

use ibverbs_sys as sys;

use super::device::Device;
use super::library::{check, last_error};
use crate::VerbsError;

/// A protection domain.
#[derive(Debug)]
pub(crate) struct Domain {
    me: std::sync::Weak<Domain>,
    device: Arc<Device>,
    domain: NonNull<sys::ibv_pd>,
}

// SAFETY: libibverbs is thread-safe, and all else here is Send and Sync itself.
unsafe impl Send for Domain {}
// SAFETY: the reasons for `Send` hold for `Sync`.
unsafe impl Sync for Domain {}

impl Domain {
    pub(crate) fn alloc(device: Arc<Device>) -> Result<Arc<Self>, VerbsError> {
        // SAFETY: the context is open.
        let domain = unsafe { (device.library().alloc_pd)(device.context()) };
        let domain = NonNull::new(domain).ok_or_else(|| last_error("allocating a protection domain"))?;
        Ok(Arc::new_cyclic(|me| Self { me: me.clone(), device, domain }))
    }

    pub(crate) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub(crate) fn as_ptr(&self) -> *mut sys::ibv_pd {
        self.domain.as_ptr()
    }

    pub(crate) fn strong(&self) -> Result<Arc<Self>, VerbsError> {
        self.me.upgrade().ok_or(VerbsError::Foreign("protection domain"))
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: regions and queue pairs hold a reference to their domain, so none is left.
        let result = unsafe { (self.device.library().dealloc_pd)(self.domain.as_ptr()) };
        if let Err(error) = check("freeing a protection domain", result) {
            tracing::warn!(%error, "an object of the device can't be given back");
        }
    }
}
