//! An opened device and the protection domains allocated from it.

use std::fmt::Debug;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use super::sealed::Sealed;
use super::{
    Access, CompletionQueue, DeviceMemoryRegion, DmaBuf, HostMemory, MemoryRegion, QueuePair,
    QueuePairCapacity, SharedReceiveQueue, VerbsError,
};

/// An opened RDMA device (`struct ibv_context`).
pub trait Context: Sealed + Send + Sync + Debug + 'static {
    /// Returns the description and the limits of the device.
    fn attributes(&self) -> &DeviceAttributes;

    /// Allocates a protection domain: the scope within which keys are valid.
    fn alloc_protection_domain(&self) -> Result<Arc<dyn ProtectionDomain>, VerbsError>;

    /// Creates a completion queue that holds at least `capacity` completions.
    ///
    /// The caller must never have more than `capacity` signalled requests outstanding. An overrun of the
    /// queue moves its queue pairs to Error.
    ///
    /// # Errors
    /// [`Limit`](crate::VerbsErrorKind::Limit) if the device has no queue of this capacity, or
    /// [`System`](crate::VerbsErrorKind::System) if the system refuses.
    fn create_completion_queue(&self, capacity: u32) -> Result<Arc<dyn CompletionQueue>, VerbsError>;

    /// Returns the descriptor of asynchronous events (IBA vol. 1, 11.6.3); `None` on a device without such
    /// events. The descriptor becomes readable with such an event, and when the device is gone. A completion
    /// does not make it readable. The descriptor does not block.
    ///
    /// A thread that waits for an event calls [`handle_events`](Self::handle_events), then checks its queue
    /// pairs.
    fn async_event_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Takes every asynchronous event that has come. Moves the queue pairs of an event (port down, queue pair
    /// or completion queue failed, device removed) to Error; [`QueuePair::failure`] then has the reason.
    /// Never blocks. Some devices are removed without an event, so callers should also call this about once a
    /// second.
    fn handle_events(&self) {}
}

/// A protection domain (`struct ibv_pd`): memory regions and queue pairs that may be used with one another.
pub trait ProtectionDomain: Sealed + Send + Sync + Debug + 'static {
    /// Registers all of `memory`.
    ///
    /// # Errors
    /// Those of [`register_range`](Self::register_range).
    fn register(&self, memory: Arc<HostMemory>, access: Access) -> Result<Arc<dyn MemoryRegion>, VerbsError> {
        let all = 0..memory.len();
        self.register_range(memory, all, access)
    }

    /// Registers the bytes `range` of `memory`. Queue pairs of this domain may use them, and their peers may
    /// use them within the rights `access`. The bounds are exact to the byte: the region's keys reach no
    /// other byte of the memory. Regions of one memory may overlap, each with its own rights.
    ///
    /// The region keeps the memory alive. Dropping the last reference to the region deregisters it; the drop
    /// waits (microseconds) for operations of peers on the region.
    ///
    /// # Errors
    /// - [`Unusable`](crate::VerbsErrorKind::Unusable) if the range is empty, or not within the memory.
    /// - [`Limit`](crate::VerbsErrorKind::Limit) or [`System`](crate::VerbsErrorKind::System) if the device
    ///   can register no more.
    fn register_range(
        &self,
        memory: Arc<HostMemory>,
        range: Range<usize>,
        access: Access,
    ) -> Result<Arc<dyn MemoryRegion>, VerbsError>;

    /// Returns whether the peer of a READ can write to the sink of the READ by the key of the sink, although
    /// the sink was registered with local rights only. On iWARP it can, because the answer to a READ is a
    /// write of the peer (RFC 5040, section 5.1). The peer learns the key from the READ. On such a device, a
    /// sink is memory to which no reference ever exists, or it needs a registration of its own, which must end
    /// before the memory is used for something else.
    fn opens_sinks(&self) -> bool {
        false
    }

    /// Returns whether the cores of the peers read the memory that is registered here, as on the software
    /// device. Other devices read the memory for the peers.
    fn is_read_by_cores(&self) -> bool {
        false
    }

    /// Registers memory of another device, such as a GPU, by its dmabuf. The region is used like one of
    /// [`register_range`](Self::register_range), and does not need the descriptor any more.
    ///
    /// No device with this ability has been tried yet.
    ///
    /// # Errors
    /// - [`Unsupported`](crate::VerbsErrorKind::Unsupported) if the device, its driver or the installed
    ///   libibverbs lacks the function. The software device and the software devices of the kernel lack it.
    /// - [`Unusable`](crate::VerbsErrorKind::Unusable) if the descriptor is no dmabuf, or the part can't be
    ///   registered.
    /// - [`System`](crate::VerbsErrorKind::System) if the system refuses.
    fn register_dmabuf(
        &self,
        memory: &DmaBuf<'_>,
        access: Access,
    ) -> Result<Arc<dyn DeviceMemoryRegion>, VerbsError> {
        let _ = (memory, access);
        Err(VerbsError::unsupported("dmabuf registration"))
    }

    /// Creates an RC queue pair in Reset. The completion queues must come from the domain's own context.
    ///
    /// # Errors
    /// - [`Limit`](crate::VerbsErrorKind::Limit) if the device has no queue pair of this capacity.
    /// - [`InvalidArgument`](crate::VerbsErrorKind::InvalidArgument) if a completion queue is of another
    ///   device.
    /// - [`System`](crate::VerbsErrorKind::System) if the system refuses.
    fn create_queue_pair(
        &self,
        send_queue: &Arc<dyn CompletionQueue>,
        receive_queue: &Arc<dyn CompletionQueue>,
        capacity: &QueuePairCapacity,
    ) -> Result<Arc<dyn QueuePair>, VerbsError>;

    /// Creates a shared receive queue for `capacity` receives of up to `segments` segments each.
    ///
    /// # Errors
    /// [`Unsupported`](crate::VerbsErrorKind::Unsupported) where the device has none
    /// ([`max_shared_receive_queues`](DeviceAttributes::max_shared_receive_queues)).
    fn create_shared_receive_queue(
        &self,
        capacity: u32,
        segments: u32,
    ) -> Result<Arc<dyn SharedReceiveQueue>, VerbsError> {
        let _ = (capacity, segments);
        Err(VerbsError::unsupported("shared receive queue"))
    }

    /// Creates a queue pair that takes its receives from `receives`. Receives can't be posted to the queue
    /// pair itself, so the receive numbers of `capacity` are ignored.
    ///
    /// The shared queue may be of another domain, if the device looks up the keys of its buffers in that
    /// domain. Soft-RoCE looks them up in the queue pair's domain, and a message then ends in
    /// [`LocalProtection`](super::CompletionStatus::LocalProtection) or a similar status.
    fn create_sharing_queue_pair(
        &self,
        send_queue: &Arc<dyn CompletionQueue>,
        receive_queue: &Arc<dyn CompletionQueue>,
        receives: &Arc<dyn SharedReceiveQueue>,
        capacity: &QueuePairCapacity,
    ) -> Result<Arc<dyn QueuePair>, VerbsError> {
        let _ = (send_queue, receive_queue, receives, capacity);
        Err(VerbsError::unsupported("shared receive queue"))
    }
}

/// Description and limits of a device (`ibv_query_device`), as the device reports them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
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
    /// Most receives outstanding on one shared receive queue (`max_srq_wr`).
    pub max_shared_receives: u32,
    /// Whether the device supports immediate data. soft-iWARP does not.
    pub immediate: bool,
    /// Whether registered memory is locked. Locked memory counts against `RLIMIT_MEMLOCK`.
    pub locks_memory: bool,
    /// Whether queue pairs [open windows](super::QueuePair::open_window).
    pub memory_windows: bool,
    /// Most requests by which one queue pair opens and closes windows at a time. If it opens any, these need
    /// room in the completion queue of its sends beside the user's requests. 0 if windows need no requests.
    pub window_requests: u32,
}

impl DeviceAttributes {
    /// Creates the attributes of a device without abilities. A provider then fills in those of its device.
    ///
    /// ```
    /// use tonic_rdma_verbs::DeviceAttributes;
    ///
    /// let attributes = DeviceAttributes::new("mine", "mine0");
    /// assert_eq!(attributes.name, "mine0");
    /// ```
    pub fn new(provider: &'static str, name: impl Into<String>) -> Self {
        Self { provider, name: name.into(), ..Self::default() }
    }
}
