//! Receiving tensors of any shape, by reading them.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;

use tokio::task::consume_budget;

use super::super::landing::Landing;
use super::super::link::token::{Slot, Token};
use super::super::proto::Kind;
use super::super::types::{Metadata, Tensor, deserialize};
use super::super::{ChannelError, RdmaDevice};
use super::note::Note;
use super::{Attached, Receiver};
use tonic_rdma_verbs::internal::{CopyRange, CopyRanges, LocalMemory, Transfer, TransferKind};

/// The receiving end of a dynamic slot (§3.3), from [`RdmaDevice::dynamic_receiver`]: it learns what a tensor is and where,
/// makes room, and reads it.
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
    slot: Arc<Slot>,
    by: Attached,
}

impl RdmaDevice {
    /// Makes a slot for tensors of any type and shape, of which `depth` can be waiting. One peer at a time can attach to it by
    /// `name`, with [`Channel::dynamic_sender`](super::super::Channel::dynamic_sender). What arrives lies in memory of this
    /// device, which is used again when the tensor is dropped.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use tonic_rdma_tensor::{RdmaDevice, Shape, Tensor};
    /// # let server = RdmaDevice::new(1, 2, "127.0.0.1:0").await?;
    /// # let worker = RdmaDevice::new(1, 2, "127.0.0.1:0").await?;
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
    /// The name is taken or no name, there is no memory, or `depth` is 0 or more than 1024.
    pub fn dynamic_receiver(&self, name: &str, depth: u32) -> Result<DynamicReceiver, ChannelError> {
        let receiver = Receiver::new(self, name, Kind::Dynamic, None, Note::LENGTH, depth)?;
        let (landing, longest) = (Arc::clone(&self.shared.landing), self.shared.settings.longest);
        Ok(DynamicReceiver { receiver, landing, longest, reading: None })
    }
}

impl DynamicReceiver {
    /// Takes the next tensor if it is here. Begins to read the next one if the sender has offered it.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use tonic_rdma_tensor::{RdmaDevice, Shape, Tensor};
    /// # let server = RdmaDevice::new(1, 2, "127.0.0.1:0").await?;
    /// # let worker = RdmaDevice::new(1, 2, "127.0.0.1:0").await?;
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
    /// The sender has gone, or what it says of its tensor can't be; its link ends then.
    pub fn try_recv(&mut self) -> Result<Option<Tensor>, ChannelError> {
        if self.reading.is_none() {
            let Some(start) = self.receiver.take()? else { return Ok(None) };
            if let Err(error) = self.begin(start) {
                self.reading = None;
                self.receiver.put_back();
                return Err(error);
            }
        }
        let Some(reading) = &self.reading else { return Ok(None) };
        let outcome = reading.slot.take().or_else(|| {
            reading.by.link.poll(reading.by.port);
            reading.slot.take()
        });
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
    /// # let server = RdmaDevice::new(1, 2, "127.0.0.1:0").await?;
    /// # let worker = RdmaDevice::new(1, 2, "127.0.0.1:0").await?;
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
    /// As [`try_recv`](Self::try_recv).
    pub async fn recv(&mut self) -> Result<Tensor, ChannelError> {
        consume_budget().await;
        loop {
            if let Some(tensor) = self.try_recv()? {
                return Ok(tensor);
            }
            match &self.reading {
                None => self.receiver.wait().await?,
                Some(reading) => {
                    poll_fn(|context| match reading.slot.is_ready(context) {
                        true => Poll::Ready(()),
                        false => Poll::Pending,
                    })
                    .await;
                }
            }
        }
    }

    /// Reads what the note that has come tells of.
    fn begin(&mut self, start: usize) -> Result<(), ChannelError> {
        let by = self.receiver.attached()?;
        let mut note = [0; Note::LENGTH];
        self.receiver.placement().memory.copy_out(start, &mut note).map_err(ChannelError::local)?;
        let wrong = |error: String| by.link.fail(by.link.violation(error));
        let note = Note::decode(&note).map_err(|error| wrong(error.to_string()))?;
        let metadata = Metadata::try_from(note.metadata).map_err(|error| wrong(error.to_string()))?;
        let length = metadata.bytes();
        if length > self.longest {
            return Err(wrong(format!("a tensor of {length} bytes, of which {} are taken", self.longest)));
        }
        let region = self.landing.take(length)?;
        let slot = Arc::new(Slot::default());
        let blocks = CopyRanges::One(CopyRange { local: 0, remote: 0, length });
        let token = Token::future(&slot);
        self.reading = Some(Reading { metadata, slot, by: by.clone() });
        if length == 0 {
            token.finish(LocalMemory::Region(region));
            return Ok(());
        }
        let transfer =
            Transfer::new(LocalMemory::Region(region), TransferKind::Read, blocks, note.place, token);
        // What is refused is told as any other end is.
        let _ = by.link.port(by.port).submit(transfer, length, TransferKind::Read);
        Ok(())
    }
}
