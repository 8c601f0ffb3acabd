//! Regions, slots and tensors that a channel finds by name.

use std::sync::{Arc, Mutex};

use crate::channel::Channel;
use crate::control::conversions::place_of;
use crate::control::peer_service::no_owner;
use crate::control::proto::Kind;
use crate::error::ChannelError;
use crate::exchange::Request;
use crate::name::check_name;
use crate::regions::remote::{RemoteRegion, RemoteShared};
use crate::regions::rights::Rights;
use crate::slots::announcement::Announcement;
use crate::slots::dynamic_sender::DynamicSender;
use crate::slots::sender::Sender;
use crate::slots::static_sender::StaticSender;
use crate::types::{Metadata, TensorSpec};

impl Channel {
    /// Finds the peer's region of this name, and takes a right to it (§3.2: address distribution).
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tonic_rdma_tensor::ChannelError> {
    /// # use tonic_rdma_tensor::{RdmaDevice, Rights};
    /// # let server = RdmaDevice::builder().bind("127.0.0.1:0").await?;
    /// # let exported = server.export("parameters", server.allocate(4096)?, Rights::READ)?;
    /// # let worker = RdmaDevice::builder().bind("127.0.0.1:0").await?;
    /// # let channel = worker.channel(&server.endpoint(), 0).await?;
    /// let remote = channel.region("parameters").await?;
    /// assert_eq!((remote.len(), remote.rights()), (4096, Rights::READ));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The peer has no region of this name.
    pub async fn region(&self, name: &str) -> Result<RemoteRegion, ChannelError> {
        let name = check_name(name)?;
        let (ours, reply) =
            self.service.attach(&self.link, self.port, &name, Kind::Region, Vec::new()).await?;
        let place = place_of(&reply).map_err(ChannelError::local)?;
        let pair = Arc::new(ours.towards(reply.slot, no_owner()));
        let rights = Rights { read: reply.readable, write: reply.writable };
        let link = Arc::clone(&self.link);
        let notices = Mutex::new(reply.epoch);
        Ok(RemoteRegion { shared: Arc::new(RemoteShared { name, link, place, rights, pair, notices }) })
    }

    /// Attaches to the peer's static slot of this name, for tensors of type and shape `spec`. A slot has one sender at a time.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use tonic_rdma_tensor::{Dtype, RdmaDevice, Shape, TensorSpec};
    /// # let server = RdmaDevice::builder().bind("127.0.0.1:0").await?;
    /// # let worker = RdmaDevice::builder().bind("127.0.0.1:0").await?;
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
    /// The peer has no such slot, the slot takes other tensors, or another sender is attached.
    pub async fn static_sender(&self, name: &str, spec: &TensorSpec) -> Result<StaticSender, ChannelError> {
        let metadata = Metadata::dense(*spec)?;
        let length = usize::try_from(metadata.bytes()).map_err(ChannelError::local)?;
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
    /// # let server = RdmaDevice::builder().bind("127.0.0.1:0").await?;
    /// # let worker = RdmaDevice::builder().bind("127.0.0.1:0").await?;
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
    pub async fn dynamic_sender(&self, name: &str) -> Result<DynamicSender, ChannelError> {
        let sender = self.sender(name, Kind::Dynamic, Vec::new(), Announcement::LENGTH).await?;
        Ok(DynamicSender::new(sender))
    }

    /// Asks the peer for the tensor `name` of `step`. The peer may offer the tensor before or after this call
    /// ([`RdmaDevice::put`](crate::RdmaDevice::put)), and writes it straight into memory of this device. From the second step
    /// on a request takes one message and one write, unless the tensor's type or shape has changed.
    ///
    /// Dropping the future withdraws the request, and a later request gets the tensor. If the tensor has arrived meanwhile, it stays in
    /// memory of this device for the later request, for [`DeviceBuilder::rendezvous_timeout`](crate::DeviceBuilder::rendezvous_timeout) at
    /// least and twice as long at most. Each link keeps at most 1024 such tensors of 256 MiB together, and frees the oldest first. It keeps
    /// the newest one whatever its length. If memory of the device is short, all links free these tensors.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use tonic_rdma_tensor::{Dtype, Offer, RdmaDevice, Requested, Shape, Tensor, TensorSpec};
    /// # let server = RdmaDevice::builder().bind("127.0.0.1:0").await?;
    /// # let worker = RdmaDevice::builder().bind("127.0.0.1:0").await?;
    /// # let channel = worker.channel(&server.endpoint(), 0).await?;
    /// # let spec = TensorSpec::new(Dtype::U8, Shape::new(&[4])?)?;
    /// # server.put("loss", 17, Offer::Tensor(Tensor::copy_from(spec, &[1, 2, 3, 4])?), 1)?;
    /// if let Requested::Tensor(loss) = channel.request("loss", 17).await? {
    ///     assert_eq!(loss.as_slice::<u8>()?, [1, 2, 3, 4]);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Refused`](ChannelError::Refused) with the peer's status: the tensor could not be computed, was not offered in time, or
    /// was requested by this device before, and taken.
    pub fn request(&self, name: &str, step: u64) -> Request {
        self.requests.request(&self.link, name, step)
    }

    /// Attaches to the peer's slot `name`, for payloads of `payload` bytes.
    async fn sender(
        &self,
        name: &str,
        kind: Kind,
        metadata: Vec<u8>,
        payload: usize,
    ) -> Result<Sender, ChannelError> {
        let name = check_name(name)?;
        let (ours, reply) = self.service.attach(&self.link, self.port, &name, kind, metadata).await?;
        Sender::new(name, &self.link, self.port, ours, &reply, payload)
    }
}
