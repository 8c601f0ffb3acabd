//! An opened device and the protection domains allocated from it.

use std::fmt::Debug;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use super::{
    Access, CompletionQueue, DeviceMemoryRegion, DmaBuf, HostMemory, MemoryRegion, QueuePair,
    QueuePairCapacity, SharedReceiveQueue, VerbsError,
};

/// An opened RDMA device (`struct ibv_context`).
pub trait Context: Send + Sync + Debug + 'static {
    /// Returns what the device is and what it can do.
    fn attributes(&self) -> &DeviceAttributes;

    /// Allocates a protection domain: the scope within which keys are valid.
    fn alloc_protection_domain(&self) -> Result<Arc<dyn ProtectionDomain>, VerbsError>;

    /// Creates a completion queue that holds at least `capacity` completions.
    ///
    /// The caller must never have more signalled requests outstanding than that; a queue that overruns moves its queue pairs to
    /// Error.
    fn create_completion_queue(&self, capacity: u32) -> Result<Arc<dyn CompletionQueue>, VerbsError>;

    /// Returns the descriptor that becomes readable with an asynchronous event (IBA vol. 1, 11.6.3), which is no completion, and
    /// when the device is gone; non-blocking. `None` on a device that has no such events.
    ///
    /// A thread that waits for it calls [`handle_events`](Self::handle_events), then looks at its queue pairs.
    fn async_event_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Takes every asynchronous event that has come. Queue pairs that one concerns (port down, queue pair or completion
    /// queue failed, device removed) go to Error, and say why by [`QueuePair::failure`]. Never blocks. Some devices are
    /// removed without an event: call it about once a second besides.
    fn handle_events(&self) {}
}

/// A protection domain (`struct ibv_pd`): memory regions and queue pairs that may be used with one another.
pub trait ProtectionDomain: Send + Sync + Debug + 'static {
    /// Registers all of `memory`, as [`register_range`](Self::register_range) does a part.
    ///
    /// # Errors
    /// As there.
    fn register(&self, memory: Arc<HostMemory>, access: Access) -> Result<Arc<dyn MemoryRegion>, VerbsError> {
        let all = 0..memory.len();
        self.register_range(memory, all, access)
    }

    /// Registers the bytes `range` of `memory` for use by this domain's queue pairs, and by their peers as far as `access`
    /// says. Its bounds are exact to the byte, and nothing else of the memory can be reached by its keys. Regions of one
    /// memory may overlap, each with rights of its own.
    ///
    /// The region keeps the memory alive; dropping the last reference to the region deregisters it, which waits
    /// (microseconds) for operations of peers that are in the middle of it.
    ///
    /// # Errors
    /// - [`Unusable`](VerbsError::Unusable) if the range is empty, or not within the memory.
    /// - [`Limit`](VerbsError::Limit) or [`Os`](VerbsError::Os) if the device can register no more.
    fn register_range(
        &self,
        memory: Arc<HostMemory>,
        range: Range<usize>,
        access: Access,
    ) -> Result<Arc<dyn MemoryRegion>, VerbsError>;

    /// Registers memory of another device, such as a GPU's, by its dmabuf, for use as [`register_range`](Self::register_range)
    /// says of host memory. The region does not need the descriptor any more.
    ///
    /// No device that can do it has been tried yet.
    ///
    /// # Errors
    /// - [`Unsupported`](VerbsError::Unsupported) where the device, its driver or the installed libibverbs has no such
    ///   thing; the software device and the kernel's software ones have not.
    /// - [`Unusable`](VerbsError::Unusable) if the descriptor is no dmabuf, or what is to be registered of it can't be.
    /// - [`Os`](VerbsError::Os) if the system refuses.
    fn register_dmabuf(
        &self,
        memory: &DmaBuf<'_>,
        access: Access,
    ) -> Result<Arc<dyn DeviceMemoryRegion>, VerbsError> {
        let _ = (memory, access);
        Err(VerbsError::Unsupported("dmabuf registration"))
    }

    /// Creates an RC queue pair in Reset. The completion queues must come from the same context.
    fn create_queue_pair(
        &self,
        send_queue: &Arc<dyn CompletionQueue>,
        receive_queue: &Arc<dyn CompletionQueue>,
        capacity: &QueuePairCapacity,
    ) -> Result<Arc<dyn QueuePair>, VerbsError>;

    /// Creates a shared receive queue for `capacity` receives of up to `segments` segments each.
    ///
    /// # Errors
    /// [`Unsupported`](VerbsError::Unsupported) where the device has none
    /// ([`max_shared_receive_queues`](DeviceAttributes::max_shared_receive_queues)).
    fn create_shared_receive_queue(
        &self,
        capacity: u32,
        segments: u32,
    ) -> Result<Arc<dyn SharedReceiveQueue>, VerbsError> {
        let _ = (capacity, segments);
        Err(VerbsError::Unsupported("shared receive queue"))
    }

    /// Creates a queue pair as [`create_queue_pair`](Self::create_queue_pair) does, with receives from `receives`; none can be
    /// posted to the queue pair itself, and what `capacity` says of them does not count.
    ///
    /// The shared queue may be of another domain. A device that looks its buffers' keys up in that domain takes them;
    /// Soft-RoCE looks in the queue pair's, so that a message ends in
    /// [`LocalProtection`](super::CompletionStatus::LocalProtection) or the like.
    fn create_sharing_queue_pair(
        &self,
        send_queue: &Arc<dyn CompletionQueue>,
        receive_queue: &Arc<dyn CompletionQueue>,
        receives: &Arc<dyn SharedReceiveQueue>,
        capacity: &QueuePairCapacity,
    ) -> Result<Arc<dyn QueuePair>, VerbsError> {
        let _ = (send_queue, receive_queue, receives, capacity);
        Err(VerbsError::Unsupported("shared receive queue"))
    }
}

/// What a device is and can do (`ibv_query_device`), queried and never assumed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceAttributes {
    /// Provider that drives the device: `soft` or `ibverbs`.
    pub provider: &'static str,
    /// The device's name, as `tonic-rdma devices` shows it.
    pub name: String,
    /// Largest message of one work request, in bytes (`max_msg_sz`).
    pub max_message_size: u64,
    /// Most work requests outstanding on a send or receive queue (`max_qp_wr`).
    pub max_work_requests: u32,
    /// Most segments of one work request (`max_sge`).
    pub max_segments: u32,
    /// Most segments that an RDMA READ may be scattered to (`max_sge_rd`); 1 on iWARP.
    pub max_read_segments: u32,
    /// Most bytes that a send or write may carry inline (`max_inline_data`).
    pub max_inline: u32,
    /// Most RDMA READs outstanding on one queue pair as initiator (`max_qp_rd_atom`).
    pub max_outstanding_reads: u32,
    /// Most completions that a completion queue holds (`max_cqe`).
    pub max_completions: u32,
    /// Most memory regions of one protection domain.
    pub max_memory_regions: u32,
    /// Most shared receive queues (`max_srq`); 0 if the device has none.
    pub max_shared_receive_queues: u32,
    /// Most receives outstanding on one of them (`max_srq_wr`).
    pub max_shared_receives: u32,
    /// Whether the device has immediate data (soft-iWARP has not).
    pub immediate: bool,
    /// Whether registered memory is locked, and so counts against `RLIMIT_MEMLOCK`.
    pub locks_memory: bool,
}

impl DeviceAttributes {
    /// Makes the attributes of a device that can do nothing yet. A provider fills in what the device has.
    ///
    /// ```
    /// use tonic_rdma_verbs::DeviceAttributes;
    ///
    /// let attributes = DeviceAttributes::new("mine", "mine0");
    /// assert_eq!(attributes.name, "mine0");
    /// ```
    pub fn new(provider: &'static str, name: impl Into<String>) -> Self {
        Self {
            provider,
            name: name.into(),
            max_message_size: 0,
            max_work_requests: 0,
            max_segments: 0,
            max_read_segments: 0,
            max_inline: 0,
            max_outstanding_reads: 0,
            max_completions: 0,
            max_memory_regions: 0,
            max_shared_receive_queues: 0,
            max_shared_receives: 0,
            immediate: false,
            locks_memory: false,
        }
    }
}
