//! Registered memory of other devices, by dmabuf. Unproven: neither Soft-RoCE nor soft-iWARP registers any.

use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::Arc;

use ibverbs_sys as sys;

use super::Domain;
use super::memory_region::flags;
use crate::ibverbs::library::check;
use crate::{Access, DeviceMemoryRegion, DmaBuf, Lkey, Rkey, VerbsError};

/// A registered part of a dmabuf.
#[derive(Debug)]
pub(crate) struct DeviceRegion {
    domain: Arc<Domain>,
    access: Access,
    region: NonNull<sys::ibv_mr>,
    lkey: Lkey,
    rkey: Rkey,
    iova: u64,
    length: u64,
}

// SAFETY: libibverbs is thread-safe, and all else here is Send and Sync itself.
unsafe impl Send for DeviceRegion {}
// SAFETY: the reasons for `Send` hold for `Sync`.
unsafe impl Sync for DeviceRegion {}

impl DeviceRegion {
    pub(crate) fn register(
        domain: Arc<Domain>,
        memory: &DmaBuf<'_>,
        access: Access,
    ) -> Result<Self, VerbsError> {
        memory.check()?;
        let Some(register) = domain.device().library().reg_dmabuf_mr else {
            return Err(VerbsError::Unsupported(
                "dmabuf registration in this libibverbs (ibv_reg_dmabuf_mr came with rdma-core 34)",
            ));
        };
        let length = usize::try_from(memory.length)
            .map_err(|_| VerbsError::Unusable(format!("{memory:?} is longer than addresses reach")))?;
        let flags = flags(access, domain.device().transport);
        // SAFETY:
        // - the domain is alive,
        // - the descriptor is open, and with the region the kernel takes a reference of its own to the dmabuf; and
        // - the region reaches memory of this process only where the dmabuf is mapped, and code that maps a dmabuf
        //   expects that devices write to it.
        let region = unsafe {
            register(domain.as_ptr(), memory.offset, length, memory.iova, memory.fd.as_raw_fd(), flags as i32)
        };
        let Some(region) = NonNull::new(region) else { return Err(refused(memory)) };
        // SAFETY: the region was just created, and its keys never change.
        let (lkey, rkey) = unsafe { (region.as_ref().lkey, region.as_ref().rkey) };
        let (iova, length) = (memory.iova, memory.length);
        Ok(Self { domain, access, region, lkey: Lkey(lkey), rkey: Rkey(rkey), iova, length })
    }
}

/// Returns the error of the library, the driver or the kernel.
fn refused(memory: &DmaBuf<'_>) -> VerbsError {
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        // ENOSYS comes from the library for a driver without the function, EOPNOTSUPP from the kernel.
        Some(libc::ENOSYS | libc::EOPNOTSUPP) => VerbsError::Unsupported("dmabuf registration in its driver"),
        _ => match memory.check_kind() {
            Ok(()) => VerbsError::os(format!("registering {memory:?}"), error),
            Err(reason) => reason,
        },
    }
}

impl crate::sealed::Sealed for DeviceRegion {}

impl DeviceMemoryRegion for DeviceRegion {
    fn lkey(&self) -> Lkey {
        self.lkey
    }

    fn rkey(&self) -> Rkey {
        self.rkey
    }

    fn access(&self) -> Access {
        self.access
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
        // SAFETY: the region was created here, and is deregistered once.
        let result = unsafe { (self.domain.device().library().dereg_mr)(self.region.as_ptr()) };
        if let Err(error) = check("deregistering device memory", result) {
            // The kernel keeps its reference to the dmabuf.
            tracing::error!(%error, "{} bytes of device memory stay registered", self.length);
        }
    }
}
