//! A channel: operations on the memory of one peer over one queue pair, and the regions, slots and tensors
//! that it finds there by name.

pub(crate) mod copy;

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout_at};

use self::copy::{RegionRead, RegionWrite};
use crate::control::proto::Kind;
use crate::control::{PeerService, granted_memory};
use crate::error::{TensorError, check_name};
use crate::link::Link;
use crate::link::words::Notification;
use crate::named_driver::{NamedRequest, NamedRequester};
use crate::regions::{RemoteRegion, RemoteRegionState, Rights};
use crate::slots::dynamic_slot::{ANNOUNCEMENT, DynamicSender};
use crate::slots::sender::Sender;
use crate::slots::static_slot::StaticSender;
use crate::types::{Metadata, TensorSpec};
use tonic_rdma_verbs::{RemoteView as RegionView, VerbsErrorKind};

/// A channel to a peer's device: the paper's `Channel` (table 1). Operations of one channel happen in order.
/// Operations of different queue pairs happen side by side. All clones refer to one channel.
#[derive(Clone)]
pub struct Channel {
    link: Arc<Link>,
    requests: Arc<NamedRequester>,
    port: u32,
    service: PeerService,
}

impl Channel {
    pub(crate) fn new(link: Arc<Link>, requests: Arc<NamedRequester>, service: PeerService) -> Self {
        Self { link, requests, port: 0, service }
    }

    /// Returns a channel to this peer over queue pair `qp_index`, modulo their number.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tonic_rdma_tensor::TensorError> {
    /// # use tonic_rdma_tensor::{Dtype, RdmaDevice, Shape, TensorSpec};
    /// # let server = RdmaDevice::bind("127.0.0.1:0").await?;
    /// # let worker = RdmaDevice::builder().queue_pairs_per_peer(2).bind("127.0.0.1:0").await?;
    /// # let spec = TensorSpec::new(Dtype::F32, Shape::new(&[256])?)?;
    /// # let _slots = (server.static_receiver("w0", &spec, 1)?, server.static_receiver("w1", &spec, 1)?);
    /// let channel = worker.channel(&server.endpoint(), 0).await?;
    /// // Slots are spread over the queue pairs.
    /// for slot in 0..2 {
    ///     let sender = channel.over(slot).static_sender(&format!("w{slot}"), &spec).await?;
    /// #   drop(sender);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn over(&self, qp_index: u32) -> Self {
        Self { port: qp_index % self.queue_pairs().max(1), ..self.clone() }
    }

    /// Returns where the peer's device listens.
    pub fn endpoint(&self) -> &str {
        &self.service.endpoint
    }

    /// Returns provider and name of the RDMA device, such as `soft` and `soft0`.
    pub fn device(&self) -> (&'static str, &str) {
        (self.link.provider, &self.link.device)
    }

    /// Returns the number of queue pairs to the peer.
    pub fn queue_pairs(&self) -> u32 {
        self.link.ports().count() as u32
    }

    /// Returns how each side learns of arrivals.
    pub fn notification(&self) -> Notification {
        self.link.notification
    }

    /// Returns the number of bytes that [`RegionWrite::bytes`] accepts at most.
    pub fn max_inline(&self) -> usize {
        self.link.port(self.port).inline
    }

    /// Returns whether the link to the peer is open, as far as this side knows.
    pub fn is_open(&self) -> bool {
        self.link.fault().is_none()
    }

    /// Waits until the link ends, and returns the reason.
    pub async fn closed(&self) -> TensorError {
        self.link.ended().await;
        self.link.fault().cloned().unwrap_or_else(|| TensorError::closed(&self.link.peer))
    }

    /// Takes completions from this channel's queue, so that futures of this channel become ready in the
    /// middle of other work. The runtime does this by itself when it is idle.
    pub fn poll(&self) {
        self.link.poll(self.port);
    }

    /// Begins to describe a write to `remote`: the offset there, and the bytes here. [`RegionWrite`] has
    /// more.
    ///
    /// ```no_run
    /// # async fn write(
    /// #     channel: tonic_rdma_tensor::Channel,
    /// #     remote: tonic_rdma_tensor::RemoteRegion,
    /// #     block: tonic_rdma_tensor::MemRegion,
    /// # ) -> Result<(), tonic_rdma_tensor::TensorError> {
    /// let block = channel.write(&remote).at(8192).from(block, ..4096).await?;
    /// # drop(block);
    /// # Ok(())
    /// # }
    /// ```
    pub fn write<'a>(&'a self, remote: &'a RemoteRegion) -> RegionWrite<'a> {
        RegionWrite::new(&self.link, self.port, remote)
    }

    /// Begins to describe a read from `remote`: the offset there, and the memory for the bytes here.
    /// [`RegionRead`] has more.
    ///
    /// ```no_run
    /// # async fn read(
    /// #     channel: tonic_rdma_tensor::Channel,
    /// #     remote: tonic_rdma_tensor::RemoteRegion,
    /// #     block: tonic_rdma_tensor::MemRegion,
    /// # ) -> Result<(), tonic_rdma_tensor::TensorError> {
    /// let block = channel.read(&remote).at(8192).into(block, ..4096).await?;
    /// # drop(block);
    /// # Ok(())
    /// # }
    /// ```
    pub fn read<'a>(&'a self, remote: &'a RemoteRegion) -> RegionRead<'a> {
        RegionRead::new(&self.link, self.port, remote)
    }

    /// Finds the peer's region of this name, and gets a right to it (§3.2: address distribution).
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tonic_rdma_tensor::TensorError> {
    /// # use tonic_rdma_tensor::{RdmaDevice, Rights};
    /// # let server = RdmaDevice::bind("127.0.0.1:0").await?;
    /// # let exported = server.export("parameters", server.allocate(4096)?, Rights::READ)?;
    /// # let worker = RdmaDevice::bind("127.0.0.1:0").await?;
    /// # let channel = worker.channel(&server.endpoint(), 0).await?;
    /// let remote = channel.region("parameters").await?;
    /// assert_eq!((remote.len(), remote.rights()), (4096, Rights::READ));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The peer has no region of this name.
    pub async fn region(&self, name: &str) -> Result<RemoteRegion, TensorError> {
        let name = check_name(name)?;
        let (pair, reply) =
            self.service.attach(&self.link, self.port, &name, Kind::Region, Vec::new()).await?;
        let place = granted_memory(&reply)?;
        let rights = Rights { read: reply.readable, write: reply.writable };
        let link = Arc::clone(&self.link);
        let notices = Mutex::new(reply.epoch);
        Ok(RemoteRegion { shared: Arc::new(RemoteRegionState { name, link, place, rights, pair, notices }) })
    }

    /// Attaches to the peer's static slot of this name, for tensors of type and shape `spec`. A slot has one
    /// sender at a time.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use tonic_rdma_tensor::{Dtype, RdmaDevice, Shape, TensorSpec};
    /// # let server = RdmaDevice::bind("127.0.0.1:0").await?;
    /// # let worker = RdmaDevice::bind("127.0.0.1:0").await?;
    /// # let channel = worker.channel(&server.endpoint(), 0).await?;
    /// let spec = TensorSpec::new(Dtype::F32, Shape::new(&[256])?)?;
    /// let mut slot = server.static_receiver("loss", &spec, 1)?; // at the peer
    ///
    /// let mut sender = channel.static_sender("loss", &spec).await?;
    /// sender.send_bytes(&[0; 1024]).await?;
    /// assert_eq!(slot.recv().await?.len(), 1024);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The peer has no such slot, the slot accepts other tensors, or another sender is attached.
    pub async fn static_sender(&self, name: &str, spec: &TensorSpec) -> Result<StaticSender, TensorError> {
        let metadata = Metadata::dense(*spec)?;
        let length = usize::try_from(metadata.bytes()).map_err(TensorError::local)?;
        let wire = crate::wire::tensor_metadata::WireMetadata::from(metadata).encode().to_vec();
        let sender = self.sender(name, Kind::Static, wire, length).await?;
        Ok(StaticSender::new(sender, *spec))
    }

    /// Attaches to the peer's dynamic slot of this name. A slot has one sender at a time.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use tonic_rdma_tensor::{RdmaDevice, Shape, Tensor};
    /// # let server = RdmaDevice::bind("127.0.0.1:0").await?;
    /// # let worker = RdmaDevice::bind("127.0.0.1:0").await?;
    /// # let channel = worker.channel(&server.endpoint(), 0).await?;
    /// let mut slot = server.dynamic_receiver("tokens", 4)?; // at the peer
    ///
    /// let mut sender = channel.dynamic_sender("tokens").await?;
    /// sender.send(&Tensor::from_strings(Shape::new(&[1])?, ["one"])?).await?;
    /// assert_eq!(slot.recv().await?.shape().dims(), [1]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The peer has no such slot, or another sender is attached.
    pub async fn dynamic_sender(&self, name: &str) -> Result<DynamicSender, TensorError> {
        let sender = self.sender(name, Kind::Dynamic, Vec::new(), ANNOUNCEMENT).await?;
        Ok(DynamicSender::new(sender))
    }

    /// Asks the peer for the tensor `name` of `step`. All requests for a name go by one queue pair of the link,
    /// whichever the channel has, and the names are spread over the queue pairs. The peer may offer the tensor before or after this call
    /// ([`RdmaDevice::put`](crate::RdmaDevice::put)), and writes it straight into memory of this device. From
    /// the second step on a request costs one message and one write, unless the tensor's type or shape has
    /// changed.
    ///
    /// Dropping the future withdraws the request, and a later request gets the tensor. If the tensor has
    /// arrived meanwhile, it stays in memory of this device for the later request, for
    /// [`DeviceBuilder::named_tensor_timeout`](crate::DeviceBuilder::named_tensor_timeout) at least and twice
    /// as long at most. Each link keeps at most 1024 such tensors of 256 MiB together, and frees the oldest
    /// first. It keeps the newest one whatever its length. If memory of the device is short, all links free
    /// these tensors.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use tonic_rdma_tensor::{Dtype, NamedOffer, RdmaDevice, NamedReply, Shape, Tensor, TensorSpec};
    /// # let server = RdmaDevice::bind("127.0.0.1:0").await?;
    /// # let worker = RdmaDevice::bind("127.0.0.1:0").await?;
    /// # let channel = worker.channel(&server.endpoint(), 0).await?;
    /// # let spec = TensorSpec::new(Dtype::U8, Shape::new(&[4])?)?;
    /// # server.put("loss", 17, NamedOffer::Tensor(Tensor::copy_from(spec, &[1, 2, 3, 4])?), 1)?;
    /// if let NamedReply::Tensor(loss) = channel.request("loss", 17).await? {
    ///     assert_eq!(loss.as_slice::<u8>()?, [1, 2, 3, 4]);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Refused`](crate::TensorErrorKind::Refused) with the peer's status: the tensor could not be computed,
    /// was not offered in time, or was requested by this device before, and taken.
    pub fn request(&self, name: &str, step: u64) -> NamedRequest {
        self.requests.request(&self.link, name, step)
    }

    /// Attaches to the peer's slot `name`, for payloads of `payload` bytes.
    async fn sender(
        &self,
        name: &str,
        kind: Kind,
        metadata: Vec<u8>,
        payload: usize,
    ) -> Result<Sender, TensorError> {
        let name = check_name(name)?;
        let (pair, reply) = self.service.attach(&self.link, self.port, &name, kind, metadata).await?;
        Sender::new(name, &self.link, self.port, pair, &reply, payload)
    }

    /// Returns a view of the peer's region, if this device maps memory of the peer: the software device, if
    /// both processes belong to one user and share their memory. Returns `None` for a network card, for a
    /// peer of another user, and if the bounds on mapped memory are reached. The first view of a region takes
    /// some milliseconds, and two seconds at most: a READ of a few bytes makes the peer offer its memory.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use tonic_rdma_tensor::{RdmaDevice, Rights};
    /// # let server = RdmaDevice::bind("127.0.0.1:0").await?;
    /// # let worker = RdmaDevice::bind("127.0.0.1:0").await?;
    /// # let channel = worker.channel(&server.endpoint(), 0).await?;
    /// let board = server.export("board", server.allocate(4096)?, Rights::READ)?; // at the peer
    ///
    /// let remote = channel.region("board").await?;
    /// if let Some(view) = channel.view(&remote).await? {
    ///     board.memory().store_u64(8, 77)?; // at the peer
    ///     assert_eq!(view.load_u64(8)?, 77);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`NotPermitted`](crate::TensorErrorKind::NotPermitted) without the right to read,
    /// [`Timeout`](crate::TensorErrorKind::Timeout) if the peer does not serve the READ, and other errors if
    /// the peer has withdrawn the region, the region belongs to another link, or the link has failed.
    pub async fn view(&self, remote: &RemoteRegion) -> Result<Option<RegionView>, TensorError> {
        let shared = &remote.shared;
        if !Arc::ptr_eq(&shared.link, &self.link) {
            return Err(TensorError::argument(format!("{:?} is a region of another link", remote.name())));
        }
        if !remote.rights().read {
            return Err(TensorError::not_permitted("read", &shared.name));
        }
        let deadline = Instant::now() + VIEW_TIMEOUT;
        let mut asked: Option<Instant> = None;
        loop {
            self.link.check()?;
            let place = shared.place;
            let view = self.link.port(self.port).with_queue_pair(|pair| {
                pair.local().map(|local| local.view(place.start, place.length).map_err(|error| error.kind()))
            });
            match view {
                Some(Some(Ok(view))) => return Ok(Some(view)),
                Some(None | Some(Err(VerbsErrorKind::Unsupported))) => return Ok(None),
                Some(Some(Err(VerbsErrorKind::Revoked))) => {
                    let name = remote.name();
                    return Err(TensorError::other(format!("the peer has withdrawn the region {name:?}")));
                }
                // The memory is not mapped yet, or the link has just ended.
                None | Some(Some(Err(_))) => {}
            }
            if Instant::now() >= deadline {
                return Ok(None);
            }
            if asked.is_none_or(|asked| asked.elapsed() >= READ_AGAIN_AFTER) {
                asked = Some(Instant::now());
                let late = |_| TensorError::timeout("a read of the peer's region", VIEW_TIMEOUT);
                timeout_at(deadline, self.ask_for_memory(remote)).await.map_err(late)??;
            } else {
                sleep(VIEW_POLL_INTERVAL).await;
            }
        }
    }

    /// Reads a few bytes of the region. The peer's device serves this READ, and offers the memory to this
    /// device.
    async fn ask_for_memory(&self, remote: &RemoteRegion) -> Result<(), TensorError> {
        let few = remote.len().min(8);
        let region = self.link.region_cache.take(few)?;
        self.read(remote).into(region, ..few as usize).await?;
        Ok(())
    }
}

impl fmt::Debug for Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Channel").field("link", &self.link).field("port", &self.port).finish_non_exhaustive()
    }
}

/// The longest wait for the peer's memory.
const VIEW_TIMEOUT: Duration = Duration::from_secs(2);
/// The time after which memory that has not arrived is asked for again.
const READ_AGAIN_AFTER: Duration = Duration::from_millis(600);
/// The time between two polls.
const VIEW_POLL_INTERVAL: Duration = Duration::from_millis(1);
