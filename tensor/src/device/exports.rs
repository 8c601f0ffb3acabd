//! The regions that a device exports.

use crate::device::RdmaDevice;
use crate::error::ChannelError;
use crate::name::check_name;
use crate::regions::exported::ExportedRegion;
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
}
