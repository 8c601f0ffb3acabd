//! Opening a device, and what its users create from it and in its protection domains.

use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, Weak};

use super::completion_queue::Queue;
use super::device::list::Transport;
use super::device::options::OpenOptions;
use super::device::{self, Device};
use super::domain::{DeviceRegion, Domain, Region};
use super::queue_pair::VerbsPair;
use super::shared_receive_queue::SharedQueue;
use crate::counting;
use crate::panics::lock;
use crate::{
    Access, CompletionQueue, Context, DeviceAttributes, DeviceMemoryRegion, DmaBuf, HostMemory, MemoryRegion,
    ProtectionDomain, QueuePair, QueuePairCapacity, SharedReceiveQueue, VerbsError,
};

/// Devices that are in use. Opening a device again with equal options returns the open one.
static OPENED: Mutex<Vec<Weak<Device>>> = Mutex::new(Vec::new());

/// Opens a device, or returns the open one: a process has one device per [`OpenOptions`]. The device closes
/// when none of its objects is in use.
///
/// ```no_run
/// use tonic_rdma_verbs::ibverbs::{OpenOptions, open};
///
/// let device = open(&OpenOptions::default())?;
/// println!("{}", device.attributes().name);
/// # Ok::<(), tonic_rdma_verbs::VerbsError>(())
/// ```
///
/// # Errors
/// - [`NoDevice`](crate::VerbsErrorKind::NoDevice) if libibverbs is not installed.
/// - [`NoDevice`](crate::VerbsErrorKind::NoDevice) if the device, port or GID index does not exist; the error
///   names those that do.
/// - [`Unusable`](crate::VerbsErrorKind::Unusable) if the port is down, or no device has an active port.
/// - [`Limit`](crate::VerbsErrorKind::Limit) if the MTU is not one of the five.
/// - [`System`](crate::VerbsErrorKind::System) if the kernel refuses.
pub fn open(options: &OpenOptions) -> Result<Arc<dyn Context>, VerbsError> {
    let mut opened = lock(&OPENED);
    opened.retain(|device| device.strong_count() > 0);
    let in_use = |device: &Arc<Device>| device.options == *options && !device.is_removed();
    if let Some(device) = opened.iter().filter_map(Weak::upgrade).find(in_use) {
        return Ok(counting::if_asked(device));
    }
    let device = Device::open(options)?;
    opened.push(Arc::downgrade(&device));
    Ok(counting::if_asked(device))
}

impl crate::sealed::Sealed for Device {}

impl Context for Device {
    fn attributes(&self) -> &DeviceAttributes {
        &self.attributes
    }

    fn alloc_protection_domain(&self) -> Result<Arc<dyn ProtectionDomain>, VerbsError> {
        Ok(Domain::alloc(self.strong()?)?)
    }

    fn create_completion_queue(&self, capacity: u32) -> Result<Arc<dyn CompletionQueue>, VerbsError> {
        Ok(Queue::create(self.strong()?, capacity)?)
    }

    fn async_event_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.raw.async_fd())
    }

    fn handle_events(&self) {
        device::handle_events(self);
    }
}

impl crate::sealed::Sealed for Domain {}

impl ProtectionDomain for Domain {
    fn register_range(
        &self,
        memory: Arc<HostMemory>,
        range: Range<usize>,
        access: Access,
    ) -> Result<Arc<dyn MemoryRegion>, VerbsError> {
        Ok(Arc::new(Region::register(self.strong()?, memory, range, access)?))
    }

    fn opens_sinks(&self) -> bool {
        self.device.transport == Transport::Iwarp
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
        Ok(Arc::new(VerbsPair::create(self.strong()?, send_queue, receive_queue, None, capacity)?))
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
        Ok(Arc::new(VerbsPair::create(self.strong()?, send_queue, receive_queue, Some(receives), &none)?))
    }
}
