//! Counts of the tensors that a sender has sent.

/// Numbers of the tensors that a sender has sent, by the way of their bytes at this end. A tensor that was refused does not
/// count.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # use tonic_rdma_tensor::{Dtype, RdmaDevice, Shape, Tensor, TensorSpec};
/// # let server = RdmaDevice::builder().bind("127.0.0.1:0").await?;
/// # let worker = RdmaDevice::builder().bind("127.0.0.1:0").await?;
/// # let channel = worker.channel(&server.endpoint(), 0).await?;
/// # let spec = TensorSpec::new(Dtype::U8, Shape::new(&[1 << 20])?)?;
/// # let _slot = server.static_receiver("activations", &spec, 1)?;
/// let mut sender = channel.static_sender("activations", &spec).await?;
/// sender.send(&Tensor::copy_from(spec, &vec![1; 1 << 20])?).await?; // on the heap
/// assert_eq!((sender.sent().copied.tensors, sender.sent().copied.bytes), (1, 1 << 20));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SentCounts {
    /// Tensors that the device read from the memory in which the program has them, without a copy at this end.
    pub in_place: SentTensors,
    /// Tensors whose bytes were first copied to registered memory.
    pub copied: SentTensors,
    /// Small tensors whose bytes were put into the request itself.
    pub inline: SentTensors,
}

/// A number of tensors, and their bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SentTensors {
    /// Number of tensors.
    pub tensors: u64,
    /// Bytes of their elements.
    pub bytes: u64,
}

impl SentTensors {
    /// Counts a tensor of `bytes` bytes.
    pub(crate) fn add(&mut self, bytes: usize) {
        self.tensors += 1;
        self.bytes += bytes as u64;
    }
}
