//! Opening a device, and what its users create from it.

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, Weak};

use super::completion_queue::Queue;
use super::device::options::OpenOptions;
use super::device::{Device, async_events};
use super::domain::Domain;
use crate::sync::lock;
use crate::{CompletionQueue, Context, DeviceAttributes, ProtectionDomain, VerbsError};

/// Devices that are in use. Opening a device again with equal options returns the open one.
static OPENED: Mutex<Vec<Weak<Device>>> = Mutex::new(Vec::new());

/// Opens a device, or returns the open one: a process has one device per [`OpenOptions`]. The device closes when none
/// of its objects is in use.
///
/// ```no_run
/// use tonic_rdma_verbs::ibverbs::{OpenOptions, open};
///
/// let device = open(&OpenOptions::new())?;
/// println!("{}", device.attributes().name);
/// # Ok::<(), tonic_rdma_verbs::VerbsError>(())
/// ```
///
/// # Errors
/// - [`Library`](VerbsError::Library) if libibverbs is not installed.
/// - [`NotFound`](VerbsError::NotFound) if the device, port or GID index does not exist; the error names those that
///   do.
/// - [`Unusable`](VerbsError::Unusable) if the port is down, or no device has an active port.
/// - [`Limit`](VerbsError::Limit) if the MTU is not one of the five.
/// - [`Os`](VerbsError::Os) if the kernel refuses.
pub fn open(options: &OpenOptions) -> Result<Arc<dyn Context>, VerbsError> {
    let mut opened = lock(&OPENED);
    opened.retain(|device| device.strong_count() > 0);
    let in_use = |device: &Arc<Device>| device.options == *options && !device.is_removed();
    if let Some(device) = opened.iter().filter_map(Weak::upgrade).find(in_use) {
        return Ok(device);
    }
    let device = Device::open(options)?;
    opened.push(Arc::downgrade(&device));
    Ok(device)
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
        async_events::handle(self);
    }
}
