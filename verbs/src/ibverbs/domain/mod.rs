//! Protection domains.

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use ibverbs_sys as sys;

use super::device::Device;
use super::device_memory::DeviceRegion;
use super::library::{check, last_error};
use super::memory_region::Region;
use super::port::RawContext;
use super::queue_pair::Pair;
use super::shared_receive_queue::SharedQueue;
use crate::{
    Access, CompletionQueue, DeviceMemoryRegion, DmaBuf, HostMemory, MemoryRegion, ProtectionDomain,
    QueuePair, QueuePairCapacity, SharedReceiveQueue, VerbsError,
};

/// A protection domain.
#[derive(Debug)]
pub(super) struct Domain {
    me: std::sync::Weak<Domain>,
    device: Arc<Device>,
    domain: NonNull<sys::ibv_pd>,
}

// SAFETY: libibverbs is thread-safe, and all else here is Send and Sync itself.
unsafe impl Send for Domain {}
// SAFETY: as above.
unsafe impl Sync for Domain {}

impl Domain {
    pub(super) fn alloc(device: Arc<Device>) -> Result<Arc<Self>, VerbsError> {
        // SAFETY: the context is open.
        let domain = unsafe { (device.library().alloc_pd)(device.context()) };
        let domain = NonNull::new(domain).ok_or_else(|| last_error("allocating a protection domain"))?;
        Ok(Arc::new_cyclic(|me| Self { me: me.clone(), device, domain }))
    }

    pub(super) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub(super) fn as_ptr(&self) -> *mut sys::ibv_pd {
        self.domain.as_ptr()
    }

    fn strong(&self) -> Result<Arc<Self>, VerbsError> {
        self.me.upgrade().ok_or(VerbsError::Foreign("protection domain"))
    }
}

impl ProtectionDomain for Domain {
    fn register_range(
        &self,
        memory: Arc<HostMemory>,
        range: Range<usize>,
        access: Access,
    ) -> Result<Arc<dyn MemoryRegion>, VerbsError> {
        Ok(Arc::new(Region::register(self.strong()?, memory, range, access)?))
    }

    fn register_dmabuf(
        &self,
        memory: &DmaBuf<'_>,
        access: Access,
    ) -> Result<Arc<dyn DeviceMemoryRegion>, VerbsError> {
        Ok(Arc::new(DeviceRegion::register(self.strong()?, memory, access)?))
    }

    fn create_queue_pair(
        &self,
        send_queue: &Arc<dyn CompletionQueue>,
        receive_queue: &Arc<dyn CompletionQueue>,
        capacity: &QueuePairCapacity,
    ) -> Result<Arc<dyn QueuePair>, VerbsError> {
        Ok(Arc::new(Pair::create(self.strong()?, send_queue, receive_queue, None, capacity)?))
    }

    fn create_shared_receive_queue(
        &self,
        capacity: u32,
        segments: u32,
    ) -> Result<Arc<dyn SharedReceiveQueue>, VerbsError> {
        Ok(Arc::new(SharedQueue::create(self.strong()?, capacity, segments)?))
    }

    fn create_sharing_queue_pair(
        &self,
        send_queue: &Arc<dyn CompletionQueue>,
        receive_queue: &Arc<dyn CompletionQueue>,
        receives: &Arc<dyn SharedReceiveQueue>,
        capacity: &QueuePairCapacity,
    ) -> Result<Arc<dyn QueuePair>, VerbsError> {
        let none = QueuePairCapacity { receive_requests: 0, receive_segments: 0, ..capacity.clone() };
        Ok(Arc::new(Pair::create(self.strong()?, send_queue, receive_queue, Some(receives), &none)?))
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

/// Most inline bytes of a queue pair. Devices have no attribute for it; so it is found by creating queue pairs that ask
/// for less and less.
pub(super) fn probe_inline(raw: &RawContext) -> u32 {
    const MOST: u32 = 8192;
    let library = raw.library;
    // SAFETY:
    // - the context is open,
    // - each object is created from ones that are alive, and destroyed once, in the opposite order, and
    // - none of them is known to anybody else.
    unsafe {
        let domain = (library.alloc_pd)(raw.context.as_ptr());
        if domain.is_null() {
            return 0;
        }
        let no_channel = std::ptr::null_mut();
        let queue = (library.create_cq)(raw.context.as_ptr(), 1, std::ptr::null_mut(), no_channel, 0);
        let mut granted = 0;
        if !queue.is_null() {
            let mut asked = MOST;
            while asked > 0 {
                let mut attributes = sys::ibv_qp_init_attr {
                    send_cq: queue,
                    recv_cq: queue,
                    qp_type: sys::ibv_qp_type::IBV_QPT_RC,
                    cap: sys::ibv_qp_cap {
                        max_send_wr: 1,
                        max_recv_wr: 1,
                        max_send_sge: 1,
                        max_recv_sge: 1,
                        max_inline_data: asked,
                    },
                    ..Default::default()
                };
                let pair = (library.create_qp)(domain, &raw mut attributes);
                if !pair.is_null() {
                    granted = attributes.cap.max_inline_data;
                    let _ = (library.destroy_qp)(pair);
                    break;
                }
                asked /= 2;
            }
            let _ = (library.destroy_cq)(queue);
        }
        let _ = (library.dealloc_pd)(domain);
        granted
    }
}
