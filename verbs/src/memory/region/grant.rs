//! A peer's right to memory.

use std::ops::Range;
use std::sync::Arc;

use super::super::pieces::Lease;
use super::shared::SharedRegion;
use crate::{Access, MemoryRegion, ProtectionDomain, RemoteSegment, VerbsError};

/// What a peer may do with some memory, exact to the byte and in one protection domain, which is one peer's. Dropping it
/// takes the right away, and waits (microseconds) for operations of the peer's that are in the middle of it.
#[derive(Debug)]
pub struct Grant {
    /// First: the peer's right ends before the memory goes.
    region: Arc<dyn MemoryRegion>,
    place: RemotePlace,
    _memory: GrantedMemory,
}

/// What keeps the memory.
#[derive(Debug)]
enum GrantedMemory {
    Shared(#[expect(dead_code, reason = "held for its drop")] SharedRegion),
    Frozen(#[expect(dead_code, reason = "held for its drop")] Lease),
}

/// A range of a peer's memory, or of ours as the peer names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemotePlace {
    pub start: RemoteSegment,
    /// In bytes.
    pub length: u64,
}

impl RemotePlace {
    /// The place of `length` bytes at `offset`; `None` if they are not within.
    pub fn at(&self, offset: u64, length: u64) -> Option<RemoteSegment> {
        let end = offset.checked_add(length)?;
        let address = self.start.address.checked_add(offset)?;
        (end <= self.length).then_some(RemoteSegment { address, ..self.start })
    }
}

impl Grant {
    /// Gives the peers of `domain` these rights to all of `shared`.
    pub fn of_region(
        domain: &dyn ProtectionDomain,
        shared: &SharedRegion,
        access: Access,
    ) -> Result<Self, VerbsError> {
        Self::of_part(domain, shared, 0..shared.len(), access)
    }

    /// Gives them to a part of it, in bytes from its start.
    pub fn of_part(
        domain: &dyn ProtectionDomain,
        shared: &SharedRegion,
        part: Range<usize>,
        access: Access,
    ) -> Result<Self, VerbsError> {
        let region = shared.region();
        let whole = region.range();
        let (start, end) = (whole.start + part.start, whole.start + part.end);
        if end > whole.end {
            return Err(VerbsError::Unusable(format!("{part:?} of a region of {} bytes", region.len())));
        }
        let memory = Arc::clone(region.mapped().memory());
        let address = memory.address() + start as u64;
        let registered = domain.register_range(memory, start..end, access | Access::LOCAL_WRITE)?;
        Ok(Self::new(registered, address, part.len(), GrantedMemory::Shared(shared.clone())))
    }

    /// Lets the peers of `domain` read what `lease` has.
    pub fn of_lease(domain: &dyn ProtectionDomain, lease: &Lease) -> Result<Self, VerbsError> {
        let (memory, range) = lease.place();
        let registered = domain.register_range(memory, range, Access::REMOTE_READ)?;
        Ok(Self::new(registered, lease.as_ptr() as u64, lease.len(), GrantedMemory::Frozen(lease.clone())))
    }

    fn new(region: Arc<dyn MemoryRegion>, address: u64, length: usize, memory: GrantedMemory) -> Self {
        let start = RemoteSegment { address, rkey: region.rkey() };
        Self { region, place: RemotePlace { start, length: length as u64 }, _memory: memory }
    }

    /// Where the peer finds it.
    pub fn place(&self) -> RemotePlace {
        debug_assert_eq!(self.place.start.rkey, self.region.rkey());
        self.place
    }
}
