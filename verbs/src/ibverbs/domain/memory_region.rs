//! Registered memory.

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use ibverbs_sys as sys;

use super::Domain;
use crate::ibverbs::device::list::Transport;
use crate::ibverbs::library::{check, last_error};
use crate::{Access, HostMemory, Lkey, MemoryRegion, Rkey, VerbsError};

/// A registered piece of memory. Its pages are locked, and count against `RLIMIT_MEMLOCK`.
#[derive(Debug)]
pub(crate) struct Region {
    domain: Arc<Domain>,
    memory: Arc<HostMemory>,
    range: Range<usize>,
    access: Access,
    region: NonNull<sys::ibv_mr>,
    lkey: Lkey,
    rkey: Rkey,
}

// SAFETY: libibverbs is thread-safe, and all else here is Send and Sync itself.
unsafe impl Send for Region {}
// SAFETY: the reasons for `Send` hold for `Sync`.
unsafe impl Sync for Region {}

impl Region {
    pub(crate) fn register(
        domain: Arc<Domain>,
        memory: Arc<HostMemory>,
        range: Range<usize>,
        access: Access,
    ) -> Result<Self, VerbsError> {
        memory.check_range(&range)?;
        let start = memory.as_ptr().as_ptr().wrapping_add(range.start);
        let flags = flags(access, domain.device().transport);
        // SAFETY:
        // - the domain is alive, and
        // - the memory, of which the range is a part as just checked, is valid as long as it is referenced, which the
        //   region does.
        let region = unsafe {
            (domain.device().library().reg_mr)(domain.as_ptr(), start.cast(), range.len(), flags as i32)
        };
        let region = NonNull::new(region).ok_or_else(|| {
            last_error(format!("registering {} bytes (see `ulimit -l` for what may be locked)", range.len()))
        })?;
        // SAFETY: the region was just created, and its keys never change.
        let (lkey, rkey) = unsafe { (region.as_ref().lkey, region.as_ref().rkey) };
        Ok(Self { domain, memory, range, access, region, lkey: Lkey(lkey), rkey: Rkey(rkey) })
    }
}

/// Returns the `enum ibv_access_flags` of rights. On iWARP the answer to an RDMA READ is a write by the peer (RFC
/// 5040, section 5.1), so a peer that knows the key may write wherever the device may write.
pub(crate) fn flags(access: Access, transport: Transport) -> u32 {
    use sys::ibv_access_flags as flag;
    let mut flags = 0;
    if access.contains(Access::LOCAL_WRITE) {
        flags |= flag::IBV_ACCESS_LOCAL_WRITE.0;
        if transport == Transport::Iwarp {
            flags |= flag::IBV_ACCESS_REMOTE_WRITE.0;
        }
    }
    if access.contains(Access::REMOTE_WRITE) {
        flags |= flag::IBV_ACCESS_REMOTE_WRITE.0;
    }
    if access.contains(Access::REMOTE_READ) {
        flags |= flag::IBV_ACCESS_REMOTE_READ.0;
    }
    flags
}

impl crate::sealed::Sealed for Region {}

impl MemoryRegion for Region {
    fn lkey(&self) -> Lkey {
        self.lkey
    }

    fn rkey(&self) -> Rkey {
        self.rkey
    }

    fn access(&self) -> Access {
        self.access
    }

    fn memory(&self) -> &Arc<HostMemory> {
        &self.memory
    }

    fn range(&self) -> Range<usize> {
        self.range.clone()
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the region was created here, and is deregistered once.
        let result = unsafe { (self.domain.device().library().dereg_mr)(self.region.as_ptr()) };
        if let Err(error) = check("deregistering memory", result) {
            // The device may still use the memory, so it is never freed.
            tracing::error!(%error, "{} bytes stay registered", self.range.len());
            let _ = Arc::into_raw(Arc::clone(&self.memory));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sink_of_a_read_can_be_written_by_peers_on_iwarp_alone() {
        let sink = Access::LOCAL_WRITE | Access::REMOTE_READ;
        assert_eq!(flags(sink, Transport::InfiniBand), 1 | 4);
        assert_eq!(flags(sink, Transport::Iwarp), 1 | 2 | 4);
        assert_eq!(flags(Access::LOCAL_READ, Transport::Iwarp), 0);
    }
}
