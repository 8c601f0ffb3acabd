//! Receivers of tensors of a known shape, which find each tensor in their own memory.

use std::ops::Range;

use crate::error::ChannelError;
use crate::slots::receiver::Receiver;
use crate::types::{Tensor, TensorSpec};
use tonic_rdma_verbs::memory::SharedRegion;

/// The receiving end of a static slot (§3.2), from [`RdmaDevice::static_receiver`](crate::RdmaDevice::static_receiver): buffers
/// for one tensor each.
#[derive(Debug)]
pub struct StaticReceiver {
    receiver: Receiver,
    spec: TensorSpec,
}

/// A tensor that has arrived. It lies where the sender put it. Dropping it gives the buffer back to the sender.
///
/// Its bytes are read by copying, because a hostile peer could change them meanwhile. [`copy_to`](Self::copy_to) copies all
/// bytes at once, and [`for_each_piece`](Self::for_each_piece) copies them through the first-level cache. A program that trusts
/// its peer may read them in place, by [`memory`](Self::memory) and [`SharedRegion::as_slice`].
///
/// The buffer is given back before the receiver can take another tensor, and no reference to the buffer lives longer than
/// [`Arrived`]:
///
/// ```no_run
/// # use tonic_rdma_tensor::{ChannelError, StaticReceiver};
/// # fn receive(mut receiver: StaticReceiver) -> Result<(), ChannelError> {
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
/// # use tonic_rdma_tensor::{ChannelError, StaticReceiver};
/// # fn receive(mut receiver: StaticReceiver) -> Result<(), ChannelError> {
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
/// # use tonic_rdma_tensor::{ChannelError, StaticReceiver};
/// # fn receive(mut receiver: StaticReceiver) -> Result<(), ChannelError> {
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
/// # use tonic_rdma_tensor::{Arrived, ChannelError, StaticReceiver};
/// # fn receive(mut receiver: StaticReceiver) -> Result<Option<Arrived<'static>>, ChannelError> {
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

    /// Takes the next tensor if it has arrived. This costs one load of memory, which stays in the cache until the sender writes
    /// to it. So a thread may call this again and again, between other work.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use tonic_rdma_tensor::{Dtype, RdmaDevice, Shape, TensorSpec};
    /// # let server = RdmaDevice::builder().bind("127.0.0.1:0").await?;
    /// # let worker = RdmaDevice::builder().bind("127.0.0.1:0").await?;
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
    /// The sender is lost, and all tensors that it had completed were taken. Once another sender has attached, its tensors
    /// come.
    pub fn try_recv(&mut self) -> Result<Option<Arrived<'_>>, ChannelError> {
        let start = self.receiver.take()?;
        Ok(start.map(|start| Arrived { receiver: self, start }))
    }

    /// Waits for the next tensor. Dropping the future loses nothing.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use tonic_rdma_tensor::{Dtype, RdmaDevice, Shape, TensorSpec};
    /// # let server = RdmaDevice::builder().bind("127.0.0.1:0").await?;
    /// # let worker = RdmaDevice::builder().bind("127.0.0.1:0").await?;
    /// # let channel = worker.channel(&server.endpoint(), 0).await?;
    /// # let spec = TensorSpec::new(Dtype::F32, Shape::new(&[256])?)?;
    /// # let mut slot = server.static_receiver("loss", &spec, 1)?;
    /// # let mut sender = channel.static_sender("loss", &spec).await?;
    /// # sender.send_bytes(&[1; 1024]).await?;
    /// let arrived = slot.recv().await?;
    /// let mut sum = 0_u64;
    /// arrived.for_each_piece(|bytes| sum += bytes.iter().map(|&byte| u64::from(byte)).sum::<u64>());
    /// assert_eq!(sum, 1024);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The errors of [`try_recv`](Self::try_recv).
    pub async fn recv(&mut self) -> Result<Arrived<'_>, ChannelError> {
        let start = loop {
            self.receiver.wait().await?;
            if let Some(start) = self.receiver.take()? {
                break start;
            }
        };
        Ok(Arrived { receiver: self, start })
    }

    /// Waits until the next tensor has arrived, and leaves it in the slot. So one task may wait, and another thread may then take the
    /// tensor by [`try_recv`](Self::try_recv). Dropping the future loses nothing.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use tonic_rdma_tensor::{Dtype, RdmaDevice, Shape, TensorSpec};
    /// # let server = RdmaDevice::builder().bind("127.0.0.1:0").await?;
    /// # let worker = RdmaDevice::builder().bind("127.0.0.1:0").await?;
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
    pub async fn arrived(&mut self) -> Result<(), ChannelError> {
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
    pub fn copy_to(&self, destination: &mut [u8]) -> Result<(), ChannelError> {
        let (memory, range) = self.memory();
        if destination.len() != range.len() {
            let found = format!("{} bytes", destination.len());
            return Err(ChannelError::Mismatch {
                name: self.receiver.receiver.slot.name.clone(),
                expected: format!("{} bytes", range.len()).into(),
                found: found.into(),
            });
        }
        memory.copy_out(range.start, destination).map_err(ChannelError::local)
    }

    /// Calls `then` with the bytes, piece by piece, through a buffer that stays in the cache. The first byte of each piece is
    /// aligned to 64 bytes. The length of every piece but the last is a multiple of 64 bytes.
    pub fn for_each_piece(&self, then: impl FnMut(&[u8])) {
        let (memory, range) = self.memory();
        // The range is the slot's own, so it lies within the memory.
        let _ = memory.for_each_piece(range, then);
    }

    /// Copies the tensor out of the slot.
    ///
    /// # Errors
    /// There is no memory for it.
    pub fn to_tensor(&self) -> Result<Tensor, ChannelError> {
        let mut bytes = vec![0; self.len()];
        self.copy_to(&mut bytes)?;
        Ok(Tensor::from_bytes(self.receiver.spec, bytes.into())?)
    }
}

impl Drop for Arrived<'_> {
    fn drop(&mut self) {
        self.receiver.receiver.release();
    }
}
