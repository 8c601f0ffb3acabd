//! What users create in a protection domain.

use std::ops::Range;
use std::sync::Arc;

use super::device::list::Transport;
use super::domain::{DeviceRegion, Domain, Region};
use super::queue_pair::Pair;
use super::shared_receive_queue::SharedQueue;
use crate::{
    Access, CompletionQueue, DeviceMemoryRegion, DmaBuf, HostMemory, MemoryRegion, ProtectionDomain,
    QueuePair, QueuePairCapacity, SharedReceiveQueue, VerbsError,
};

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
        self.device().transport == Transport::Iwarp
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
