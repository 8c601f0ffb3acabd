//! Static slots, for tensors of a known shape: the sender writes each tensor into the receiver's memory.

use std::future::poll_fn;
use std::ops::Range;
use std::sync::Arc;

use crate::channel::copy::{Memcpy, poll_outcome};
use crate::error::{TensorError, TransferError};
use crate::link::port::{OutcomeCell, Token};
use crate::slots::sender::{Sender, SentCounts};
use crate::slots::slot::Receiver;
use crate::types::{Tensor, TensorSpec};
use tonic_rdma_verbs::memory::{MemRegion, SharedRegion};
use tonic_rdma_verbs::unstable::LocalMemory;

/// The sending side of a static slot (§3.2), from [`Channel::static_sender`](crate::Channel::static_sender).
/// The whole tensor is in the receiver's buffer when the receiver sees it. The receiver's processor copies
/// nothing.
///
/// | | waits for a free buffer | returns at once |
/// |---|---|---|
/// | a tensor | [`send`](Self::send) | [`try_send`](Self::try_send) |
/// | a region | [`send_region`](Self::send_region) | [`try_send_region`](Self::try_send_region) |
/// | bytes, which are copied | [`send_bytes`](Self::send_bytes) | [`try_send_bytes`](Self::try_send_bytes) |
#[derive(Debug)]
pub struct StaticSender {
    sender: Sender,
    spec: TensorSpec,
    sent: SentCounts,
}

impl StaticSender {
    pub(crate) fn new(sender: Sender, spec: TensorSpec) -> Self {
        Self { sender, spec, sent: SentCounts::default() }
    }

    /// Returns the type and shape of the tensors.
    pub fn spec(&self) -> &TensorSpec {
        &self.spec
    }

    /// Returns how many tensors this sender has sent without a copy, and with one. [`SentCounts`] has an
    /// example.
    pub fn sent(&self) -> SentCounts {
        self.sent
    }

    /// Returns whether a buffer is free for the next tensor. This costs little, as
    /// [`StaticReceiver::try_recv`] does.
    ///
    /// [`StaticReceiver::try_recv`]: crate::StaticReceiver::try_recv
    ///
    /// # Errors
    /// The receiver is lost.
    pub fn is_ready(&mut self) -> Result<bool, TensorError> {
        self.sender.is_ready()
    }

    /// Waits until a buffer is free.
    ///
    /// # Errors
    /// The receiver is lost.
    pub async fn ready(&mut self) -> Result<(), TensorError> {
        self.sender.ready().await
    }

    /// Returns how many of the sent tensors the receiver has not taken and released yet. This costs little,
    /// so a thread that polls may call it again and again, to learn that a tensor has been taken.
    ///
    /// # Errors
    /// The receiver is lost.
    pub fn pending(&mut self) -> Result<u64, TensorError> {
        self.sender.pending()
    }

    /// Waits until the receiver has taken and released all tensors.
    ///
    /// # Errors
    /// The receiver is lost.
    pub async fn flush(&mut self) -> Result<(), TensorError> {
        let last = self.sender.next.saturating_sub(1);
        if last < self.sender.first {
            return Ok(());
        }
        self.sender.wait_for(last).await
    }

    /// Sends the first bytes of `region`, as many as the tensor has, once a buffer is free. The region comes
    /// back when the bytes are in the receiver's buffer.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use tonic_rdma_tensor::{Dtype, RdmaDevice, Shape, TensorSpec};
    /// # let server = RdmaDevice::bind("127.0.0.1:0").await?;
    /// # let worker = RdmaDevice::bind("127.0.0.1:0").await?;
    /// # let channel = worker.channel(&server.endpoint(), 0).await?;
    /// # let spec = TensorSpec::new(Dtype::F32, Shape::new(&[256])?)?;
    /// # let mut slot = server.static_receiver("loss", &spec, 1)?;
    /// # let mut sender = channel.static_sender("loss", &spec).await?;
    /// let mut region = worker.allocate(1024)?;
    /// region.fill(1);
    /// let region = sender.send_region(region).await?;
    /// assert!(slot.try_recv()?.is_some());
    /// # drop(region);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The region is shorter than the tensor, or the receiver is lost. The error has the region.
    pub async fn send_region(&mut self, region: MemRegion) -> Result<MemRegion, TransferError> {
        match self.sender.ready().await {
            Ok(()) => self.try_send_region(region).await,
            Err(error) => Err(TransferError::new(region, error)),
        }
    }

    /// Begins to send `region` as [`send_region`](Self::send_region) does, and returns at once.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use tonic_rdma_tensor::{Dtype, RdmaDevice, Shape, TensorSpec};
    /// # let server = RdmaDevice::bind("127.0.0.1:0").await?;
    /// # let worker = RdmaDevice::bind("127.0.0.1:0").await?;
    /// # let channel = worker.channel(&server.endpoint(), 0).await?;
    /// # let spec = TensorSpec::new(Dtype::F32, Shape::new(&[256])?)?;
    /// # let mut slot = server.static_receiver("loss", &spec, 1)?;
    /// # let mut sender = channel.static_sender("loss", &spec).await?;
    /// let mut region = worker.allocate(1024)?;
    /// region.fill(1);
    /// let mut sending = sender.try_send_region(region);
    /// let region = loop {
    ///     match sending.try_take() {
    ///         Some(result) => break result,
    ///         None => std::hint::spin_loop(), // or other work
    ///     }
    /// }?;
    /// # drop((region, slot));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The errors of [`send_region`](Self::send_region), and [`Busy`](crate::TensorErrorKind::Busy) if no
    /// buffer is free. The future yields the error, which has the region.
    pub fn try_send_region(&mut self, region: MemRegion) -> Memcpy {
        let length = self.payload();
        if let Err(error) = self.sender.check_ready().and_then(|()| self.check_length(region.len())) {
            return Memcpy::refused(region, error);
        }
        if self.sender.is_small() {
            return match self.sender.send_small(&region[..length]) {
                Ok(()) => {
                    self.sent.inline.add(length);
                    Memcpy::done(region)
                }
                Err(error) => Memcpy::refused(region, error),
            };
        }
        let (memcpy, token) = Memcpy::new(Arc::clone(&self.sender.link), self.sender.port);
        // The token reports a refusal.
        if self.sender.send(LocalMemory::Region(region), 0, token).is_ok() {
            self.sent.in_place.add(length);
        }
        memcpy
    }

    /// Sends a tensor once a buffer is free. A tensor in registered memory
    /// ([`Pool::for_sending`](tonic_rdma_verbs::memory::Pool)) is sent without a copy. A tensor in other
    /// memory is copied to registered memory first. The caller may drop the tensor at once.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use tonic_rdma_tensor::{Dtype, RdmaDevice, Shape, TensorSpec};
    /// # let server = RdmaDevice::bind("127.0.0.1:0").await?;
    /// # let worker = RdmaDevice::bind("127.0.0.1:0").await?;
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
    /// The tensor has another type or shape than the slot, or the receiver is lost.
    pub async fn send(&mut self, tensor: &Tensor) -> Result<(), TensorError> {
        self.check_spec(tensor)?;
        self.sender.ready().await?;
        self.send_tensor(tensor, Token::unobserved()).map(drop)
    }

    /// Sends a tensor as [`send`](Self::send) does, and waits until the device needs its memory no more.
    pub(crate) async fn send_to_end(&mut self, tensor: &Tensor) -> Result<(), TensorError> {
        self.check_spec(tensor)?;
        self.sender.ready().await?;
        let outcome = Arc::new(OutcomeCell::default());
        if !self.send_tensor(tensor, Token::future(&outcome))? {
            return Ok(());
        }
        let Sender { link, port, .. } = &self.sender;
        let ended = poll_fn(|context| poll_outcome(&outcome, link, *port, context)).await;
        ended.map_or(Ok(()), |outcome| outcome.result)
    }

    /// Begins to send a tensor as [`send`](Self::send) does, and returns at once.
    ///
    /// # Errors
    /// The errors of [`send`](Self::send), and [`Busy`](crate::TensorErrorKind::Busy) if no buffer is free.
    pub fn try_send(&mut self, tensor: &Tensor) -> Result<(), TensorError> {
        self.check_spec(tensor)?;
        self.sender.check_ready()?;
        self.send_tensor(tensor, Token::unobserved()).map(drop)
    }

    /// Begins to send a tensor of the right type and shape. A buffer must be free. Returns whether the device
    /// sends it from its memory. Then `token` gets the outcome.
    fn send_tensor(&mut self, tensor: &Tensor, token: Token) -> Result<bool, TensorError> {
        if !self.sender.is_small()
            && let Some((lease, range)) = tensor.registered()
            && self.sender.registers(&lease)
        {
            self.sender.send(LocalMemory::Lease(lease), range.start as u64, token)?;
            self.sent.in_place.add(range.len());
            return Ok(true);
        }
        match tensor.bytes() {
            Ok(bytes) => self.send_copied(bytes)?,
            Err(_) => self.send_copied(tensor.to_contiguous()?.bytes()?)?,
        }
        Ok(false)
    }

    /// Copies `bytes` to registered memory and sends them from there, once a buffer is free. A transport that
    /// does not allocate its users' tensors has to do this (the paper's RDMA.cp).
    ///
    /// # Errors
    /// `bytes` has another length than the tensor, or the receiver is lost.
    pub async fn send_bytes(&mut self, bytes: &[u8]) -> Result<(), TensorError> {
        self.check_length_exactly(bytes.len())?;
        self.sender.ready().await?;
        self.try_send_bytes(bytes)
    }

    /// Begins to send bytes as [`send_bytes`](Self::send_bytes) does, and returns at once.
    ///
    /// # Errors
    /// The errors of [`send_bytes`](Self::send_bytes), and [`Busy`](crate::TensorErrorKind::Busy) if no
    /// buffer is free.
    pub fn try_send_bytes(&mut self, bytes: &[u8]) -> Result<(), TensorError> {
        self.check_length_exactly(bytes.len())?;
        self.sender.check_ready()?;
        self.send_copied(bytes)
    }

    /// Sends a copy of `bytes`, and counts it. A buffer must be free.
    fn send_copied(&mut self, bytes: &[u8]) -> Result<(), TensorError> {
        self.sender.send_copied(bytes)?;
        let counts = if self.sender.is_small() { &mut self.sent.inline } else { &mut self.sent.copied };
        counts.add(bytes.len());
        Ok(())
    }

    fn payload(&self) -> usize {
        self.spec.bytes().unwrap_or(0) as usize
    }

    fn check_spec(&self, tensor: &Tensor) -> Result<(), TensorError> {
        if tensor.spec() == &self.spec { Ok(()) } else { Err(self.mismatch(tensor.spec().to_string())) }
    }

    fn check_length(&self, length: usize) -> Result<(), TensorError> {
        if length >= self.payload() { Ok(()) } else { Err(self.mismatch(format!("{length} bytes"))) }
    }

    fn check_length_exactly(&self, length: usize) -> Result<(), TensorError> {
        if length == self.payload() { Ok(()) } else { Err(self.mismatch(format!("{length} bytes"))) }
    }

    fn mismatch(&self, found: String) -> TensorError {
        TensorError::mismatch(&self.sender.name, self.spec, found)
    }
}

/// The receiving side of a static slot (§3.2), from
/// [`RdmaDevice::static_receiver`](crate::RdmaDevice::static_receiver): buffers for one tensor each.
#[derive(Debug)]
pub struct StaticReceiver {
    receiver: Receiver,
    spec: TensorSpec,
}

/// A tensor that has arrived, in the buffer that the sender wrote. Dropping it releases the buffer to the
/// sender.
///
/// Its bytes are read by copying, because a hostile peer could change them meanwhile.
/// [`copy_to`](Self::copy_to) copies all bytes at once, and [`for_each_chunk`](Self::for_each_chunk) copies
/// them through the first-level cache. A program that trusts its peer may read them in place, by
/// [`memory`](Self::memory) and [`SharedRegion::as_slice`].
///
/// The buffer is released before the receiver can take another tensor, and no reference to the buffer lives
/// longer than this value:
///
/// ```no_run
/// # use tonic_rdma_tensor::{TensorError, StaticReceiver};
/// # fn receive(mut receiver: StaticReceiver) -> Result<(), TensorError> {
/// if let Some(arrived) = receiver.try_recv()? {
///     let (memory, _range) = arrived.memory();
///     let _ = memory.len();
///     drop(arrived);
/// }
/// let _next = receiver.try_recv()?;
/// # Ok(())
/// # }
/// ```
///
/// The compiler refuses a use of the memory after the release:
///
/// ```compile_fail,E0505
/// # use tonic_rdma_tensor::{TensorError, StaticReceiver};
/// # fn receive(mut receiver: StaticReceiver) -> Result<(), TensorError> {
/// if let Some(arrived) = receiver.try_recv()? {
///     let (memory, _range) = arrived.memory();
///     drop(arrived); // borrowed
///     let _ = memory.len();
/// }
/// # Ok(())
/// # }
/// ```
///
/// The compiler refuses to take a second tensor before the release of the first one:
///
/// ```compile_fail,E0499
/// # use tonic_rdma_tensor::{TensorError, StaticReceiver};
/// # fn receive(mut receiver: StaticReceiver) -> Result<(), TensorError> {
/// let one = receiver.try_recv()?;
/// let two = receiver.try_recv()?; // borrowed
/// let _ = (one.is_some(), two.is_some());
/// # Ok(())
/// # }
/// ```
///
/// The compiler refuses to keep a tensor longer than its receiver:
///
/// ```compile_fail,E0515
/// # use tonic_rdma_tensor::{Arrived, TensorError, StaticReceiver};
/// # fn receive(mut receiver: StaticReceiver) -> Result<Option<Arrived<'static>>, TensorError> {
/// receiver.try_recv() // borrowed
/// # }
/// ```
#[derive(Debug)]
pub struct Arrived<'a> {
    receiver: &'a mut StaticReceiver,
    start: usize,
}

impl StaticReceiver {
    pub(crate) fn new(receiver: Receiver, spec: TensorSpec) -> Self {
        Self { receiver, spec }
    }

    /// Returns the type and shape of the tensors.
    pub fn spec(&self) -> &TensorSpec {
        &self.spec
    }

    /// Takes the next tensor if it has arrived. This loads a word of memory, which stays in the cache until
    /// the sender writes to it, and now and then does some work of the device. So a thread may call this again and again, between other work.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use tonic_rdma_tensor::{Dtype, RdmaDevice, Shape, TensorSpec};
    /// # let server = RdmaDevice::bind("127.0.0.1:0").await?;
    /// # let worker = RdmaDevice::bind("127.0.0.1:0").await?;
    /// # let channel = worker.channel(&server.endpoint(), 0).await?;
    /// # let spec = TensorSpec::new(Dtype::F32, Shape::new(&[256])?)?;
    /// # let mut slot = server.static_receiver("loss", &spec, 1)?;
    /// # let mut sender = channel.static_sender("loss", &spec).await?;
    /// # sender.send_bytes(&[0; 1024]).await?;
    /// loop {
    ///     if let Some(arrived) = slot.try_recv()? {
    ///         assert_eq!(arrived.len(), 1024);
    ///         break;
    ///     }
    ///     std::hint::spin_loop(); // or other work
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The sender is lost, and all tensors that it had completed were taken. Once another sender has
    /// attached, its tensors come.
    pub fn try_recv(&mut self) -> Result<Option<Arrived<'_>>, TensorError> {
        let start = self.receiver.take()?;
        Ok(start.map(|start| Arrived { receiver: self, start }))
    }

    /// Waits for the next tensor. Dropping the future loses nothing.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use tonic_rdma_tensor::{Dtype, RdmaDevice, Shape, TensorSpec};
    /// # let server = RdmaDevice::bind("127.0.0.1:0").await?;
    /// # let worker = RdmaDevice::bind("127.0.0.1:0").await?;
    /// # let channel = worker.channel(&server.endpoint(), 0).await?;
    /// # let spec = TensorSpec::new(Dtype::F32, Shape::new(&[256])?)?;
    /// # let mut slot = server.static_receiver("loss", &spec, 1)?;
    /// # let mut sender = channel.static_sender("loss", &spec).await?;
    /// # sender.send_bytes(&[1; 1024]).await?;
    /// let arrived = slot.recv().await?;
    /// let mut sum = 0_u64;
    /// arrived.for_each_chunk(|bytes| sum += bytes.iter().map(|&byte| u64::from(byte)).sum::<u64>());
    /// assert_eq!(sum, 1024);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The errors of [`try_recv`](Self::try_recv).
    pub async fn recv(&mut self) -> Result<Arrived<'_>, TensorError> {
        let start = loop {
            self.receiver.wait().await?;
            if let Some(start) = self.receiver.take()? {
                break start;
            }
        };
        Ok(Arrived { receiver: self, start })
    }

    /// Waits until the next tensor has arrived, and leaves it in the slot. So one task may wait, and another
    /// thread may then take the tensor by [`try_recv`](Self::try_recv). Dropping the future loses nothing.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use tonic_rdma_tensor::{Dtype, RdmaDevice, Shape, TensorSpec};
    /// # let server = RdmaDevice::bind("127.0.0.1:0").await?;
    /// # let worker = RdmaDevice::bind("127.0.0.1:0").await?;
    /// # let channel = worker.channel(&server.endpoint(), 0).await?;
    /// # let spec = TensorSpec::new(Dtype::F32, Shape::new(&[256])?)?;
    /// # let mut slot = server.static_receiver("loss", &spec, 1)?;
    /// # let mut sender = channel.static_sender("loss", &spec).await?;
    /// # sender.send_bytes(&[1; 1024]).await?;
    /// slot.arrived().await?;
    /// let arrived = slot.try_recv()?.expect("it has arrived");
    /// assert_eq!(arrived.len(), 1024);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The errors of [`try_recv`](Self::try_recv).
    pub async fn arrived(&mut self) -> Result<(), TensorError> {
        self.receiver.wait().await
    }
}

impl Arrived<'_> {
    /// Returns the type and shape of the tensor.
    pub fn spec(&self) -> &TensorSpec {
        &self.receiver.spec
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.receiver.receiver.slot.layout.payload
    }

    /// Returns whether the tensor has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the slot's memory, and the range of the tensor in it, in bytes.
    pub fn memory(&self) -> (&SharedRegion, Range<usize>) {
        let slot = &self.receiver.receiver.slot;
        (&slot.memory, self.start..self.start + slot.layout.payload)
    }

    /// Copies the whole tensor to `destination`, which must have the tensor's length.
    ///
    /// # Errors
    /// `destination` has another length.
    pub fn copy_to(&self, destination: &mut [u8]) -> Result<(), TensorError> {
        let (memory, range) = self.memory();
        if destination.len() != range.len() {
            let [expected, found] = [range.len(), destination.len()].map(|length| format!("{length} bytes"));
            return Err(TensorError::mismatch(&self.receiver.receiver.slot.name, expected, found));
        }
        memory.copy_out(range.start, destination).map_err(TensorError::local)
    }

    /// Calls `then` with the bytes, chunk by chunk, through a buffer that stays in the cache. The first byte
    /// of each chunk is aligned to 64 bytes. The length of every chunk but the last is a multiple of 64
    /// bytes.
    pub fn for_each_chunk(&self, then: impl FnMut(&[u8])) {
        let (memory, range) = self.memory();
        // The range is the slot's own, so it is within the memory.
        let _ = memory.for_each_chunk(range, then);
    }

    /// Copies the tensor out of the slot.
    ///
    /// # Errors
    /// There is no memory for it.
    pub fn to_tensor(&self) -> Result<Tensor, TensorError> {
        let mut bytes = vec![0; self.len()];
        self.copy_to(&mut bytes)?;
        Tensor::from_bytes(self.receiver.spec, bytes.into())
    }
}

impl Drop for Arrived<'_> {
    fn drop(&mut self) {
        self.receiver.receiver.release();
    }
}
