//! Regions that peers only read.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Weak};

use crate::control::offered::Offered;
use crate::regions::exported::{Export, ExportedMemory};
use crate::regions::rights::Rights;
use tonic_rdma_verbs::internal::LentRegion;
use tonic_rdma_verbs::memory::MemRegion;

/// A region that peers may read, and that only its owner writes ([`RdmaDevice::publish`](crate::RdmaDevice::publish)). The owner
/// uses it as a slice. A peer that reads while the owner writes may get old and new bytes. Dropping the region takes the rights of
/// all peers away.
pub struct PublishedRegion {
    export: Arc<Export>,
    /// `None` only while the region is withdrawn.
    memory: Option<LentRegion>,
}

impl PublishedRegion {
    /// Makes a region to be offered under `name`.
    pub(crate) fn new(name: Arc<str>, region: MemRegion) -> Self {
        let memory = LentRegion::new(region);
        let length = memory.len() as u64;
        let export = Export::new(name, ExportedMemory::Lent(memory.loan()), length, Rights::READ);
        Self { export, memory: Some(memory) }
    }

    /// Returns the part that the service of the device has.
    pub(crate) fn offered(&self) -> Weak<dyn Offered> {
        Arc::downgrade(&self.export) as Weak<dyn Offered>
    }

    /// Returns the name of the region.
    pub fn name(&self) -> &str {
        &self.export.name
    }

    /// Withdraws the offer, and takes the rights of all peers away. Returns the region, unless something else still holds the memory.
    pub fn withdraw(mut self) -> Option<MemRegion> {
        self.export.withdraw();
        self.memory.take()?.try_into_region().ok()
    }
}

impl Deref for PublishedRegion {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        self.memory.as_deref().unwrap_or_default()
    }
}

impl DerefMut for PublishedRegion {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        self.memory.as_deref_mut().unwrap_or_default()
    }
}

impl AsRef<[u8]> for PublishedRegion {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl AsMut<[u8]> for PublishedRegion {
    fn as_mut(&mut self) -> &mut [u8] {
        self
    }
}

impl Drop for PublishedRegion {
    fn drop(&mut self) {
        self.export.withdraw();
    }
}

impl fmt::Debug for PublishedRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PublishedRegion")
            .field("name", &self.name())
            .field("length", &self.len())
            .finish_non_exhaustive()
    }
}
