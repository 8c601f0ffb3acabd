//! Tensors that a device offers by name and step.

use crate::device::RdmaDevice;
use crate::error::ChannelError;
use crate::exchange::Offer;
use crate::rendezvous::Held;

impl RdmaDevice {
    /// Offers tensor (`name`, `step`) to the first `readers` peers that ask for it with
    /// [`Channel::request`](crate::Channel::request), before or after this call. The offer stays until all readers have the
    /// tensor, or until [`DeviceBuilder::rendezvous_timeout`](crate::DeviceBuilder::rendezvous_timeout) is over.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use tonic_rdma_tensor::{Dtype, Offer, RdmaDevice, Shape, Tensor, TensorSpec};
    /// # let device = RdmaDevice::builder().bind("127.0.0.1:0").await?;
    /// let spec = TensorSpec::new(Dtype::U8, Shape::new(&[4])?)?;
    /// let tensor = Tensor::copy_from(spec, &[1, 2, 3, 4])?;
    /// device.put("loss", 17, Offer::Tensor(tensor), 2)?; // two workers ask for it
    /// assert_eq!(device.held().bytes, 4);
    /// assert_eq!(device.withdraw("loss", 17), Some(2)); // neither has
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Name and step are on offer already, the limit on offers or on their bytes is reached, or the name is empty or too long.
    pub fn put(&self, name: &str, step: u64, offer: Offer, readers: u32) -> Result<(), ChannelError> {
        self.shared.offers.put(name, step, offer, readers)
    }

    /// Withdraws an offer. Returns the number of readers that had not asked yet, or `None` if there was no such offer. A
    /// reader that is being served still gets the tensor.
    pub fn withdraw(&self, name: &str, step: u64) -> Option<u32> {
        self.shared.offers.withdraw(name, step)
    }

    /// Returns the number of offers, the number of their bytes, and the number of requests that wait for an offer.
    pub fn held(&self) -> Held {
        self.shared.offers.held()
    }
}
