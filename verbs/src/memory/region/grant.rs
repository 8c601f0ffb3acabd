//! A grant: the right of a peer to access memory.

use std::ops::Range;
use std::sync::Arc;

use super::super::pieces::Lease;
use super::lent::RegionLoan;
use super::shared::SharedRegion;
use crate::{Access, HostMemory, MemoryRegion, ProtectionDomain, RemoteSegment, VerbsError};

/// The right of a peer to access a range of memory, exact to the byte. A grant belongs to one protection domain, which serves
/// one peer. Dropping the grant revokes the right, and waits some microseconds for operations of the peer that are in
/// progress.
#[derive(Debug)]
pub struct Grant {
    /// This is the first field, so that it is dropped first: the right must end before the memory is freed.
    region: Arc<dyn MemoryRegion>,
    place: RemotePlace,
    _memory: GrantedMemory,
}

/// The owner that keeps the memory alive.
#[derive(Debug)]
enum GrantedMemory {
    Shared(#[expect(dead_code, reason = "held for its drop")] SharedRegion),
    Lent(#[expect(dead_code, reason = "held for its drop")] RegionLoan),
    Frozen(#[expect(dead_code, reason = "held for its drop")] Lease),
}

/// The address, key and length by which requests of the other process name a range of memory: memory of the peer for requests
/// of this process, or memory of this process for requests of the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemotePlace {
    /// Address and key of the first byte.
    pub start: RemoteSegment,
    /// Length in bytes.
    pub length: u64,
}

impl RemotePlace {
    /// Returns the address of `length` bytes at `offset`, or `None` if they are not within the range.
    pub fn at(&self, offset: u64, length: u64) -> Option<RemoteSegment> {
        let end = offset.checked_add(length)?;
        let address = self.start.address.checked_add(offset)?;
        (end <= self.length).then_some(RemoteSegment { address, ..self.start })
    }
}

impl Grant {
    /// Grants the peer of `domain` the rights `access` to all of `shared`.
    ///
    /// # Errors
    /// The device can't register the memory.
    pub fn of_region(
        domain: &dyn ProtectionDomain,
        shared: &SharedRegion,
        access: Access,
    ) -> Result<Self, VerbsError> {
        Self::of_part(domain, shared, 0..shared.len(), access)
    }

    /// Grants the peer of `domain` the rights `access` to a part of `shared`, in bytes from its start.
    ///
    /// # Errors
    /// The part is not within the region, or the device can't register the memory.
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
        // Devices give peers the right to write only together with the local right. The local right alone may let peers write, too
        // (see `ProtectionDomain::opens_sinks`).
        let writes = access.contains(Access::REMOTE_WRITE);
        let access = if writes { access | Access::LOCAL_WRITE } else { access };
        Self::register(domain, memory, start..end, access, GrantedMemory::Shared(shared.clone()))
    }

    /// Grants the peer of `domain` the right to read all of a lent region.
    ///
    /// # Errors
    /// The device can't register the memory.
    pub fn of_loan(domain: &dyn ProtectionDomain, loan: &RegionLoan) -> Result<Self, VerbsError> {
        let region = loan.region();
        let memory = Arc::clone(region.mapped().memory());
        let granted = GrantedMemory::Lent(loan.clone());
        Self::register(domain, memory, region.range(), Access::REMOTE_READ, granted)
    }

    /// Grants the peer of `domain` the right to read the bytes of `lease`.
    ///
    /// # Errors
    /// The device can't register the memory.
    pub fn of_lease(domain: &dyn ProtectionDomain, lease: &Lease) -> Result<Self, VerbsError> {
        let (memory, range) = lease.place();
        let granted = GrantedMemory::Frozen(lease.clone());
        Self::register(domain, memory, range, Access::REMOTE_READ, granted)
    }

    fn register(
        domain: &dyn ProtectionDomain,
        memory: Arc<HostMemory>,
        range: Range<usize>,
        access: Access,
        granted: GrantedMemory,
    ) -> Result<Self, VerbsError> {
        let (address, length) = (memory.address() + range.start as u64, range.len() as u64);
        let region = domain.register_range(memory, range, access)?;
        let start = RemoteSegment { address, rkey: region.rkey() };
        Ok(Self { region, place: RemotePlace { start, length }, _memory: granted })
    }

    /// Returns the range, for requests of the peer.
    pub fn place(&self) -> RemotePlace {
        debug_assert_eq!(self.place.start.rkey, self.region.rkey());
        self.place
    }
}
