//! The regions that a device exports.

use crate::device::RdmaDevice;
use crate::error::ChannelError;
use crate::name::check_name;
use crate::regions::exported::ExportedRegion;
use crate::regions::published::PublishedRegion;
use crate::regions::rights::Rights;
use tonic_rdma_verbs::memory::{MemRegion, SharedRegion};

impl RdmaDevice {
    /// Offers `region` to all peers of this device under `name`.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use tonic_rdma_tensor::{RdmaDevice, Rights};
    /// # let device = RdmaDevice::builder().bind("127.0.0.1:0").await?;
    /// let mut parameters = device.allocate(1 << 20)?;
    /// parameters.fill(0);
    /// let exported = device.export("parameters", parameters, Rights::READ)?;
    /// // Peers read it now. Dropping `exported`, or this, takes their rights away:
    /// let parameters = exported.withdraw().expect("nothing else has it");
    /// # drop(parameters);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The name is in use, empty, or too long.
    pub fn export(
        &self,
        name: &str,
        region: MemRegion,
        rights: Rights,
    ) -> Result<ExportedRegion, ChannelError> {
        self.export_shared(name, region.share(), rights)
    }

    /// Offers shared memory to all peers. One memory may be on offer under several names, with different rights.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use tonic_rdma_tensor::{RdmaDevice, Rights};
    /// # let device = RdmaDevice::builder().bind("127.0.0.1:0").await?;
    /// let memory = device.allocate(4096)?.share();
    /// let readers = device.export_shared("readers", memory.clone(), Rights::READ)?;
    /// let writer = device.export_shared("writer", memory, Rights::WRITE)?;
    /// # drop((readers, writer));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The errors of [`export`](Self::export).
    pub fn export_shared(
        &self,
        name: &str,
        memory: SharedRegion,
        rights: Rights,
    ) -> Result<ExportedRegion, ChannelError> {
        let exported = ExportedRegion::new(check_name(name)?, memory, rights);
        self.shared.offer(check_name(name)?, exported.offered())?;
        Ok(exported)
    }
    /// Offers `region` to all peers of this device under `name`, for reading only. The owner keeps the region as a slice: peers never
    /// write it. A peer attaches by [`Channel::region`](crate::Channel::region), and reads by [`Channel::read`](crate::Channel::read)
    /// or by a [view](crate::Channel::view).
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use tonic_rdma_tensor::RdmaDevice;
    /// # let server = RdmaDevice::builder().bind("127.0.0.1:0").await?;
    /// # let worker = RdmaDevice::builder().bind("127.0.0.1:0").await?;
    /// # let channel = worker.channel(&server.endpoint(), 0).await?;
    /// let mut gradients = server.publish("gradients", server.allocate(4096)?)?;
    /// gradients.fill(7); // it is a `&mut [u8]`
    ///
    /// let remote = channel.region("gradients").await?;
    /// let region = channel.read(&remote).into(worker.allocate(4096)?, ..).await?;
    /// assert!(region.iter().all(|&byte| byte == 7));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The errors of [`export`](Self::export).
    pub fn publish(&self, name: &str, region: MemRegion) -> Result<PublishedRegion, ChannelError> {
        let published = PublishedRegion::new(check_name(name)?, region);
        self.shared.offer(check_name(name)?, published.offered())?;
        Ok(published)
    }
}
