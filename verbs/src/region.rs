//! Registered memory, of the host and of other devices: rights, keys, and segments.

use std::any::Any;
use std::fmt::Debug;
use std::ops::{BitOr, Range};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;

use super::sealed::Sealed;
use super::{HostMemory, VerbsError};

/// Memory that the device may use (`struct ibv_mr`). Dropping the last reference deregisters it.
pub trait MemoryRegion: Sealed + Any + Send + Sync + Debug {
    /// Returns the key that local segments carry.
    fn lkey(&self) -> Lkey;

    /// Returns the key that peers use for this region.
    fn rkey(&self) -> Rkey;

    /// Returns the rights of the region.
    fn access(&self) -> Access;

    /// Returns the memory that contains the region.
    fn memory(&self) -> &Arc<HostMemory>;

    /// Returns the registered part of the memory, in bytes from the start of the memory. No request reaches
    /// beyond this part.
    fn range(&self) -> Range<usize>;
}

/// A right of the peer of one queue pair to a part of a region ([`QueuePair::open_window`]; `struct ibv_mw`,
/// type 2). Dropping the last reference takes the right away. On some devices the right ends a moment later:
/// then the window is kept until it has ended, with the region and what [`keep`](Self::keep) was given. The
/// right ends with the queue pair, too.
///
/// [`QueuePair::open_window`]: super::QueuePair::open_window
pub trait MemoryWindow: Sealed + Send + Sync + Debug + 'static {
    /// Returns the key that the peer uses. Addresses are those of the memory in this process.
    fn rkey(&self) -> Rkey;

    /// Keeps `owner`, which keeps the bytes of the window in place, until the right has ended. Call this once.
    /// The thread that drops the window, or one that polls the completion queue, drops the owner.
    fn keep(&self, owner: Box<dyn Any + Send + Sync>);
}

/// Checks that a window of `range`, in bytes from the start of the region's memory, can be opened for a peer
/// with the rights `access`. Returns these rights without local ones.
pub(super) fn check_window(
    region: &dyn MemoryRegion,
    range: &Range<usize>,
    access: Access,
) -> Result<Access, VerbsError> {
    let whole = region.range();
    if range.is_empty() || range.start < whole.start || range.end > whole.end {
        return Err(VerbsError::unusable(format!("a window of {range:?} in a region of {whole:?}")));
    }
    if access.contains(Access::REMOTE_WRITE) && !region.access().contains(Access::LOCAL_WRITE) {
        return Err(VerbsError::unusable("a window for writing in a region that is for reading"));
    }
    let of_peers = Access::REMOTE_READ | Access::REMOTE_WRITE;
    Ok(Access::from_bits_truncate(access.bits() & of_peers.bits()))
}

/// Names a region in local segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Lkey(pub u32);

/// Names a region to peers. A peer that holds the key can use the region within its access rights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rkey(pub u32);

/// Access rights of a region (`enum ibv_access_flags`). Local reading is always allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Access(u8);

impl Access {
    /// Only local reading.
    pub const LOCAL_READ: Self = Self(0);
    /// The device may write on behalf of local requests: receive buffers, the sink of a READ.
    pub const LOCAL_WRITE: Self = Self(1);
    /// Peers may WRITE. Needs [`LOCAL_WRITE`](Self::LOCAL_WRITE) too.
    pub const REMOTE_WRITE: Self = Self(2);
    /// Peers may READ.
    pub const REMOTE_READ: Self = Self(4);

    /// Returns whether these rights include every right of `other`.
    #[inline]
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Returns the rights as bits: 1 local write, 2 remote write, 4 remote read.
    #[inline]
    pub const fn bits(self) -> u8 {
        self.0
    }

    /// Creates rights from the bits that [`bits`](Self::bits) returns. Drops unknown bits.
    ///
    /// ```
    /// use tonic_rdma_verbs::Access;
    ///
    /// let both = Access::LOCAL_WRITE | Access::REMOTE_READ;
    /// assert_eq!(Access::from_bits_truncate(both.bits()), both);
    /// ```
    pub const fn from_bits_truncate(bits: u8) -> Self {
        Self(bits & 7)
    }
}

impl BitOr for Access {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// A segment of registered local memory that a request reads from or writes to (`struct ibv_sge`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalSegment {
    address: u64,
    length: u64,
    lkey: Lkey,
}

impl LocalSegment {
    /// Names `range`, in bytes from the start of the region's [memory](MemoryRegion::memory), not from the
    /// start of the [registered part](MemoryRegion::range). The device checks bounds and rights when the
    /// request runs, and a violation fails it with
    /// [`LocalProtection`](super::CompletionStatus::LocalProtection).
    ///
    /// ```
    /// use std::sync::Arc;
    /// use tonic_rdma_verbs::{Access, HostMemory, LocalSegment};
    ///
    /// let domain = tonic_rdma_verbs::open("soft0")?.alloc_protection_domain()?;
    /// let region = domain.register(Arc::new(HostMemory::shared(4096, 4096)?), Access::LOCAL_READ)?;
    /// // SAFETY: no reference to the memory exists.
    /// let segment = unsafe { LocalSegment::new(&*region, 0..64) };
    /// assert_eq!(segment.length(), 64);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Safety
    /// - No reference (`&[u8]`, `&mut [u8]`) to the range may exist while a request that writes to it is
    ///   outstanding, and no `&mut [u8]` while a request reads it: the device moves the bytes at a time of
    ///   its own choice.
    #[inline]
    pub unsafe fn new(region: &dyn MemoryRegion, range: Range<usize>) -> Self {
        Self {
            address: region.memory().address() + range.start as u64,
            length: range.end.saturating_sub(range.start) as u64,
            lkey: region.lkey(),
        }
    }

    /// Names `range`, in bytes from the start of another device's memory. The device checks the segment like
    /// one of [`new`](Self::new). The segment is not for inline payloads, because the host copies those.
    ///
    /// This function is safe, because the range is not memory of this process. Code that maps a dmabuf into
    /// the process must expect that devices write to it.
    ///
    /// ```
    /// use tonic_rdma_verbs::{DeviceMemoryRegion, LocalSegment};
    ///
    /// fn first_page(region: &dyn DeviceMemoryRegion) -> LocalSegment {
    ///     LocalSegment::of_device(region, 0..4096)
    /// }
    /// # let _ = first_page;
    /// ```
    pub fn of_device(region: &dyn DeviceMemoryRegion, range: Range<u64>) -> Self {
        Self {
            address: region.iova().wrapping_add(range.start),
            length: range.end.saturating_sub(range.start),
            lkey: region.lkey(),
        }
    }

    /// Returns the bytes of all `segments`, or the largest number if they are more.
    #[inline]
    pub(crate) fn total(segments: &[Self]) -> u64 {
        segments.iter().fold(0, |sum, segment| sum.saturating_add(segment.length()))
    }

    /// Returns the virtual address of the first byte in this process. For memory of another device, returns
    /// the address in requests, counted from the region's [`iova`](DeviceMemoryRegion::iova).
    #[inline]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Returns the length in bytes.
    #[inline]
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Returns the key of the region.
    #[inline]
    pub fn lkey(&self) -> Lkey {
        self.lkey
    }
}

/// An address in a peer's memory, as the peer announced it. Its length is the length of the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteSegment {
    /// Virtual address in the peer's process.
    pub address: u64,
    /// Key of the peer's region.
    pub rkey: Rkey,
}

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
    /// The address of the first byte in requests. The memory's own address on its device is a good choice.
    /// `iova` and `offset` must have one offset within a page.
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
        VerbsError::unusable(format!(
            "{length} bytes at offset {offset} of dmabuf {fd}, for iova {iova:#x}: {reason}"
        ))
    }
}

/// Registered memory of another device. Dropping the last reference deregisters the memory. Until then the
/// driver of that device keeps the memory.
///
/// The host can't access the memory: this trait neither loads, stores nor copies. Therefore everything that
/// the host polls (tail words, metadata, credits) must be in [`HostMemory`](super::HostMemory).
///
/// This code is unproven: no network card that can register such memory has run it. The book's page on GPU
/// memory states the known facts.
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

    /// Returns the address of the byte at `offset`, for peers. The device checks bounds when a request runs.
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
    use crate::VerbsErrorKind;

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
            assert_eq!(error.kind(), VerbsErrorKind::Unusable, "{error:?}");
            error.to_string()
        };
        assert!(refused(0, 0, 0).ends_with("no bytes to register"));
        assert!(refused(u64::MAX - 1, 2, u64::MAX - 1).ends_with("beyond the largest address"));
        assert!(refused(0, 2, u64::MAX - 1).ends_with("beyond the largest address"));
        assert!(refused(8, 64, 4096 + 16).contains("differ within a page of"));
    }
}
