//! The slots of a device, into which peers put tensors.

use std::sync::{Arc, Weak};

use crate::control::offered::Offered;
use crate::control::proto::Kind;
use crate::device::RdmaDevice;
use crate::error::ChannelError;
use crate::name::check_name;
use crate::slots::announcement::Announcement;
use crate::slots::dynamic_receiver::DynamicReceiver;
use crate::slots::receiver::Receiver;
use crate::slots::static_receiver::StaticReceiver;
use crate::types::TensorSpec;

impl RdmaDevice {
    /// Makes a slot for tensors of type and shape `spec`, with `depth` buffers: the peer can send `depth` tensors before the
    /// receiver takes the first one. One peer at a time can attach to the slot by `name`, with
    /// [`Channel::static_sender`](crate::Channel::static_sender).
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use tonic_rdma_tensor::{Dtype, RdmaDevice, Shape, TensorSpec};
    /// # let server = RdmaDevice::builder().bind("127.0.0.1:0").await?;
    /// # let worker = RdmaDevice::builder().bind("127.0.0.1:0").await?;
    /// # let channel = worker.channel(&server.endpoint(), 0).await?;
    /// let spec = TensorSpec::new(Dtype::F32, Shape::new(&[256])?)?;
    /// let mut slot = server.static_receiver("loss", &spec, 2)?;
    ///
    /// # let mut sender = channel.static_sender("loss", &spec).await?;
    /// # sender.send_bytes(&[0; 1024]).await?;
    /// let arrived = slot.recv().await?;
    /// let mut bytes = [1; 1024];
    /// arrived.copy_to(&mut bytes)?;
    /// assert_eq!(bytes, [0; 1024]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The name is in use, empty or too long, there is no memory, `depth` is 0 or more than 1024, or tensors of that type have
    /// no fixed length.
    pub fn static_receiver(
        &self,
        name: &str,
        spec: &TensorSpec,
        depth: u32,
    ) -> Result<StaticReceiver, ChannelError> {
        let length = spec.bytes().ok_or_else(|| {
            ChannelError::local(format!(
                "tensors of {spec} have no fixed length: use a dynamic slot or a rendezvous"
            ))
        })?;
        let length = usize::try_from(length).map_err(ChannelError::local)?;
        let receiver = self.receiver(name, Kind::Static, Some(*spec), length, depth)?;
        Ok(StaticReceiver::new(receiver, *spec))
    }

    /// Makes a slot for tensors of any type and shape, of which `depth` can wait. One peer at a time can attach to the slot by
    /// `name`, with [`Channel::dynamic_sender`](crate::Channel::dynamic_sender). A tensor that arrives lies in memory of this
    /// device, which is used again when the tensor is dropped.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use tonic_rdma_tensor::{RdmaDevice, Shape, Tensor};
    /// # let server = RdmaDevice::builder().bind("127.0.0.1:0").await?;
    /// # let worker = RdmaDevice::builder().bind("127.0.0.1:0").await?;
    /// # let channel = worker.channel(&server.endpoint(), 0).await?;
    /// let mut slot = server.dynamic_receiver("tokens", 4)?;
    ///
    /// # let mut sender = channel.dynamic_sender("tokens").await?;
    /// # sender.send(&Tensor::from_strings(Shape::new(&[2])?, ["a", "b"])?).await?;
    /// let tensor = slot.recv().await?;
    /// println!("{}", tensor.spec());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The name is in use, empty or too long, there is no memory, or `depth` is 0 or more than 1024.
    pub fn dynamic_receiver(&self, name: &str, depth: u32) -> Result<DynamicReceiver, ChannelError> {
        let receiver = self.receiver(name, Kind::Dynamic, None, Announcement::LENGTH, depth)?;
        let landing = Arc::clone(&self.shared.landing);
        Ok(DynamicReceiver::new(receiver, landing, self.shared.settings.max_tensor_bytes))
    }

    /// Makes a slot and offers it.
    fn receiver(
        &self,
        name: &str,
        kind: Kind,
        spec: Option<TensorSpec>,
        payload: usize,
        depth: u32,
    ) -> Result<Receiver, ChannelError> {
        let name = check_name(name)?;
        let receiver =
            Receiver::new(Arc::clone(&name), kind, spec, payload, depth, |size| self.allocate(size))?;
        let slot = Arc::downgrade(&receiver.slot);
        self.shared.offer(name, slot as Weak<dyn Offered>)?;
        Ok(receiver)
    }
}
