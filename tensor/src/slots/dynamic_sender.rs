//! Senders of tensors of any shape, which announce each tensor to the receiver.

use std::collections::VecDeque;

use crate::error::ChannelError;
use crate::memory::payload::Payload;
use crate::slots::announcement::Announcement;
use crate::slots::counts::SentCounts;
use crate::slots::sender::Sender;
use crate::types::Tensor;
use tonic_rdma_verbs::internal::{Grant, RemotePlace};
use tonic_rdma_verbs::{RemoteSegment, Rkey};

/// The sending end of a dynamic slot (§3.3), from [`Channel::dynamic_sender`](crate::Channel::dynamic_sender). The peer reads
/// each tensor from the sender's memory, and has the right to do so until it has read the tensor.
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

    /// Announces a tensor to the peer, once the slot has room. The peer reads the tensor from registered memory
    /// ([`Pool::for_sending`](tonic_rdma_verbs::memory::Pool)). A tensor in other memory is copied first. A tensor that is not
    /// contiguous, or has strings, is serialised.
    ///
    /// This returns before the peer has read the tensor. [`flush`](Self::flush) waits for that.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use tonic_rdma_tensor::{Dtype, RdmaDevice, Shape, Tensor, TensorSpec};
    /// # let server = RdmaDevice::builder().bind("127.0.0.1:0").await?;
    /// # let worker = RdmaDevice::builder().bind("127.0.0.1:0").await?;
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
    pub async fn send(&mut self, tensor: &Tensor) -> Result<(), ChannelError> {
        self.sender.ready().await?;
        self.offer(tensor)
    }

    /// Announces a tensor as [`send`](Self::send) does, and returns at once.
    ///
    /// # Errors
    /// The errors of [`send`](Self::send), and [`Busy`](ChannelError::Busy) if the slot has no room.
    pub fn start(&mut self, tensor: &Tensor) -> Result<(), ChannelError> {
        if !self.is_ready()? {
            return Err(ChannelError::Busy(1));
        }
        self.offer(tensor)
    }

    /// Returns how many tensors this sender has announced without a copy, and with one. A tensor without elements counts as
    /// inline.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use tonic_rdma_tensor::{Dtype, RdmaDevice, Shape, TensorMut, TensorSpec};
    /// # let server = RdmaDevice::builder().bind("127.0.0.1:0").await?;
    /// # let worker = RdmaDevice::builder().bind("127.0.0.1:0").await?;
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
    pub fn is_ready(&mut self) -> Result<bool, ChannelError> {
        self.sender.is_ready()
    }

    /// Waits until the slot has room for the next tensor.
    ///
    /// # Errors
    /// The receiver is lost.
    pub async fn ready(&mut self) -> Result<(), ChannelError> {
        self.sender.ready().await
    }

    fn offer(&mut self, tensor: &Tensor) -> Result<(), ChannelError> {
        self.forget();
        let payload = Payload::of(tensor)?;
        let (grant, place) = match payload.bytes() {
            0 => (None, RemotePlace { start: RemoteSegment { address: 0, rkey: Rkey(0) }, length: 0 }),
            _ => {
                let grant = payload.grant(&self.sender.link)?;
                let place = grant.place();
                (Some(grant), place)
            }
        };
        let epoch = self.sender.next;
        let announcement = Announcement { metadata: payload.metadata, place };
        self.sender.send_copied(&announcement.encode())?;
        let counts = match (&grant, payload.is_registered()) {
            (None, _) => &mut self.sent.inline,
            (Some(_), true) => &mut self.sent.in_place,
            (Some(_), false) => &mut self.sent.copied,
        };
        counts.add(payload.bytes() as usize);
        self.lent.push_back((epoch, grant));
        Ok(())
    }

    /// Waits until the peer has read all tensors. [`send`](Self::send) has an example.
    ///
    /// # Errors
    /// The receiver is lost.
    pub async fn flush(&mut self) -> Result<(), ChannelError> {
        if let Some((last, _)) = self.lent.back() {
            self.sender.wait_for(*last).await?;
        }
        self.forget();
        Ok(())
    }

    /// Returns how many of the sent tensors the peer has not read yet.
    ///
    /// # Errors
    /// The receiver is lost.
    pub fn pending(&mut self) -> Result<u64, ChannelError> {
        let pending = self.sender.pending();
        self.forget();
        pending
    }

    /// Takes away the rights to tensors that the peer has read.
    fn forget(&mut self) {
        let released = self.sender.released();
        while self.lent.front().is_some_and(|(epoch, _)| *epoch <= released) {
            self.lent.pop_front();
        }
    }
}

impl Drop for DynamicSender {
    fn drop(&mut self) {
        self.forget();
        // Rights that the peer still uses stay until the link ends, because taking them away now would end the link.
        let lent = self.lent.drain(..).filter_map(|(_, grant)| grant);
        self.sender.link.keep(lent);
    }
}
