//! Memory without a protection domain, and the look-up by which a connection finds such memory.

use std::ops::Range;
use std::sync::{Arc, LazyLock};

use super::super::pieces::Lease;
use super::frozen::FrozenIndex;
use crate::{
    Access, CompletionQueue, HostMemory, Lkey, MemoryRegion, ProtectionDomain, QueuePair, QueuePairCapacity,
    Rkey, VerbsError,
};

/// The frozen buffers of all pools for sending.
static SENDABLE: LazyLock<Arc<FrozenIndex>> = LazyLock::new(|| Arc::new(FrozenIndex::new()));

/// Returns the index that all pools for sending share.
pub(crate) fn index() -> Arc<FrozenIndex> {
    Arc::clone(&SENDABLE)
}

/// Finds the frozen buffer of any pool for sending that holds all of `bytes`. While there are no frozen buffers, a look-up
/// takes two loads.
pub fn find_sendable(bytes: &[u8]) -> Option<Lease> {
    Lease::find(&SENDABLE, bytes.as_ptr() as usize, bytes.len())
}

/// A placeholder for the protection domain, in a pool that has none.
#[derive(Debug)]
pub(crate) struct Unbound;

impl crate::sealed::Sealed for Unbound {}

impl ProtectionDomain for Unbound {
    fn register_range(
        &self,
        memory: Arc<HostMemory>,
        range: Range<usize>,
        _: Access,
    ) -> Result<Arc<dyn MemoryRegion>, VerbsError> {
        memory.check_range(&range)?;
        Ok(Arc::new(Unregistered(memory, range)))
    }

    fn create_queue_pair(
        &self,
        _: &Arc<dyn CompletionQueue>,
        _: &Arc<dyn CompletionQueue>,
        _: &QueuePairCapacity,
    ) -> Result<Arc<dyn QueuePair>, VerbsError> {
        Err(VerbsError::Foreign("protection domain"))
    }
}

/// Memory that is registered with no device. A device refuses its keys.
#[derive(Debug)]
struct Unregistered(Arc<HostMemory>, Range<usize>);

impl crate::sealed::Sealed for Unregistered {}

impl MemoryRegion for Unregistered {
    fn lkey(&self) -> Lkey {
        Lkey(0)
    }

    fn rkey(&self) -> Rkey {
        Rkey(0)
    }

    fn access(&self) -> Access {
        Access::LOCAL_READ
    }

    fn memory(&self) -> &Arc<HostMemory> {
        &self.0
    }

    fn range(&self) -> Range<usize> {
        self.1.clone()
    }
}
