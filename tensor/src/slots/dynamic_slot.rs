//! Dynamic slots, for tensors of any shape: the sender announces each tensor, and the receiver reads it.

use std::collections::VecDeque;
use std::error::Error;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;

use bytes::{Buf, BufMut};
use tokio::task::consume_budget;

use crate::error::TensorError;
use crate::link::port::{OutcomeCell, Token};
use crate::memory::{Content, Payload, RegionCache, freeze};
use crate::slots::sender::{Sender, SentCounts};
use crate::slots::slot::{AttachedSender, Receiver};
use crate::types::{Metadata, Tensor};
use crate::wire::tensor_metadata::{MetadataError, WireMetadata};
use tonic_rdma_verbs::unstable::{
    CopyRange, CopyRanges, Grant, LocalMemory, RemoteRange, Transfer, TransferKind,
};
use tonic_rdma_verbs::{RemoteSegment, Rkey};

/// The sending side of a dynamic slot (§3.3), from
/// [`Channel::dynamic_sender`](crate::Channel::dynamic_sender). The peer reads each tensor from the sender's
/// memory, and has the right to do so until it has read the tensor.
#[derive(Debug)]
pub struct DynamicSender {
    sender: Sender,
    /// The rights that the peer may be using, and the epochs whose release ends them.
    lent: VecDeque<(u64, Option<Grant>)>,
    sent: SentCounts,
}

impl DynamicSender {
    pub(crate) fn new(sender: Sender) -> Self {
        Self { sender, lent: VecDeque::new(), sent: SentCounts::default() }
    }

    /// Announces a tensor to the peer, once the slot has room. The peer reads the tensor from registered
    /// memory ([`Pool::for_sending`](tonic_rdma_verbs::memory::Pool)). A tensor in other memory is copied
    /// first. A tensor that is not contiguous, or has strings, is serialised.
    ///
    /// This returns before the peer has read the tensor. [`flush`](Self::flush) waits for that.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use tonic_rdma_tensor::{Dtype, RdmaDevice, Shape, Tensor, TensorSpec};
    /// # let server = RdmaDevice::bind("127.0.0.1:0").await?;
    /// # let worker = RdmaDevice::bind("127.0.0.1:0").await?;
    /// # let channel = worker.channel(&server.endpoint(), 0).await?;
    /// # let mut slot = server.dynamic_receiver("activations", 4)?;
    /// # let mut sender = channel.dynamic_sender("activations").await?;
    /// for rows in [1, 5, 2] {
    ///     let spec = TensorSpec::new(Dtype::U8, Shape::new(&[rows, 2])?)?;
    ///     let tensor = Tensor::copy_from(spec, &vec![7; 2 * rows as usize])?;
    ///     sender.send(&tensor).await?;
    ///     # assert_eq!(slot.recv().await?.shape().dims(), [rows, 2]);
    /// }
    /// sender.flush().await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The receiver is lost, or there is no memory for a copy.
    pub async fn send(&mut self, tensor: &Tensor) -> Result<(), TensorError> {
        self.sender.ready().await?;
        self.offer(tensor)
    }

    /// Announces a tensor as [`send`](Self::send) does, and returns at once.
    ///
    /// # Errors
    /// The errors of [`send`](Self::send), and [`Busy`](crate::TensorErrorKind::Busy) if the slot has no
    /// room.
    pub fn try_send(&mut self, tensor: &Tensor) -> Result<(), TensorError> {
        self.sender.check_ready()?;
        self.offer(tensor)
    }

    /// Returns how many tensors this sender has announced without a copy, and with one. A tensor without
    /// elements counts as inline.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use tonic_rdma_tensor::{Dtype, RdmaDevice, Shape, TensorMut, TensorSpec};
    /// # let server = RdmaDevice::bind("127.0.0.1:0").await?;
    /// # let worker = RdmaDevice::bind("127.0.0.1:0").await?;
    /// # let channel = worker.channel(&server.endpoint(), 0).await?;
    /// # let _slot = server.dynamic_receiver("activations", 4)?;
    /// # let mut sender = channel.dynamic_sender("activations").await?;
    /// # let pool = tonic_rdma::memory::Pool::for_sending(1 << 20);
    /// let tensor = TensorMut::in_pool(TensorSpec::new(Dtype::U8, Shape::new(&[100])?)?, &pool)?;
    /// sender.send(&tensor.freeze()).await?;
    /// assert_eq!((sender.sent().in_place.tensors, sender.sent().copied.tensors), (1, 0));
    /// # Ok(())
    /// # }
    /// ```
    pub fn sent(&self) -> SentCounts {
        self.sent
    }

    /// Returns whether the slot has room for the next tensor.
    ///
    /// # Errors
    /// The receiver is lost.
    pub fn is_ready(&mut self) -> Result<bool, TensorError> {
        self.sender.is_ready()
    }

    /// Waits until the slot has room for the next tensor.
    ///
    /// # Errors
    /// The receiver is lost.
    pub async fn ready(&mut self) -> Result<(), TensorError> {
        self.sender.ready().await
    }

    fn offer(&mut self, tensor: &Tensor) -> Result<(), TensorError> {
        self.revoke_released();
        let payload = Payload::of(tensor)?;
        let (grant, place) = match payload.metadata.bytes {
            0 => (None, RemoteRange { start: RemoteSegment { address: 0, rkey: Rkey(0) }, length: 0 }),
            _ => {
                let grant = self.sender.link.grant_payload(&payload)?;
                let place = grant.range();
                (Some(grant), place)
            }
        };
        let epoch = self.sender.next;
        let announcement = Announcement { metadata: payload.metadata, place };
        self.sender.send_copied(&announcement.encode())?;
        let counts = match (&grant, &payload.content) {
            (None, _) => &mut self.sent.inline,
            (Some(_), Content::Registered(..)) => &mut self.sent.in_place,
            (Some(_), Content::Bytes(_)) => &mut self.sent.copied,
        };
        counts.add(payload.metadata.bytes as usize);
        self.lent.push_back((epoch, grant));
        Ok(())
    }

    /// Waits until the peer has read all tensors. [`send`](Self::send) has an example.
    ///
    /// # Errors
    /// The receiver is lost.
    pub async fn flush(&mut self) -> Result<(), TensorError> {
        if let Some((last, _)) = self.lent.back() {
            self.sender.wait_for(*last).await?;
        }
        self.revoke_released();
        Ok(())
    }

    /// Returns how many of the sent tensors the peer has not read yet.
    ///
    /// # Errors
    /// The receiver is lost.
    pub fn pending(&mut self) -> Result<u64, TensorError> {
        let pending = self.sender.pending();
        self.revoke_released();
        pending
    }

    /// Takes away the rights to tensors that the peer has read.
    fn revoke_released(&mut self) {
        let released = self.sender.released();
        while self.lent.front().is_some_and(|(epoch, _)| *epoch <= released) {
            self.lent.pop_front();
        }
    }
}

impl Drop for DynamicSender {
    fn drop(&mut self) {
        self.revoke_released();
        // Rights that the peer still uses stay until the link ends, because revoking them now would end the
        // link.
        let lent = self.lent.drain(..).filter_map(|(_, grant)| grant);
        self.sender.link.keep(lent);
    }
}

/// The receiving side of a dynamic slot (§3.3), from
/// [`RdmaDevice::dynamic_receiver`](crate::RdmaDevice::dynamic_receiver). It learns the shape and the address
/// of a tensor, allocates memory, and reads the tensor.
#[derive(Debug)]
pub struct DynamicReceiver {
    receiver: Receiver,
    region_cache: Arc<RegionCache>,
    longest: u64,
    /// The tensor that is being read.
    reading: Option<PendingRead>,
}

#[derive(Debug)]
struct PendingRead {
    metadata: Metadata,
    outcome: Arc<OutcomeCell>,
    by: AttachedSender,
}

impl DynamicReceiver {
    pub(crate) fn new(receiver: Receiver, region_cache: Arc<RegionCache>, longest: u64) -> Self {
        Self { receiver, region_cache, longest, reading: None }
    }

    /// Takes the next tensor if it is here. Begins to read the next tensor if the sender has announced one.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use tonic_rdma_tensor::{RdmaDevice, Shape, Tensor};
    /// # let server = RdmaDevice::bind("127.0.0.1:0").await?;
    /// # let worker = RdmaDevice::bind("127.0.0.1:0").await?;
    /// # let channel = worker.channel(&server.endpoint(), 0).await?;
    /// # let mut slot = server.dynamic_receiver("tokens", 4)?;
    /// # let mut sender = channel.dynamic_sender("tokens").await?;
    /// # sender.send(&Tensor::from_strings(Shape::new(&[2])?, ["a", "b"])?).await?;
    /// let tensor = loop {
    ///     match slot.try_recv()? {
    ///         Some(tensor) => break tensor,
    ///         None => tokio::task::yield_now().await, // or other work
    ///     }
    /// };
    /// assert_eq!(tensor.shape().dims(), [2]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The sender is lost, or it announced an impossible tensor, which ends its link.
    pub fn try_recv(&mut self) -> Result<Option<Tensor>, TensorError> {
        if !self.advance()? {
            return Ok(None);
        }
        let outcome = self.reading.as_ref().and_then(|reading| reading.outcome.take());
        let Some(outcome) = outcome else { return Ok(None) };
        let Some(PendingRead { metadata, by, .. }) = self.reading.take() else { return Ok(None) };
        self.receiver.release();
        outcome.result?;
        let LocalMemory::Region(region) = outcome.local else { return Ok(None) };
        let bytes = freeze(region, metadata.bytes());
        let tensor =
            Tensor::deserialize(&metadata, bytes).map_err(|error| by.link.fail(by.link.violation(error)))?;
        Ok(Some(tensor))
    }

    /// Waits for the next tensor, and reads it. Dropping the future loses nothing.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use tonic_rdma_tensor::{RdmaDevice, Shape, Tensor};
    /// # let server = RdmaDevice::bind("127.0.0.1:0").await?;
    /// # let worker = RdmaDevice::bind("127.0.0.1:0").await?;
    /// # let channel = worker.channel(&server.endpoint(), 0).await?;
    /// # let mut slot = server.dynamic_receiver("tokens", 4)?;
    /// # let mut sender = channel.dynamic_sender("tokens").await?;
    /// # sender.send(&Tensor::from_strings(Shape::new(&[2])?, ["a", "b"])?).await?;
    /// let tensor = slot.recv().await?;
    /// assert_eq!(tensor.strings()?.count(), 2);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The errors of [`try_recv`](Self::try_recv).
    pub async fn recv(&mut self) -> Result<Tensor, TensorError> {
        loop {
            self.arrived().await?;
            if let Some(tensor) = self.try_recv()? {
                return Ok(tensor);
            }
        }
    }

    /// Waits until the next tensor is here: the sender has announced it, and it has been read. The receiver
    /// keeps it. So one task may wait, and another thread may then take the tensor by
    /// [`try_recv`](Self::try_recv). Dropping the future loses nothing.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use tonic_rdma_tensor::{RdmaDevice, Shape, Tensor};
    /// # let server = RdmaDevice::bind("127.0.0.1:0").await?;
    /// # let worker = RdmaDevice::bind("127.0.0.1:0").await?;
    /// # let channel = worker.channel(&server.endpoint(), 0).await?;
    /// # let mut slot = server.dynamic_receiver("tokens", 4)?;
    /// # let mut sender = channel.dynamic_sender("tokens").await?;
    /// # sender.send(&Tensor::from_strings(Shape::new(&[2])?, ["a", "b"])?).await?;
    /// slot.arrived().await?;
    /// let tensor = slot.try_recv()?.expect("it is here");
    /// assert_eq!(tensor.strings()?.count(), 2);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The sender is lost, or it announced an impossible tensor, which ends its link. A failure of the read
    /// is the error of the next [`try_recv`](Self::try_recv).
    pub async fn arrived(&mut self) -> Result<(), TensorError> {
        consume_budget().await;
        while !self.advance()? {
            match &self.reading {
                None => self.receiver.wait().await?,
                Some(reading) => {
                    poll_fn(|context| match reading.outcome.is_ready(context) {
                        true => Poll::Ready(()),
                        false => Poll::Pending,
                    })
                    .await;
                }
            }
        }
        Ok(())
    }

    /// Begins to read the next tensor if the sender has announced one. Returns whether a read is over.
    fn advance(&mut self) -> Result<bool, TensorError> {
        if self.reading.is_none() {
            let Some(start) = self.receiver.take()? else { return Ok(false) };
            if let Err(error) = self.begin(start) {
                self.reading = None;
                // The tensor can be taken again.
                self.receiver.slot.let_go();
                return Err(error);
            }
        }
        let Some(reading) = &self.reading else { return Ok(false) };
        if !reading.outcome.is_over() {
            reading.by.link.poll(reading.by.port);
        }
        Ok(reading.outcome.is_over())
    }

    /// Begins to read the tensor that the announcement at `start` describes.
    fn begin(&mut self, start: usize) -> Result<(), TensorError> {
        let by = self.receiver.attached()?;
        let mut bytes = [0; Announcement::LENGTH];
        self.receiver.slot.memory.copy_out(start, &mut bytes).map_err(TensorError::local)?;
        let fail = |cause: Box<dyn Error + Send + Sync>| by.link.fail(by.link.violation(cause));
        let announced = Announcement::decode(&bytes).map_err(|error| fail(error.into()))?;
        let metadata = Metadata::try_from(announced.metadata).map_err(|error| fail(error.into()))?;
        let length = metadata.bytes();
        if length > self.longest {
            let longest = self.longest;
            return Err(fail(format!("a tensor of {length} bytes, which is longer than {longest}").into()));
        }
        let region = self.region_cache.take(length)?;
        let outcome = Arc::new(OutcomeCell::default());
        let blocks = CopyRanges::One(CopyRange { local: 0, remote: 0, length });
        let token = Token::future(&outcome);
        self.reading = Some(PendingRead { metadata, outcome, by: by.clone() });
        if length == 0 {
            token.finish(LocalMemory::Region(region));
            return Ok(());
        }
        let transfer =
            Transfer::new(LocalMemory::Region(region), TransferKind::Read, blocks, announced.place, token);
        // The token reports a refusal.
        let _ = by.link.port(by.port).submit(transfer, length, TransferKind::Read);
        Ok(())
    }
}

/// The metadata of a tensor, and its address. A sender of a dynamic slot writes one for each tensor (§3.3).
/// The length is fixed, so that the slot fits tensors of any shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Announcement {
    pub(crate) metadata: WireMetadata,
    pub(crate) place: RemoteRange,
}

/// The reason why bytes are no announcement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum AnnouncementError {
    #[error(transparent)]
    Metadata(#[from] MetadataError),
    #[error("{place} bytes for a tensor of {tensor}")]
    Length { place: u64, tensor: u64 },
}

impl Announcement {
    /// Metadata, address, length, key, and four unused bytes.
    pub(crate) const LENGTH: usize = WireMetadata::LENGTH + 24;

    pub(crate) fn encode(&self) -> [u8; Self::LENGTH] {
        let mut bytes = [0; Self::LENGTH];
        let mut fields = &mut bytes[..];
        fields.put_slice(&self.metadata.encode());
        fields.put_u64_le(self.place.start.address);
        fields.put_u64_le(self.place.length);
        fields.put_u32_le(self.place.start.rkey.0);
        bytes
    }

    pub(crate) fn decode(bytes: &[u8; Self::LENGTH]) -> Result<Self, AnnouncementError> {
        let (metadata, mut fields) = bytes.split_at(WireMetadata::LENGTH);
        let metadata = WireMetadata::decode(metadata)?;
        // The fields have a fixed length, so none of them is missing.
        let (address, length) = (fields.get_u64_le(), fields.get_u64_le());
        let start = RemoteSegment { address, rkey: Rkey(fields.get_u32_le()) };
        if length != metadata.bytes {
            return Err(AnnouncementError::Length { place: length, tensor: metadata.bytes });
        }
        Ok(Self { metadata, place: RemoteRange { start, length } })
    }
}
