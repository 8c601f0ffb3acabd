//! What the other packages of tonic-rdma need and applications do not.
//!
//! It changes only with a new minor version (0.1 to 0.2), never with a patch, so `version = "0.1"` is enough.

pub use crate::wire::{SERVICE_VERSIONS, tensor_frame, tensor_metadata};

use std::sync::Weak;

use crate::device::RdmaDevice;
use crate::device::state::Group;
use crate::error::TensorError;
use crate::regions::ExportedRegion;
use crate::slots::dynamic_slot::{ANNOUNCEMENT, DynamicReceiver};
use crate::slots::slot::Layout;
use crate::slots::static_slot::StaticSender;
use crate::types::{Metadata, Tensor, TensorSpec};
use tonic_rdma_verbs::memory::{MemRegion, Pool};
use tonic_rdma_verbs::unstable::RegionPool;
use tonic_rdma_verbs::unstable::lock;

/// Lets only the ranks of a group open links to `device` from now on: peers that know the group's `name`.
/// Without a name, because the ranks have not met yet, no peer does.
pub fn admit_only_ranks(device: &RdmaDevice, name: Option<[u8; 16]>) {
    *lock(&device.shared.group) = name.map_or(Group::Joining, Group::Named);
}

/// Maps memory ahead, in one piece, for the slots of `device` that will have these lengths, as [`slot_bytes`]
/// gives them. Other slots get memory of their own.
///
/// # Errors
/// The budget for registered memory is used up, or the system can't map the memory.
pub fn preallocate_slots(
    device: &RdmaDevice,
    lengths: impl IntoIterator<Item = u64>,
) -> Result<(), TensorError> {
    let lengths = lengths.into_iter().map(usize::try_from).collect::<Result<Vec<usize>, _>>();
    device.shared.region_cache.preallocate_sinks(&lengths.map_err(TensorError::local)?)
}

/// Returns the bytes that [`preallocate_slots`] has mapped, and those of them that slots were in.
pub fn preallocated_slots(device: &RdmaDevice) -> (u64, u64) {
    device.shared.region_cache.preallocated_sinks()
}

/// Returns the registered memory of a slot with `depth` buffers, in bytes: a static one for tensors of
/// `spec`, and without it a dynamic one. `None` if such tensors have no fixed length.
///
/// ```
/// use tonic_rdma_tensor::unstable::slot_bytes;
/// use tonic_rdma_tensor::{Dtype, Shape, TensorSpec};
///
/// let spec = TensorSpec::new(Dtype::F32, Shape::new(&[1000])?)?;
/// assert_eq!(slot_bytes(Some(&spec), 2), Some(8064)); // each with a word behind it, on cache lines of its own
/// assert!(slot_bytes(None, 2) < Some(512));
/// # Ok::<(), tonic_rdma_tensor::TensorError>(())
/// ```
pub fn slot_bytes(spec: Option<&TensorSpec>, depth: u32) -> Option<u64> {
    let payload = spec.map_or(Some(ANNOUNCEMENT as u64), TensorSpec::bytes)?;
    let layout = Layout::new(usize::try_from(payload).ok()?, depth)?;
    Some(Pool::preallocated_bytes(layout.bytes()))
}

/// Returns the pool of `device` for tensors of an engine into which a receiver reads.
pub fn hosting_pool(device: &RdmaDevice) -> &RegionPool {
    &device.shared.region_cache.hosted
}

/// Takes the next tensor as [`DynamicReceiver::try_recv`] does, in the memory into which it was read.
/// `memory` gives memory for a tensor that is about to be read, of [`Metadata::bytes`] bytes. If it gives
/// none, or memory of another length, the receiver takes its own. Returns also how many tensors are being
/// read, or have been read and are not taken.
///
/// # Errors
/// Those of [`DynamicReceiver::try_recv`].
pub fn try_recv_into(
    receiver: &mut DynamicReceiver,
    memory: &mut dyn FnMut(&Metadata) -> Option<MemRegion>,
) -> (Result<Option<(Metadata, MemRegion)>, TensorError>, usize) {
    let taken = receiver.try_recv_into(memory);
    (taken, receiver.reads())
}

/// Waits until the next tensor is announced or, if it is being read, has been read. Unlike
/// [`DynamicReceiver::arrived`] this begins no read, because [`try_recv_into`] gives the memory for it.
///
/// # Errors
/// The sender is lost.
pub async fn announced(receiver: &mut DynamicReceiver) -> Result<(), TensorError> {
    receiver.stirs().await
}

/// Returns the part of the error's reason that the peer said, or how the link to it was lost.
pub fn detail(error: &TensorError) -> &str {
    error.detail()
}

/// Sends a tensor as [`StaticSender::send`] does, and waits until the device needs the memory of the tensor no
/// more: for programs that write to this memory again, in languages that don't take the tensor for constant.
///
/// # Errors
/// Those of [`StaticSender::send`].
pub async fn send_to_end(sender: &mut StaticSender, tensor: &Tensor) -> Result<(), TensorError> {
    sender.send_to_end(tensor).await
}

/// Waits for a notice of a peer as [`ExportedRegion::notice`] does, and takes none: for event loops, whose waits
/// end before they know.
///
/// # Errors
/// Those of [`ExportedRegion::notice`].
pub async fn noticed(region: &ExportedRegion) -> Result<(), TensorError> {
    region.noticed().await
}

/// A thread polls slots and takes completions itself, until it drops this. Meanwhile, a tensor that arrives,
/// or was sent, wakes no thread of the runtime, because a wake-up costs more than a small transfer. A thread
/// of the runtime still polls once in a millisecond.
///
/// This holds for all links and native calls of this runtime on the same verbs device: their futures may wait
/// a millisecond longer. A link that is opened later on another verbs device is not included. A thread drops
/// this before it sleeps or computes for long.
///
/// ```
/// # #[tokio::main]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # use tonic_rdma_tensor::{Dtype, RdmaDevice, Shape, TensorSpec};
/// # use tonic_rdma_tensor::unstable::OwnPolling;
/// # let server = RdmaDevice::bind("127.0.0.1:0").await?;
/// # let worker = RdmaDevice::bind("127.0.0.1:0").await?;
/// # let channel = worker.channel(&server.endpoint(), 0).await?;
/// # let spec = TensorSpec::new(Dtype::F32, Shape::new(&[256])?)?;
/// # let mut slot = server.static_receiver("loss", &spec, 1)?;
/// # let mut sender = channel.static_sender("loss", &spec).await?;
/// sender.try_send_bytes(&[1; 1024])?;
/// let polling = OwnPolling::new(&server);
/// while slot.try_recv()?.is_none() {
///     polling.poll();
/// }
/// drop(polling);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[must_use = "the threads of the runtime take over when this is dropped"]
pub struct OwnPolling {
    reactors: Vec<tonic_rdma::unstable::OwnPolling>,
}

impl OwnPolling {
    /// Begins for the links of `device`.
    pub fn new(device: &RdmaDevice) -> Self {
        let reactors = lock(&device.shared.reactors);
        let reactors = reactors.iter().filter_map(Weak::upgrade);
        Self { reactors: reactors.map(|reactor| tonic_rdma::unstable::OwnPolling::of(&reactor)).collect() }
    }

    /// Polls the completion queues of the device's links.
    pub fn poll(&self) {
        self.reactors.iter().for_each(tonic_rdma::unstable::OwnPolling::poll);
    }
}

/// The bootstrap of a job, for groups and graphs: its processes find and watch one another.
pub mod bootstrap {
    pub use crate::bootstrap::*;
}

/// The generated code of `proto/tensor_device.proto`.
pub mod proto {
    pub use crate::control::proto::*;
}

/// The generated code of `proto/tonic_rdma/buffer.proto`.
pub mod buffer_proto {
    pub use crate::buffer::proto::*;
}
