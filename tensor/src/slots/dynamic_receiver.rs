//! Receivers of tensors of any shape, which read each tensor from the sender.

use std::error::Error;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;

use tokio::task::consume_budget;

use crate::error::ChannelError;
use crate::link::token::{OutcomeCell, Token};
use crate::memory::landing::Landing;
use crate::slots::announcement::Announcement;
use crate::slots::receiver::Receiver;
use crate::slots::slot::AttachedSender;
use crate::types::{Metadata, Tensor, deserialize};
use tonic_rdma_verbs::internal::{CopyRange, CopyRanges, LocalMemory, Transfer, TransferKind};

/// The receiving end of a dynamic slot (§3.3), from [`RdmaDevice::dynamic_receiver`](crate::RdmaDevice::dynamic_receiver). It
/// learns the shape and the place of a tensor, allocates memory, and reads the tensor.
#[derive(Debug)]
pub struct DynamicReceiver {
    receiver: Receiver,
    landing: Arc<Landing>,
    longest: u64,
    /// The tensor that is being read.
    reading: Option<Reading>,
}

#[derive(Debug)]
struct Reading {
    metadata: Metadata,
    outcome: Arc<OutcomeCell>,
    by: AttachedSender,
}

impl DynamicReceiver {
    pub(crate) fn new(receiver: Receiver, landing: Arc<Landing>, longest: u64) -> Self {
        Self { receiver, landing, longest, reading: None }
    }

    /// Takes the next tensor if it is here. Begins to read the next tensor if the sender has announced one.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use tonic_rdma_tensor::{RdmaDevice, Shape, Tensor};
    /// # let server = RdmaDevice::builder().bind("127.0.0.1:0").await?;
    /// # let worker = RdmaDevice::builder().bind("127.0.0.1:0").await?;
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
    pub fn try_recv(&mut self) -> Result<Option<Tensor>, ChannelError> {
        if !self.advance()? {
            return Ok(None);
        }
        let outcome = self.reading.as_ref().and_then(|reading| reading.outcome.take());
        let Some(outcome) = outcome else { return Ok(None) };
        let Some(Reading { metadata, by, .. }) = self.reading.take() else { return Ok(None) };
        self.receiver.release();
        outcome.result?;
        let LocalMemory::Region(region) = outcome.local else { return Ok(None) };
        let bytes = self.landing.freeze(region, metadata.bytes());
        let tensor = deserialize(&metadata, bytes).map_err(|error| by.link.fail(by.link.violation(error)))?;
        Ok(Some(tensor))
    }

    /// Waits for the next tensor, and reads it. Dropping the future loses nothing.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use tonic_rdma_tensor::{RdmaDevice, Shape, Tensor};
    /// # let server = RdmaDevice::builder().bind("127.0.0.1:0").await?;
    /// # let worker = RdmaDevice::builder().bind("127.0.0.1:0").await?;
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
    pub async fn recv(&mut self) -> Result<Tensor, ChannelError> {
        loop {
            self.arrived().await?;
            if let Some(tensor) = self.try_recv()? {
                return Ok(tensor);
            }
        }
    }

    /// Waits until the next tensor is here: the sender has announced it, and it has been read. The receiver keeps it. So one task may wait,
    /// and another thread may then take the tensor by [`try_recv`](Self::try_recv). Dropping the future loses nothing.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use tonic_rdma_tensor::{RdmaDevice, Shape, Tensor};
    /// # let server = RdmaDevice::builder().bind("127.0.0.1:0").await?;
    /// # let worker = RdmaDevice::builder().bind("127.0.0.1:0").await?;
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
    /// The sender is lost, or it announced an impossible tensor, which ends its link. A failure of the read is the error of the next
    /// [`try_recv`](Self::try_recv).
    pub async fn arrived(&mut self) -> Result<(), ChannelError> {
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
    fn advance(&mut self) -> Result<bool, ChannelError> {
        if self.reading.is_none() {
            let Some(start) = self.receiver.take()? else { return Ok(false) };
            if let Err(error) = self.begin(start) {
                self.reading = None;
                self.receiver.put_back();
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
    fn begin(&mut self, start: usize) -> Result<(), ChannelError> {
        let by = self.receiver.attached()?;
        let mut bytes = [0; Announcement::LENGTH];
        self.receiver.slot.memory.copy_out(start, &mut bytes).map_err(ChannelError::local)?;
        let fail = |cause: Box<dyn Error + Send + Sync>| by.link.fail(by.link.violation(cause));
        let announced = Announcement::decode(&bytes).map_err(|error| fail(error.into()))?;
        let metadata = Metadata::try_from(announced.metadata).map_err(|error| fail(error.into()))?;
        let length = metadata.bytes();
        if length > self.longest {
            let longest = self.longest;
            return Err(fail(format!("a tensor of {length} bytes, which is longer than {longest}").into()));
        }
        let region = self.landing.take(length)?;
        let outcome = Arc::new(OutcomeCell::default());
        let blocks = CopyRanges::One(CopyRange { local: 0, remote: 0, length });
        let token = Token::future(&outcome);
        self.reading = Some(Reading { metadata, outcome, by: by.clone() });
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
