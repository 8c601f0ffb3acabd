//! Memory of another device, such as a GPU, that an RDMA device reaches without the host.
//!
//! This code is unproven: no network card that can register such memory has run it. The book's page on GPU memory states
//! the known facts.

use std::fmt::Debug;
use std::os::fd::{AsRawFd, BorrowedFd};

use super::sealed::Sealed;
use super::{Access, Lkey, RemoteSegment, Rkey, VerbsError};

/// A part of a dmabuf, by which one driver lends its device's memory to another driver (Linux,
/// `Documentation/driver-api/dma-buf.rst`). CUDA makes a descriptor of device memory by
/// `cuMemGetHandleForAddressRange`, ROCm by `hsa_amd_portable_export_dmabuf`.
#[derive(Clone, Copy, Debug)]
pub struct DmaBuf<'a> {
    /// The descriptor of the dmabuf.
    pub fd: BorrowedFd<'a>,
    /// Offset of the part in the dmabuf, in bytes.
    pub offset: u64,
    /// Length of the part, in bytes.
    pub length: u64,
    /// The address of the first byte in requests. The memory's own address on its device is a good choice. `iova` and
    /// `offset` must have one offset within a page.
    pub iova: u64,
}

#[cfg_attr(not(feature = "ibverbs"), expect(dead_code, reason = "the software device registers none"))]
impl DmaBuf<'_> {
    /// Checks that the numbers fit together.
    pub(super) fn check(&self) -> Result<(), VerbsError> {
        let page = rustix::param::page_size() as u64;
        if self.length == 0 {
            return Err(self.unusable("no bytes to register"));
        }
        if self.offset.checked_add(self.length).is_none() || self.iova.checked_add(self.length).is_none() {
            return Err(self.unusable("its end lies beyond the largest address"));
        }
        if self.offset % page != self.iova % page {
            return Err(self.unusable(&format!("offset and iova differ within a page of {page} bytes")));
        }
        Ok(())
    }

    /// Checks that the descriptor belongs to a dmabuf. Callers use this check to explain a refusal.
    pub(super) fn check_kind(&self) -> Result<(), VerbsError> {
        // Linux, include/uapi/linux/magic.h.
        const DMA_BUF_MAGIC: u64 = 0x444d_4142;
        let system =
            rustix::fs::fstatfs(self.fd).map_err(|error| VerbsError::os("looking at a dmabuf", error))?;
        match system.f_type as u64 {
            DMA_BUF_MAGIC => Ok(()),
            other => Err(self.unusable(&format!(
                "the descriptor is no dmabuf, but one of a file system of type {other:#x}"
            ))),
        }
    }

    fn unusable(&self, reason: &str) -> VerbsError {
        let Self { fd, offset, length, iova } = self;
        let fd = fd.as_raw_fd();
        VerbsError::Unusable(format!(
            "{length} bytes at offset {offset} of dmabuf {fd}, for iova {iova:#x}: {reason}"
        ))
    }
}

/// Registered memory of another device. Dropping the last reference deregisters the memory. Until then the driver of that
/// device keeps the memory.
///
/// The host can't access the memory: this trait neither loads, stores nor copies. Therefore everything that the host polls
/// (tail words, metadata, credits) must be in [`HostMemory`](super::HostMemory).
pub trait DeviceMemoryRegion: Sealed + Send + Sync + Debug + 'static {
    /// Returns the key that local segments carry.
    fn lkey(&self) -> Lkey;

    /// Returns the key that peers use for this region.
    fn rkey(&self) -> Rkey;

    /// Returns the rights of the region.
    fn access(&self) -> Access;

    /// Returns the address of the first byte in requests. This is not an address of this process.
    fn iova(&self) -> u64;

    /// Returns the length in bytes.
    fn length(&self) -> u64;

    /// Returns the place of the byte at `offset`, for peers. The device checks bounds when a request runs.
    fn remote(&self, offset: u64) -> RemoteSegment {
        RemoteSegment { address: self.iova().wrapping_add(offset), rkey: self.rkey() }
    }
}

#[cfg(all(test, feature = "ibverbs"))]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use std::os::fd::AsFd;

    use super::*;
    use crate::HostMemory;

    #[test]
    fn a_descriptor_that_is_no_dmabuf_is_named() {
        let memory = HostMemory::shared(8192, 4096).unwrap();
        let (pipe, _writer) = rustix::pipe::pipe().unwrap();
        for fd in [memory.shared_fd().unwrap(), pipe.as_fd()] {
            let part = DmaBuf { fd, offset: 0, length: 4096, iova: 0x10_0000 };
            part.check().unwrap();
            let error = part.check_kind().unwrap_err().to_string();
            let start = format!(
                "4096 bytes at offset 0 of dmabuf {}, for iova 0x100000: the descriptor is no dmabuf,",
                fd.as_raw_fd()
            );
            assert!(error.starts_with(&start), "{error}");
        }
    }

    #[test]
    fn numbers_that_do_not_fit_together_are_refused() {
        let memory = HostMemory::shared(8192, 4096).unwrap();
        let fd = memory.shared_fd().unwrap();
        let refused = |offset, length, iova| {
            let error = DmaBuf { fd, offset, length, iova }.check().unwrap_err();
            assert!(matches!(error, VerbsError::Unusable(_)), "{error:?}");
            error.to_string()
        };
        assert!(refused(0, 0, 0).ends_with("no bytes to register"));
        assert!(refused(u64::MAX - 1, 2, u64::MAX - 1).ends_with("beyond the largest address"));
        assert!(refused(0, 2, u64::MAX - 1).ends_with("beyond the largest address"));
        assert!(refused(8, 64, 4096 + 16).contains("differ within a page of"));
    }
}
