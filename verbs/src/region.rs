//! Registered memory: rights, keys, and segments that name a piece of it.

use std::fmt::Debug;
use std::ops::{BitOr, Range};
use std::sync::Arc;

use super::{DeviceMemoryRegion, HostMemory};

/// Memory that the device may use (`struct ibv_mr`). Deregistered when the last reference goes.
pub trait MemoryRegion: Send + Sync + Debug + 'static {
    /// Returns the key that local segments carry.
    fn lkey(&self) -> Lkey;

    /// Returns the key that peers name this region by.
    fn rkey(&self) -> Rkey;

    /// Returns the rights of the region.
    fn access(&self) -> Access;

    /// Returns the memory that it is a part of, or all of.
    fn memory(&self) -> &Arc<HostMemory>;

    /// Returns what part of the memory it is, in bytes from the memory's start. No request reaches beyond it.
    fn range(&self) -> Range<usize>;
}

/// Names a region in local segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Lkey(pub u32);

/// Names a region towards peers. Whoever holds it can use the region as far as its access rights go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rkey(pub u32);

/// Access rights of a region (`enum ibv_access_flags`). Local reading is always allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Access(u8);

impl Access {
    /// Local reading alone.
    pub const LOCAL_READ: Self = Self(0);
    /// The device may write on behalf of local requests: receive buffers, the sink of a READ.
    pub const LOCAL_WRITE: Self = Self(1);
    /// Peers may WRITE. Needs [`LOCAL_WRITE`](Self::LOCAL_WRITE) too.
    pub const REMOTE_WRITE: Self = Self(2);
    /// Peers may READ.
    pub const REMOTE_READ: Self = Self(4);

    /// Returns whether every right of `other` is among these.
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Returns the rights as bits: 1 local write, 2 remote write, 4 remote read.
    pub const fn bits(self) -> u8 {
        self.0
    }

    /// Makes rights of the bits that [`bits`](Self::bits) returns; unknown bits are dropped.
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
    /// Names `range`, in bytes from the start of the region's [memory](MemoryRegion::memory), whatever
    /// [part](MemoryRegion::range) of it the region is. Bounds and rights are checked when the request runs, and fail it
    /// with [`LocalProtection`](super::CompletionStatus::LocalProtection).
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
    ///   and no `&mut [u8]` while one reads it: the device moves the bytes at a time of its own choosing.
    pub unsafe fn new(region: &dyn MemoryRegion, range: Range<usize>) -> Self {
        Self {
            address: region.memory().address() + range.start as u64,
            length: range.end.saturating_sub(range.start) as u64,
            lkey: region.lkey(),
        }
    }

    /// Names `range`, in bytes from the start of another device's memory. Checked as those of [`new`](Self::new) are. Not
    /// for inline payloads, which the host copies.
    ///
    /// It is safe, as nothing of this process lies there: code that maps a dmabuf into the process has to expect that devices
    /// write to it.
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

    /// Returns the virtual address of the first byte in this process; for a device's memory the address as its
    /// [`iova`](DeviceMemoryRegion::iova) has it.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Returns the length in bytes.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Returns the key of the region.
    pub fn lkey(&self) -> Lkey {
        self.lkey
    }
}

/// A place in a peer's memory, as the peer told it. Its length is that of the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteSegment {
    /// Virtual address in the peer's process.
    pub address: u64,
    /// Key of the peer's region.
    pub rkey: Rkey,
}
