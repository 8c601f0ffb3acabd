//! Sending tensors of any shape: what they are and where they lie.

use std::collections::VecDeque;

use crate::error::ChannelError;
use crate::memory::payload::Payload;
use crate::slots::announcement::Announcement;
use crate::slots::sender::Sender;
use crate::types::Tensor;
use tonic_rdma_verbs::internal::{Grant, RemotePlace};
use tonic_rdma_verbs::{RemoteSegment, Rkey};

/// The sending end of a dynamic slot (§3.3), from [`Channel::dynamic_sender`](crate::Channel::dynamic_sender). The peer reads each tensor from where it lies,
/// and has the right to for as long as that takes.
#[derive(Debug)]
pub struct DynamicSender {
    sender: Sender,
    /// What the peer may be reading, by the epoch whose release frees it.
    lent: VecDeque<(u64, Option<Grant>)>,
}

impl DynamicSender {
    pub(crate) fn new(sender: Sender) -> Self {
        Self { sender, lent: VecDeque::new() }
    }

    /// Offers the peer a tensor to read, once the slot has room. The peer reads it from registered memory
    /// ([`Pool::for_sending`](tonic_rdma_verbs::memory::Pool)) where it is; a tensor that lies elsewhere is copied first, and one that is not
    /// contiguous, or has strings, is serialised.
    ///
    /// It returns before the peer has read the tensor: [`flush`](Self::flush) waits for that.
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
    /// The receiver has gone, or there is no memory for a copy.
    pub async fn send(&mut self, tensor: &Tensor) -> Result<(), ChannelError> {
        self.sender.ready().await?;
        self.offer(tensor)
    }

    /// Offers a tensor as [`send`](Self::send) does, and returns at once.
    ///
    /// # Errors
    /// Those of [`send`](Self::send), or [`Busy`](ChannelError::Busy) if the slot has no room.
    pub fn start(&mut self, tensor: &Tensor) -> Result<(), ChannelError> {
        if !self.is_ready()? {
            return Err(ChannelError::Busy(1));
        }
        self.offer(tensor)
    }

    /// Returns whether the slot has room for the next tensor.
    ///
    /// # Errors
    /// The receiver has gone.
    pub fn is_ready(&mut self) -> Result<bool, ChannelError> {
        self.sender.is_ready()
    }

    /// Waits until the slot has room for the next tensor.
    ///
    /// # Errors
    /// The receiver has gone.
    pub async fn ready(&mut self) -> Result<(), ChannelError> {
        self.sender.ready().await
    }

    fn offer(&mut self, tensor: &Tensor) -> Result<(), ChannelError> {
        self.forget();
        let payload = Payload::of(tensor)?;
        let (grant, place) = match payload.bytes() {
            0 => (None, RemotePlace { start: RemoteSegment { address: 0, rkey: Rkey(0) }, length: 0 }),
            _ => {
                let grant = payload.grant(self.sender.link())?;
                let place = grant.place();
                (Some(grant), place)
            }
        };
        let epoch = self.sender.next();
        let note = Announcement { metadata: payload.metadata(), place };
        self.sender.send_copied(&note.encode())?;
        self.lent.push_back((epoch, grant));
        Ok(())
    }

    /// Waits until the peer has read everything. [`send`](Self::send) has an example.
    ///
    /// # Errors
    /// The receiver has gone.
    pub async fn flush(&mut self) -> Result<(), ChannelError> {
        if let Some((last, _)) = self.lent.back() {
            self.sender.wait_for(*last).await?;
        }
        self.forget();
        Ok(())
    }

    /// Returns how many of the tensors that were sent the peer has not read yet.
    ///
    /// # Errors
    /// The receiver has gone.
    pub fn pending(&mut self) -> Result<u64, ChannelError> {
        let pending = self.sender.pending();
        self.forget();
        pending
    }

    /// Takes the right to what was read away.
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
        // Rights that the peer still uses stay until the link ends: taken away now, they would end it.
        let lent = self.lent.drain(..).filter_map(|(_, grant)| grant);
        self.sender.link().keep(lent);
    }
}
