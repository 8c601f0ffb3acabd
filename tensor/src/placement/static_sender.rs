//! Sending tensors of a shape known beforehand, into the place that waits for them.

use std::sync::Arc;

use super::super::link::token::Token;
use super::super::memcpy::Memcpy;
use super::super::proto::Kind;
use super::super::types::{Metadata, Tensor, TensorSpec};
use super::super::{Channel, ChannelError, MemRegion};
use super::Sender;
use tonic_rdma_verbs::internal::LocalMemory;

/// The sending end of a static slot (§3.2), from [`Channel::static_sender`]. Each tensor is in the receiver's buffer when the
/// receiver sees it: nothing is copied on the way, and the receiver's processor does nothing for it.
#[derive(Debug)]
pub struct StaticSender {
    sender: Sender,
    spec: TensorSpec,
}

impl Channel {
    /// Attaches to the peer's static slot of this name, for tensors of type and shape `spec`. A slot has one sender at a time.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use tonic_rdma_tensor::{Dtype, RdmaDevice, Shape, TensorSpec};
    /// # let server = RdmaDevice::new(1, 2, "127.0.0.1:0").await?;
    /// # let worker = RdmaDevice::new(1, 2, "127.0.0.1:0").await?;
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
    /// The peer has no such slot, it takes something else, or another sender is attached.
    pub async fn static_sender(&self, name: &str, spec: &TensorSpec) -> Result<StaticSender, ChannelError> {
        let metadata = Metadata::dense(*spec).map_err(ChannelError::local)?;
        let length = usize::try_from(metadata.bytes()).map_err(ChannelError::local)?;
        let wire = crate::wire::tensor_metadata::Metadata::from(metadata).encode().to_vec();
        let sender = Sender::attach(self, name, Kind::Static, wire, length).await?;
        Ok(StaticSender { sender, spec: *spec })
    }
}

impl StaticSender {
    /// Returns type and shape of what it sends.
    pub fn spec(&self) -> &TensorSpec {
        &self.spec
    }

    /// Returns whether a buffer is free for the next tensor. It costs one load, as [`StaticReceiver::try_recv`] does.
    ///
    /// [`StaticReceiver::try_recv`]: super::StaticReceiver::try_recv
    ///
    /// # Errors
    /// The receiver has gone.
    pub fn is_ready(&mut self) -> Result<bool, ChannelError> {
        self.sender.is_ready()
    }

    /// Waits until a buffer is free.
    ///
    /// # Errors
    /// The receiver has gone.
    pub async fn ready(&mut self) -> Result<(), ChannelError> {
        self.sender.ready().await
    }

    /// Returns how many of the tensors that were sent have not been taken and released yet. It costs one load, so a thread
    /// that only polls may ask again and again, to learn that a tensor has arrived.
    ///
    /// # Errors
    /// The receiver has gone.
    pub fn pending(&mut self) -> Result<u64, ChannelError> {
        self.sender.pending()
    }

    /// Waits until everything that was sent has been taken, and released.
    ///
    /// # Errors
    /// The receiver has gone.
    pub async fn flush(&mut self) -> Result<(), ChannelError> {
        let last = self.sender.next().saturating_sub(1);
        if last < self.sender.first() {
            return Ok(());
        }
        self.sender.wait_for(last).await
    }

    /// Sends the first bytes of `region`, as many as the tensor has, once a buffer is free. The region comes back when they are
    /// in the receiver's buffer.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use tonic_rdma_tensor::{Dtype, RdmaDevice, Shape, TensorSpec};
    /// # let server = RdmaDevice::new(1, 2, "127.0.0.1:0").await?;
    /// # let worker = RdmaDevice::new(1, 2, "127.0.0.1:0").await?;
    /// # let channel = worker.channel(&server.endpoint(), 0).await?;
    /// # let spec = TensorSpec::new(Dtype::F32, Shape::new(&[256])?)?;
    /// # let mut slot = server.static_receiver("loss", &spec, 1)?;
    /// # let mut sender = channel.static_sender("loss", &spec).await?;
    /// let mut region = worker.allocate(1024)?;
    /// region.fill(1);
    /// let (region, sent) = sender.send_region(region).await;
    /// sent?;
    /// assert!(slot.try_recv()?.is_some());
    /// # drop(region);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The region is shorter than the tensor, or the receiver has gone. The region comes back in any case.
    pub async fn send_region(&mut self, region: MemRegion) -> (MemRegion, Result<(), ChannelError>) {
        match self.sender.ready().await {
            Ok(()) => self.start(region).await,
            Err(error) => (region, Err(error)),
        }
    }

    /// Begins to send `region` as [`send_region`](Self::send_region) does, and returns at once.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use tonic_rdma_tensor::{Dtype, RdmaDevice, Shape, TensorSpec};
    /// # let server = RdmaDevice::new(1, 2, "127.0.0.1:0").await?;
    /// # let worker = RdmaDevice::new(1, 2, "127.0.0.1:0").await?;
    /// # let channel = worker.channel(&server.endpoint(), 0).await?;
    /// # let spec = TensorSpec::new(Dtype::F32, Shape::new(&[256])?)?;
    /// # let mut slot = server.static_receiver("loss", &spec, 1)?;
    /// # let mut sender = channel.static_sender("loss", &spec).await?;
    /// let mut region = worker.allocate(1024)?;
    /// region.fill(1);
    /// let mut sending = sender.start(region);
    /// let (region, sent) = loop {
    ///     match sending.try_take() {
    ///         Some(result) => break result,
    ///         None => std::hint::spin_loop(), // or other work
    ///     }
    /// };
    /// sent?;
    /// # drop((region, slot));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`send_region`](Self::send_region), or [`Busy`](ChannelError::Busy) if no buffer is free. The future has the error,
    /// and the region.
    pub fn start(&mut self, region: MemRegion) -> Memcpy {
        let length = self.payload();
        if let Err(error) = self.check_ready().and_then(|()| self.check_length(region.len())) {
            return Memcpy::refused(region, error);
        }
        if self.sender.is_small() {
            return match self.sender.send_small(&region[..length]) {
                Ok(()) => Memcpy::done(region),
                Err(error) => Memcpy::refused(region, error),
            };
        }
        let (memcpy, token) = Memcpy::new(Arc::clone(self.sender.link()), self.sender.port());
        // What is refused is told as any other end is.
        let _ = self.sender.send(LocalMemory::Region(region), 0, token);
        memcpy
    }

    /// Sends a tensor once a buffer is free. If it lies in registered memory ([`Pool::for_sending`](tonic_rdma_verbs::memory::Pool)), it
    /// goes from there; otherwise it is copied to where the device can take it from. The tensor may be dropped at once.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use tonic_rdma_tensor::{Dtype, RdmaDevice, Shape, TensorSpec};
    /// # let server = RdmaDevice::new(1, 2, "127.0.0.1:0").await?;
    /// # let worker = RdmaDevice::new(1, 2, "127.0.0.1:0").await?;
    /// # let channel = worker.channel(&server.endpoint(), 0).await?;
    /// # let spec = TensorSpec::new(Dtype::F32, Shape::new(&[256])?)?;
    /// # let mut slot = server.static_receiver("loss", &spec, 1)?;
    /// # let mut sender = channel.static_sender("loss", &spec).await?;
    /// # use tonic_rdma::memory::Pool;
    /// # use tonic_rdma_tensor::TensorMut;
    /// let pool = Pool::for_sending(1 << 20);
    /// let mut loss = TensorMut::in_pool(spec, &pool)?;
    /// loss.as_mut_slice::<f32>()?.fill(0.5);
    /// sender.send(&loss.freeze()).await?;
    /// assert_eq!(slot.recv().await?.to_tensor()?.as_slice::<f32>()?, [0.5; 256]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// It is of another type or shape than the slot, or the receiver has gone.
    pub async fn send(&mut self, tensor: &Tensor) -> Result<(), ChannelError> {
        self.check_spec(tensor)?;
        self.sender.ready().await?;
        self.place(tensor)
    }

    /// Begins to send a tensor as [`send`](Self::send) does, and returns at once.
    ///
    /// # Errors
    /// As [`send`](Self::send), or [`Busy`](ChannelError::Busy) if no buffer is free.
    pub fn start_tensor(&mut self, tensor: &Tensor) -> Result<(), ChannelError> {
        self.check_spec(tensor)?;
        self.check_ready()?;
        self.place(tensor)
    }

    /// Begins to send a tensor of the right type and shape, a buffer being free.
    fn place(&mut self, tensor: &Tensor) -> Result<(), ChannelError> {
        if !self.sender.is_small()
            && let Some((lease, range)) = tensor.registered()
        {
            return self.sender.send(LocalMemory::Lease(lease), range.start as u64, Token::quiet());
        }
        if let Ok(bytes) = tensor.bytes() {
            return self.sender.send_copied(bytes);
        }
        let contiguous = tensor.to_contiguous().map_err(ChannelError::local)?;
        self.sender.send_copied(contiguous.bytes().map_err(ChannelError::local)?)
    }

    /// Copies `bytes` to registered memory and sends them from there, once a buffer is free: what a transport has to do whose
    /// user's tensors are anywhere (the paper's RDMA.cp).
    ///
    /// # Errors
    /// They are not as many as the tensor has, or the receiver has gone.
    pub async fn send_bytes(&mut self, bytes: &[u8]) -> Result<(), ChannelError> {
        self.check_length_exactly(bytes.len())?;
        self.sender.ready().await?;
        self.start_bytes(bytes)
    }

    /// Begins to send bytes as [`send_bytes`](Self::send_bytes) does, and returns at once.
    ///
    /// # Errors
    /// As [`send_bytes`](Self::send_bytes), or [`Busy`](ChannelError::Busy) if no buffer is free.
    pub fn start_bytes(&mut self, bytes: &[u8]) -> Result<(), ChannelError> {
        self.check_length_exactly(bytes.len())?;
        self.check_ready()?;
        self.sender.send_copied(bytes)
    }

    fn payload(&self) -> usize {
        self.spec.bytes().unwrap_or(0) as usize
    }

    fn check_ready(&mut self) -> Result<(), ChannelError> {
        if self.sender.is_ready()? { Ok(()) } else { Err(ChannelError::Busy(1)) }
    }

    fn check_spec(&self, tensor: &Tensor) -> Result<(), ChannelError> {
        if tensor.spec() == &self.spec { Ok(()) } else { Err(self.mismatch(tensor.spec().to_string())) }
    }

    fn check_length(&self, length: usize) -> Result<(), ChannelError> {
        if length >= self.payload() { Ok(()) } else { Err(self.mismatch(format!("{length} bytes"))) }
    }

    fn check_length_exactly(&self, length: usize) -> Result<(), ChannelError> {
        if length == self.payload() { Ok(()) } else { Err(self.mismatch(format!("{length} bytes"))) }
    }

    fn mismatch(&self, found: String) -> ChannelError {
        let (name, expected) = (Arc::clone(self.sender.name()), self.spec.to_string().into());
        ChannelError::Mismatch { name, expected, found: found.into() }
    }
}
