//! Settings and numbers of a pool.

use std::fmt;

use crate::Access;

/// Settings of a [`Pool`](super::Pool).
///
/// ```
/// use tonic_rdma_verbs::memory::{PoolSettings, Quota};
///
/// let settings = PoolSettings { send_quota: 256 << 20, ..PoolSettings::default() };
/// assert_eq!(settings.limit(Quota::Send), 256 << 20);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolSettings {
    /// Rights of the slabs that blocks are cut from. Slabs of [`RegisteredBuf`](super::RegisteredBuf)s have those of
    /// these rights that let peers read, and none to write.
    pub access: Access,
    /// Bytes of a slab, at least 64 KiB, rounded up to whole pages. Slabs of 2 MiB and more are aligned to 2 MiB.
    /// A request for more than half of it gets a slab of its own.
    pub slab_size: usize,
    /// Bytes that may be leased for sending at a time, buffers included.
    pub send_quota: u64,
    /// Bytes that may be leased for receiving at a time.
    pub receive_quota: u64,
    /// Asks the kernel to back slabs with transparent huge pages. It does so only where the administrator lets it
    /// (`/sys/kernel/mm/transparent_hugepage/shmem_enabled` is `advise`), and then a touched slab is resident whole.
    pub huge_pages: bool,
}

impl Default for PoolSettings {
    /// Local writes and remote reads, slabs of 2 MiB, quotas of 1 GiB each, huge pages where to be had.
    fn default() -> Self {
        Self {
            access: Access::LOCAL_WRITE | Access::REMOTE_READ,
            slab_size: 2 << 20,
            send_quota: 1 << 30,
            receive_quota: 1 << 30,
            huge_pages: true,
        }
    }
}

impl PoolSettings {
    /// Returns the limit of `quota`, in bytes.
    pub fn limit(&self, quota: Quota) -> u64 {
        match quota {
            Quota::Send => self.send_quota,
            Quota::Receive => self.receive_quota,
        }
    }
}

/// Which of a pool's two quotas a lease counts against: neither direction can starve the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Quota {
    /// Memory that content leaves from.
    Send,
    /// Memory that content arrives in.
    Receive,
}

impl fmt::Display for Quota {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Send => "send",
            Self::Receive => "receive",
        })
    }
}

/// A pool at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolStatistics {
    /// Slabs there are.
    pub slabs: usize,
    /// Bytes of those slabs: registered, and charged to the budget.
    pub registered: u64,
    /// Bytes leased against the send quota.
    pub leased_send: u64,
    /// Bytes leased against the receive quota.
    pub leased_receive: u64,
    /// Buffers that are frozen, and so can be found by address.
    pub frozen: usize,
    /// Requests met with a piece of the same size class that was in use before.
    pub hits: u64,
    /// Requests that had to cut a new piece off a slab, or needed a new slab.
    pub misses: u64,
}
