//! The handle that a user holds on a protection domain.

use std::ops::Range;
use std::sync::Arc;

use super::completion_queue::Queue;
use super::device::Device;
use super::domain::Domain;
use super::queue_pair;
use super::region::Region;
use crate::{
    Access, CompletionQueue, HostMemory, MemoryRegion, ProtectionDomain, QueuePair, QueuePairCapacity,
    VerbsError,
};

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

    fn create_queue_pair(
        &self,
        send_queue: &Arc<dyn CompletionQueue>,
        receive_queue: &Arc<dyn CompletionQueue>,
        capacity: &QueuePairCapacity,
    ) -> Result<Arc<dyn QueuePair>, VerbsError> {
        let send_queue = Queue::of(send_queue, self.0.device())?;
        let receive_queue = Queue::of(receive_queue, self.0.device())?;
        queue_pair::create(&self.0, send_queue, receive_queue, capacity)
    }
}
