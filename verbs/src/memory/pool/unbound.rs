//! Memory that belongs to no protection domain, and how a connection finds it by its address.

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

/// The index that all pools for sending share.
pub(crate) fn index() -> Arc<FrozenIndex> {
    Arc::clone(&SENDABLE)
}

/// Looks up whether all of `bytes` lie in a frozen buffer of some pool for sending. Two loads where there is none.
pub fn find_sendable(bytes: &[u8]) -> Option<Lease> {
    Lease::find(&SENDABLE, bytes.as_ptr() as usize, bytes.len())
}

/// The domain of a pool that has none.
#[derive(Debug)]
pub(crate) struct Unbound;

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

/// Memory that no device knows. Its keys are those that no region has.
#[derive(Debug)]
struct Unregistered(Arc<HostMemory>, Range<usize>);

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
