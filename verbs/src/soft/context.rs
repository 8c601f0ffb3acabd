//! Opening the device, and the objects that users create from it.

use std::ops::Range;
use std::sync::{Arc, Mutex, Weak};

use super::completion_queue::Queue;
use super::device::Device;
use super::domain::{Domain, Region};
use super::queue_pair;
use crate::counting;
use crate::panics::lock;
use crate::{
    Access, CompletionQueue, Context, DeviceAttributes, HostMemory, MemoryRegion, ProtectionDomain,
    QueuePair, QueuePairCapacity, VerbsError,
};

static CURRENT: Mutex<Weak<Device>> = Mutex::new(Weak::new());

/// Opens the software device. A process has one device; it closes when none of its objects is in use.
///
/// ```
/// use tonic_rdma_verbs::soft;
///
/// let device = soft::open()?;
/// assert_eq!(device.attributes().name, soft::NAME);
/// # Ok::<(), tonic_rdma_verbs::VerbsError>(())
/// ```
///
/// # Errors
/// [`System`](crate::VerbsErrorKind::System) if the system has no descriptor, memory or thread left for the
/// device.
pub fn open() -> Result<Arc<dyn Context>, VerbsError> {
    let mut current = lock(&CURRENT);
    let device = match current.upgrade() {
        // A forked child must not use the device of its parent.
        Some(device) if !device.is_forked() => device,
        _ => {
            let device = Device::new()?;
            *current = Arc::downgrade(&device);
            device
        }
    };
    Ok(counting::if_asked(device))
}

/// Returns the device that is open now.
#[cfg(any(test, fuzzing))]
pub(super) fn current() -> Option<Arc<Device>> {
    lock(&CURRENT).upgrade()
}

/// All callers of [`open`] in a process get one device, so a comparison of addresses finds their contexts
/// equal.
impl crate::sealed::Sealed for Device {}

impl Context for Device {
    fn attributes(&self) -> &DeviceAttributes {
        &self.attributes
    }

    fn alloc_protection_domain(&self) -> Result<Arc<dyn ProtectionDomain>, VerbsError> {
        self.check_process()?;
        Ok(DomainHandle::alloc(&self.shared()))
    }

    fn create_completion_queue(&self, capacity: u32) -> Result<Arc<dyn CompletionQueue>, VerbsError> {
        self.check_process()?;
        Ok(Arc::new(Queue::new(&self.shared(), capacity)?))
    }
}

/// The user's reference to a domain.
#[derive(Debug)]
pub(super) struct DomainHandle(Arc<Domain>);

impl DomainHandle {
    /// Allocates a domain of `device`.
    pub(super) fn alloc(device: &Arc<Device>) -> Arc<Self> {
        Arc::new(Self(Arc::new(Domain::new(device))))
    }
}

impl crate::sealed::Sealed for DomainHandle {}

impl ProtectionDomain for DomainHandle {
    fn register_range(
        &self,
        memory: Arc<HostMemory>,
        range: Range<usize>,
        access: Access,
    ) -> Result<Arc<dyn MemoryRegion>, VerbsError> {
        Ok(Arc::new(Region::register(&self.0, memory, range, access)?))
    }

    fn is_read_by_cores(&self) -> bool {
        true
    }

    fn create_queue_pair(
        &self,
        send_queue: &Arc<dyn CompletionQueue>,
        receive_queue: &Arc<dyn CompletionQueue>,
        capacity: &QueuePairCapacity,
    ) -> Result<Arc<dyn QueuePair>, VerbsError> {
        let send_queue = Queue::of(send_queue, &self.0.device)?;
        let receive_queue = Queue::of(receive_queue, &self.0.device)?;
        queue_pair::create(&self.0, send_queue, receive_queue, capacity)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    /// Connections of one device share completion queues. They recognise the device by its address.
    #[test]
    fn all_callers_open_one_device() {
        let (first, second) = (open().unwrap(), open().unwrap());
        let queue = first.create_completion_queue(1).unwrap();
        assert!(std::ptr::addr_eq(Arc::as_ptr(&first), Arc::as_ptr(&second)));
        drop((first, second));
        let third = open().unwrap();
        assert!(std::ptr::addr_eq(Arc::as_ptr(&third), Arc::as_ptr(&current().unwrap())));
        drop(queue);
    }
}
