//! Threads that look at slots, and take the completions of the device themselves.

use std::sync::Weak;

use crate::device::RdmaDevice;
use tonic_rdma::internal;
use tonic_rdma_verbs::internal::lock;

/// A thread looks at slots itself, until this is dropped, from [`RdmaDevice::own_polling`].
#[derive(Debug)]
#[must_use = "the threads of the runtime take over when this is dropped"]
pub struct OwnPolling {
    reactors: Vec<internal::OwnPolling>,
}

impl RdmaDevice {
    /// Tells the device that the calling thread looks at slots again and again, and takes completions itself, until it drops the result.
    /// Meanwhile, a tensor that arrives, or was sent, wakes no thread of the runtime; a wake-up costs more than a small transfer. A
    /// thread of the runtime still looks once in a millisecond. Drop the result before this thread sleeps or computes for long.
    ///
    /// This holds for all links and native calls of this runtime on the same verbs device: their futures may wait a millisecond longer. A
    /// link that is opened later on another verbs device is not included.
    ///
    /// ```
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use tonic_rdma_tensor::{Dtype, RdmaDevice, Shape, TensorSpec};
    /// # let server = RdmaDevice::builder().bind("127.0.0.1:0").await?;
    /// # let worker = RdmaDevice::builder().bind("127.0.0.1:0").await?;
    /// # let channel = worker.channel(&server.endpoint(), 0).await?;
    /// # let spec = TensorSpec::new(Dtype::F32, Shape::new(&[256])?)?;
    /// # let mut slot = server.static_receiver("loss", &spec, 1)?;
    /// # let mut sender = channel.static_sender("loss", &spec).await?;
    /// sender.start_bytes(&[1; 1024])?;
    /// let polling = server.own_polling();
    /// while slot.try_recv()?.is_none() {
    ///     polling.poll();
    /// }
    /// drop(polling);
    /// # Ok(())
    /// # }
    /// ```
    pub fn own_polling(&self) -> OwnPolling {
        let reactors = lock(&self.shared.reactors);
        let reactors = reactors.iter().filter_map(Weak::upgrade);
        OwnPolling { reactors: reactors.map(|reactor| internal::OwnPolling::of(&reactor)).collect() }
    }
}

impl OwnPolling {
    /// Takes the completions of the device that have come.
    pub fn poll(&self) {
        self.reactors.iter().for_each(internal::OwnPolling::poll);
    }
}
