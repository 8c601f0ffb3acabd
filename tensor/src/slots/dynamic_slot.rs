//! Dynamic slots, for tensors of any shape: the sender announces each tensor, and the receiver reads it.

use std::collections::VecDeque;
use std::error::Error;
use std::future::poll_fn;
use std::sync::Arc;

use bytes::{Buf, BufMut};
use tokio::task::consume_budget;

use crate::error::TensorError;
use crate::link::port::{Outcome, OutcomeCell, Token};
use crate::memory::{Payload, RegionCache, freeze};
use crate::slots::sender::{Sender, SentCounts};
use crate::slots::slot::{AttachedSender, Receiver};
use crate::types::{Metadata, Tensor};
use crate::wire::tensor_frame::TensorMemory;
use crate::wire::tensor_metadata::WireMetadata;
use tonic_rdma_verbs::memory::MemRegion;
use tonic_rdma_verbs::unstable::{Grant, LocalMemory, RemoteRange, Revocation, Transfer, TransferKind};
use tonic_rdma_verbs::{RemoteSegment, Rkey};

/// The sending side of a dynamic slot (§3.3), from
/// [`Channel::dynamic_sender`](crate::Channel::dynamic_sender). The peer reads each tensor from the sender's
/// memory, and has the right to do so until it has read the tensor.
#[derive(Debug)]
pub struct DynamicSender {
    sender: Sender,
    /// The rights that the peer may be using, and the epochs whose release ends them.
    lent: VecDeque<(u64, Option<Grant>)>,
    /// The end of the right that was taken away last. Those before it end earlier.
    revoked: Revocation,
    sent: SentCounts,
}

impl DynamicSender {
    pub(crate) fn new(sender: Sender) -> Self {
        Self { sender, lent: VecDeque::new(), revoked: Revocation::default(), sent: SentCounts::default() }
    }

    /// Announces a tensor to the peer, once the slot has room. The peer reads the tensor from registered
    /// memory ([`Pool::for_sending`](tonic_rdma_verbs::memory::Pool)). A tensor in other memory is copied
    /// first, and so is every tensor if the device has no memory windows, as Soft-RoCE and soft-iWARP. A tensor
    /// that is not contiguous, or has strings, is serialised.
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
        let granted = match payload.metadata.bytes {
            0 => None,
            _ => Some(self.sender.link.grant_payload(&payload, self.sender.port)?),
        };
        let nowhere = RemoteRange { start: RemoteSegment { address: 0, rkey: Rkey(0) }, length: 0 };
        let place = granted.as_ref().map_or(nowhere, |(grant, _)| grant.range());
        let epoch = self.sender.next;
        self.sender.send_copied(&encode(&TensorMemory { metadata: payload.metadata, place }))?;
        let counts = match &granted {
            None => &mut self.sent.inline,
            Some((_, false)) => &mut self.sent.in_place,
            Some((_, true)) => &mut self.sent.copied,
        };
        counts.add(payload.metadata.bytes as usize);
        self.lent.push_back((epoch, granted.map(|(grant, _)| grant)));
        Ok(())
    }

    /// Waits until the peer has read all tensors, and has no right to them any more.
    /// [`send`](Self::send) has an example.
    ///
    /// # Errors
    /// The receiver is lost.
    pub async fn flush(&mut self) -> Result<(), TensorError> {
        if let Some((last, _)) = self.lent.back() {
            self.sender.wait_for(*last).await?;
        }
        self.revoke_released();
        (&mut self.revoked).await;
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
            if let Some((_, Some(grant))) = self.lent.pop_front() {
                let revocation = grant.revoke();
                // Windows end in order. A registration has ended already, and says nothing about them.
                if !revocation.is_over() {
                    self.revoked = revocation;
                }
            }
        }
    }
}

impl Drop for DynamicSender {
    fn drop(&mut self) {
        self.revoke_released();
        // Rights that the peer still uses stay, because revoking them now would end the link.
        let lent = self.lent.drain(..).filter_map(|(_, grant)| grant).collect();
        self.sender.keep(lent);
    }
}

/// The receiving side of a dynamic slot (§3.3), from
/// [`RdmaDevice::dynamic_receiver`](crate::RdmaDevice::dynamic_receiver). It learns the shape and the address
/// of a tensor, allocates memory, and reads the tensor.
///
/// The receiver reads several tensors at once, in every call and while it waits, as far as the sender has
/// announced them: as many as the slot has buffers, and 64 MiB of them at most, counted until the receiver
/// returns them. It reads a longer tensor alone. It reads ahead only while half of the device's registered
/// memory (`RDMA_PINNED_LIMIT`) stays free. The sender may free each tensor when the receiver returns it.
#[derive(Debug)]
pub struct DynamicReceiver {
    receiver: Receiver,
    region_cache: Arc<RegionCache>,
    longest: u64,
    /// The tensors that are being read or have been read, in the order of their announcements.
    reading: VecDeque<PendingRead>,
    /// Whether a tensor is announced that can't be read ahead now.
    is_held_back: bool,
}

#[derive(Debug)]
struct PendingRead {
    metadata: Metadata,
    outcome: Arc<OutcomeCell>,
    by: AttachedSender,
}

impl DynamicReceiver {
    /// The bytes of all tensors that are read at once, if there are several. Few in the unit tests.
    const READ_AHEAD: u64 = if cfg!(test) { 1 << 20 } else { 64 << 20 };

    pub(crate) fn new(receiver: Receiver, region_cache: Arc<RegionCache>, longest: u64) -> Self {
        Self { receiver, region_cache, longest, reading: VecDeque::new(), is_held_back: false }
    }

    /// Takes the next tensor if it is here. Begins to read the tensors that the sender has announced.
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
    /// The sender is lost, or it announced an impossible tensor, which ends its link. After
    /// [`NoMemory`](crate::TensorErrorKind::NoMemory) and [`Busy`](crate::TensorErrorKind::Busy) the tensor
    /// can be taken again.
    pub fn try_recv(&mut self) -> Result<Option<Tensor>, TensorError> {
        let Some((metadata, region, by)) = self.take_read(&mut |_| None)? else { return Ok(None) };
        let bytes = freeze(region, metadata.bytes());
        let read =
            Tensor::deserialize(&metadata, bytes).map_err(|error| by.link.fail(by.link.violation(error)));
        if read.is_err() {
            self.put_back();
        }
        read.map(Some)
    }

    /// Takes the next tensor as [`try_recv`](Self::try_recv) does, in the memory into which it was read.
    /// `memory` gives memory for a tensor that is about to be read, of [`Metadata::bytes`] bytes. If it gives
    /// none, or memory of another length, the receiver takes its own.
    ///
    /// # Errors
    /// Those of [`try_recv`](Self::try_recv).
    pub(crate) fn try_recv_into(
        &mut self,
        memory: &mut dyn FnMut(&Metadata) -> Option<MemRegion>,
    ) -> Result<Option<(Metadata, MemRegion)>, TensorError> {
        Ok(self.take_read(memory)?.map(|(metadata, region, _)| (metadata, region)))
    }

    /// Returns the number of tensors that are being read, or have been read and are not taken.
    pub(crate) fn reads(&self) -> usize {
        self.reading.len()
    }

    /// Waits until the next tensor is announced or, if it is being read, has been read. Begins no read.
    ///
    /// # Errors
    /// The sender is lost.
    pub(crate) async fn stirs(&mut self) -> Result<(), TensorError> {
        consume_budget().await;
        let Some(first) = self.reading.front() else { return self.receiver.wait().await };
        let outcome = Arc::clone(&first.outcome);
        poll_fn(|context| outcome.poll_over(context)).await;
        Ok(())
    }

    /// Takes the next tensor that has been read.
    fn take_read(
        &mut self,
        memory: &mut dyn FnMut(&Metadata) -> Option<MemRegion>,
    ) -> Result<Option<(Metadata, MemRegion, AttachedSender)>, TensorError> {
        if !self.advance(memory)? {
            return Ok(None);
        }
        let outcome = self.reading.front().and_then(|reading| reading.outcome.take());
        let Some(outcome) = outcome else { return Ok(None) };
        let Some(PendingRead { metadata, by, .. }) = self.reading.pop_front() else { return Ok(None) };
        self.receiver.release();
        let LocalMemory::Region(region) = outcome.local else { return Ok(None) };
        match outcome.result {
            Ok(()) => Ok(Some((metadata, region, by))),
            Err(error) => {
                self.put_back();
                Err(error)
            }
        }
    }

    /// Leaves the tensors that are being read: the link has ended, so none of them is delivered.
    fn put_back(&mut self) {
        self.receiver.put_back(self.reading.len() as u64);
        self.reading.clear();
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
        while !self.advance(&mut |_| None)? {
            let Some(first) = self.reading.front() else {
                self.receiver.wait().await?;
                continue;
            };
            let outcome = Arc::clone(&first.outcome);
            let mut read = poll_fn(|context| outcome.poll_over(context));
            if self.is_held_back || !self.has_buffer() {
                read.await;
                continue;
            }
            tokio::select! {
                biased;
                () = &mut read => {}
                announced = self.receiver.wait() => if announced.is_err() {
                    // The link has ended, and the outcome says so after the tensors that were read before.
                    read.await;
                }
            }
        }
        Ok(())
    }

    /// Begins to read the tensors that the sender has announced, as far as they may be read at once. Returns
    /// whether the first read is over.
    fn advance(
        &mut self,
        memory: &mut dyn FnMut(&Metadata) -> Option<MemRegion>,
    ) -> Result<bool, TensorError> {
        self.is_held_back = false;
        while self.has_buffer() && self.begin_next(memory)? {}
        let Some(first) = self.reading.front() else { return Ok(false) };
        if !first.outcome.is_over() {
            first.by.link.poll(first.by.port);
        }
        Ok(first.outcome.is_over())
    }

    /// Returns whether the sender may have announced a tensor behind those that are being read.
    fn has_buffer(&self) -> bool {
        self.reading.len() < self.receiver.slot.layout.depth as usize
    }

    /// Begins to read the next tensor. Returns false if none is announced, or if it can't be read ahead.
    fn begin_next(
        &mut self,
        memory: &mut dyn FnMut(&Metadata) -> Option<MemRegion>,
    ) -> Result<bool, TensorError> {
        let reads_ahead = !self.reading.is_empty();
        let start = match self.receiver.take() {
            Ok(Some(start)) => start,
            Ok(None) => return Ok(false),
            // The error comes again, after the tensors that are being read.
            Err(_) if reads_ahead => return Ok(false),
            Err(error) => return Err(error),
        };
        let begun = self.begin(start, reads_ahead, memory);
        if !matches!(begun, Ok(true)) {
            // The tensor can be taken again.
            self.receiver.put_back(1);
            self.is_held_back = true;
        }
        if reads_ahead { Ok(begun.unwrap_or(false)) } else { begun }
    }

    /// Begins to read the tensor that the announcement at `start` describes. Returns false if the tensor
    /// can't be read ahead. While other tensors are being read, an impossible announcement is not reported,
    /// because those tensors come first.
    fn begin(
        &mut self,
        start: usize,
        reads_ahead: bool,
        memory: &mut dyn FnMut(&Metadata) -> Option<MemRegion>,
    ) -> Result<bool, TensorError> {
        let by = self.receiver.attached()?;
        let (metadata, place) = match self.announced(start) {
            Ok(announced) => announced,
            Err(_) if reads_ahead => return Ok(false),
            Err(cause) => return Err(by.link.fail(by.link.violation(cause))),
        };
        let length = metadata.bytes();
        if reads_ahead && !self.may_read_ahead(length) {
            return Ok(false);
        }
        let given = memory(&metadata).filter(|region| length > 0 && region.len() as u64 == length);
        let region = given.map_or_else(|| self.region_cache.take(length), Ok)?;
        let outcome = Arc::new(OutcomeCell::default());
        let (token, local) = (Token::future(&outcome), LocalMemory::Region(region));
        if length == 0 {
            token.finish(Outcome { local, result: Ok(()) });
        } else {
            let transfer = Transfer::of_range(local, 0, length, TransferKind::Read, place, token);
            if let Err(error) = by.link.port(by.port).submit(transfer) {
                // If the port is full, the next attempt finds room.
                by.link.poll(by.port);
                return Err(error);
            }
        }
        self.reading.push_back(PendingRead { metadata, outcome, by });
        Ok(true)
    }

    /// Returns the tensor that the announcement at `start` describes, and its address.
    fn announced(&self, start: usize) -> Result<(Metadata, RemoteRange), BoxedError> {
        let mut bytes = [0; ANNOUNCEMENT];
        self.receiver.slot.memory.copy_out(start, &mut bytes)?;
        let TensorMemory { metadata, place } = decode(&bytes)?;
        let metadata = Metadata::try_from(metadata)?;
        let (length, longest) = (metadata.bytes(), self.longest);
        if length > longest {
            return Err(format!("a tensor of {length} bytes, which is longer than {longest}").into());
        }
        Ok((metadata, place))
    }

    /// Returns whether a tensor of `length` bytes may be read while others are.
    fn may_read_ahead(&self, length: u64) -> bool {
        let all = self.reading.iter().map(|reading| reading.metadata.bytes());
        let all = all.fold(length, u64::saturating_add);
        all <= Self::READ_AHEAD && self.region_cache.leaves_half(length)
    }
}

type BoxedError = Box<dyn Error + Send + Sync>;

/// The length of an announcement, which a sender of a dynamic slot writes for each tensor (§3.3): metadata, address, length,
/// key, and four unused bytes. It is fixed, so that the slot fits tensors of any shape.
pub(crate) const ANNOUNCEMENT: usize = WireMetadata::LENGTH + 24;

fn encode(announced: &TensorMemory) -> [u8; ANNOUNCEMENT] {
    let mut bytes = [0; ANNOUNCEMENT];
    let mut fields = &mut bytes[..];
    fields.put_slice(&announced.metadata.encode());
    fields.put_u64_le(announced.place.start.address);
    fields.put_u64_le(announced.place.length);
    fields.put_u32_le(announced.place.start.rkey.0);
    bytes
}

fn decode(bytes: &[u8; ANNOUNCEMENT]) -> Result<TensorMemory, BoxedError> {
    let (metadata, mut fields) = bytes.split_at(WireMetadata::LENGTH);
    let metadata = WireMetadata::decode(metadata)?;
    // The fields have a fixed length, so none of them is missing.
    let (address, length) = (fields.get_u64_le(), fields.get_u64_le());
    if length != metadata.bytes {
        return Err(format!("{length} bytes for a tensor of {}", metadata.bytes).into());
    }
    let start = RemoteSegment { address, rkey: Rkey(fields.get_u32_le()) };
    Ok(TensorMemory { metadata, place: RemoteRange { start, length } })
}

#[cfg(test)]
#[path = "read_ahead_tests.rs"]
mod tests;
