//! Registered memory: rights, keys, and segments.

use std::fmt::Debug;
use std::ops::{BitOr, Range};
use std::sync::Arc;

use super::sealed::Sealed;
use super::{DeviceMemoryRegion, HostMemory};

/// Memory that the device may use (`struct ibv_mr`). Dropping the last reference deregisters it.
pub trait MemoryRegion: Sealed + Send + Sync + Debug + 'static {
    /// Returns the key that local segments carry.
    fn lkey(&self) -> Lkey;

    /// Returns the key that peers use for this region.
    fn rkey(&self) -> Rkey;

    /// Returns the rights of the region.
    fn access(&self) -> Access;

    /// Returns the memory that contains the region.
    fn memory(&self) -> &Arc<HostMemory>;

    /// Returns the registered part of the memory, in bytes from the start of the memory. No request reaches beyond this
    /// part.
    fn range(&self) -> Range<usize>;
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

/// A piece of registered local memory that a request reads from or writes to (`struct ibv_sge`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalSegment {
    address: u64,
    length: u64,
    lkey: Lkey,
}

impl LocalSegment {
    /// Names `range`, in bytes from the start of the region's [memory](MemoryRegion::memory), not from the start of
    /// the [registered part](MemoryRegion::range). The device checks bounds and rights when the request runs, and a
    /// violation fails it with [`LocalProtection`](super::CompletionStatus::LocalProtection).
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
    /// - No reference (`&[u8]`, `&mut [u8]`) to the range may exist while a request that writes to it is outstanding,
    ///   and no `&mut [u8]` while a request reads it: the device moves the bytes at a time of its own choice.
    #[inline]
    pub unsafe fn new(region: &dyn MemoryRegion, range: Range<usize>) -> Self {
        Self {
            address: region.memory().address() + range.start as u64,
            length: range.end.saturating_sub(range.start) as u64,
            lkey: region.lkey(),
        }
    }

    /// Names `range`, in bytes from the start of another device's memory. The device checks the segment like one of
    /// [`new`](Self::new). The segment is not for inline payloads, because the host copies those.
    ///
    /// This function is safe, because the range is not memory of this process. Code that maps a dmabuf into the
    /// process must expect that devices write to it.
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

    /// Returns the virtual address of the first byte in this process. For memory of another device, returns the address in
    /// requests, counted from the region's [`iova`](DeviceMemoryRegion::iova).
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

/// A place in a peer's memory, as the peer announced it. Its length is the length of the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteSegment {
    /// Virtual address in the peer's process.
    pub address: u64,
    /// Key of the peer's region.
    pub rkey: Rkey,
}
