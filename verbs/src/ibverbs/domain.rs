//! Protection domains, and the memory that is registered in them.

use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::{Arc, Weak};

use ibverbs_sys as sys;

use super::device::Device;
use super::device::list::Transport;
use super::library::{Owned, check, last_error};
use crate::{
    Access, Context as _, DeviceMemoryRegion, DmaBuf, HostMemory, Lkey, MemoryRegion, Rkey, VerbsError,
};

/// A protection domain.
#[derive(Debug)]
pub(crate) struct Domain {
    me: Weak<Domain>,
    domain: Owned<sys::ibv_pd>,
    pub(super) device: Arc<Device>,
}

impl Domain {
    pub(crate) fn alloc(device: Arc<Device>) -> Result<Arc<Self>, VerbsError> {
        let library = device.library();
        // SAFETY:
        // - the context is open, and its device is dropped after the domain; and
        // - regions and queue pairs hold a reference to their domain, so none is left when the domain is
        //   dropped.
        let domain = unsafe {
            let domain = (library.alloc_pd)(device.context());
            Owned::new(domain, library.dealloc_pd, "freeing a protection domain")
        };
        let domain = domain.ok_or_else(|| last_error("allocating a protection domain"))?;
        Ok(Arc::new_cyclic(|me| Self { me: me.clone(), domain, device }))
    }

    pub(crate) fn as_ptr(&self) -> *mut sys::ibv_pd {
        self.domain.as_ptr()
    }

    pub(crate) fn strong(&self) -> Result<Arc<Self>, VerbsError> {
        self.me.upgrade().ok_or_else(|| VerbsError::foreign("protection domain"))
    }
}

/// A registration of memory in a domain. Its user ends it, once, and not by dropping it: memory whose
/// deregistration fails is never freed.
#[derive(Debug)]
struct Registration {
    domain: Arc<Domain>,
    region: NonNull<sys::ibv_mr>,
    access: Access,
    lkey: Lkey,
    rkey: Rkey,
}

// SAFETY: libibverbs is thread-safe, and all else here is Send and Sync itself.
unsafe impl Send for Registration {}
// SAFETY: the reasons for `Send` hold for `Sync`.
unsafe impl Sync for Registration {}

impl Registration {
    /// Takes over a region that was just created, or returns `None` for a null pointer. The caller keeps the
    /// domain until it has read the reason.
    fn new(domain: &Arc<Domain>, region: *mut sys::ibv_mr, access: Access) -> Option<Self> {
        let region = NonNull::new(region)?;
        // SAFETY: the region was just created, and its keys never change.
        let (lkey, rkey) = unsafe { (region.as_ref().lkey, region.as_ref().rkey) };
        Some(Self { domain: Arc::clone(domain), region, access, lkey: Lkey(lkey), rkey: Rkey(rkey) })
    }

    /// Deregisters the memory.
    ///
    /// # Safety
    /// The caller calls this once.
    unsafe fn end(&self, action: &str) -> Result<(), VerbsError> {
        // SAFETY: the region was created here, and is deregistered once, as the caller promises.
        check(action, unsafe { (self.domain.device.library().dereg_mr)(self.region.as_ptr()) })
    }
}

/// A registered range of memory. Its pages are locked, and count against `RLIMIT_MEMLOCK`.
#[derive(Debug)]
pub(crate) struct Region {
    registration: Registration,
    memory: Arc<HostMemory>,
    range: Range<usize>,
}

impl Region {
    pub(crate) fn register(
        domain: Arc<Domain>,
        memory: Arc<HostMemory>,
        range: Range<usize>,
        access: Access,
    ) -> Result<Self, VerbsError> {
        memory.check_range(&range)?;
        let start = memory.as_ptr().as_ptr().wrapping_add(range.start);
        let mut flags = flags(access, domain.device.transport);
        if domain.device.attributes().memory_windows {
            // A local right: it gives no peer anything.
            flags |= sys::ibv_access_flags::IBV_ACCESS_MW_BIND.0;
        }
        // SAFETY:
        // - the domain is alive, and
        // - the memory, of which the range is a part as just checked, is valid as long as it is referenced,
        //   which the region does.
        let region = unsafe {
            (domain.device.library().reg_mr)(domain.as_ptr(), start.cast(), range.len(), flags as i32)
        };
        let registration = Registration::new(&domain, region, access).ok_or_else(|| {
            last_error(format!("registering {} bytes (see `ulimit -l` for what may be locked)", range.len()))
        })?;
        Ok(Self { registration, memory, range })
    }

    /// Returns whether the region is one of `domain`.
    pub(super) fn is_of(&self, domain: &Domain) -> bool {
        std::ptr::eq(&raw const *self.registration.domain, domain)
    }

    pub(super) fn as_ptr(&self) -> *mut sys::ibv_mr {
        self.registration.region.as_ptr()
    }
}

impl crate::sealed::Sealed for Region {}

impl MemoryRegion for Region {
    fn lkey(&self) -> Lkey {
        self.registration.lkey
    }

    fn rkey(&self) -> Rkey {
        self.registration.rkey
    }

    fn access(&self) -> Access {
        self.registration.access
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
        // SAFETY: called once, here.
        if let Err(error) = unsafe { self.registration.end("deregistering memory") } {
            // The device may still use the memory, so it is never freed.
            tracing::error!(%error, "{} bytes stay registered", self.range.len());
            let _ = Arc::into_raw(Arc::clone(&self.memory));
        }
    }
}

/// A registered part of a dmabuf, memory of another device. Unproven: neither Soft-RoCE nor soft-iWARP
/// registers any.
#[derive(Debug)]
pub(crate) struct DeviceRegion {
    registration: Registration,
    iova: u64,
    length: u64,
}

impl DeviceRegion {
    pub(crate) fn register(
        domain: Arc<Domain>,
        memory: &DmaBuf<'_>,
        access: Access,
    ) -> Result<Self, VerbsError> {
        memory.check()?;
        let Some(register) = domain.device.library().reg_dmabuf_mr else {
            return Err(VerbsError::unsupported(
                "dmabuf registration in this libibverbs (ibv_reg_dmabuf_mr came with rdma-core 34)",
            ));
        };
        let bytes = usize::try_from(memory.length)
            .map_err(|_| VerbsError::unusable(format!("{memory:?} is longer than addresses reach")))?;
        let flags = flags(access, domain.device.transport);
        // SAFETY:
        // - the domain is alive,
        // - the descriptor is open, and with the region the kernel takes a reference of its own to the
        //   dmabuf; and
        // - the region reaches memory of this process only where the dmabuf is mapped, and code that maps a
        //   dmabuf expects that devices write to it.
        let region = unsafe {
            register(domain.as_ptr(), memory.offset, bytes, memory.iova, memory.fd.as_raw_fd(), flags as i32)
        };
        let (iova, length) = (memory.iova, memory.length);
        match Registration::new(&domain, region, access) {
            Some(registration) => Ok(Self { registration, iova, length }),
            None => Err(refused(memory)),
        }
    }
}

/// Returns the error of the library, the driver or the kernel.
fn refused(memory: &DmaBuf<'_>) -> VerbsError {
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        // ENOSYS comes from the library for a driver without the function, EOPNOTSUPP from the kernel.
        Some(libc::ENOSYS | libc::EOPNOTSUPP) => VerbsError::unsupported("dmabuf registration in its driver"),
        _ => match memory.check_kind() {
            Ok(()) => VerbsError::os(format!("registering {memory:?}"), error),
            Err(reason) => reason,
        },
    }
}

impl crate::sealed::Sealed for DeviceRegion {}

impl DeviceMemoryRegion for DeviceRegion {
    fn lkey(&self) -> Lkey {
        self.registration.lkey
    }

    fn rkey(&self) -> Rkey {
        self.registration.rkey
    }

    fn access(&self) -> Access {
        self.registration.access
    }

    fn iova(&self) -> u64 {
        self.iova
    }

    fn length(&self) -> u64 {
        self.length
    }
}

impl Drop for DeviceRegion {
    fn drop(&mut self) {
        // SAFETY: called once, here.
        if let Err(error) = unsafe { self.registration.end("deregistering device memory") } {
            // The kernel keeps its reference to the dmabuf.
            tracing::error!(%error, "{} bytes of device memory stay registered", self.length);
        }
    }
}

/// Returns the `enum ibv_access_flags` of rights. On iWARP the answer to an RDMA READ is a write by the peer
/// (RFC 5040, section 5.1), so a peer that knows the key may write wherever the device may write.
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
