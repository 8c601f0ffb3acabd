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
    /// Access rights of the slabs of blocks. Slabs of [`RegisteredBuf`](super::RegisteredBuf)s have only the right of peers
    /// to read, if it is among these rights.
    pub access: Access,
    /// Bytes of a slab, at least 64 KiB, rounded up to whole pages. Slabs of 2 MiB and more are aligned to 2 MiB.
    /// A request for more than half a slab gets its own slab.
    pub slab_size: usize,
    /// Bytes that may be leased for sending at a time, buffers included.
    pub send_quota: u64,
    /// Bytes that may be leased for receiving at a time.
    pub receive_quota: u64,
    /// Whether to ask the kernel for transparent huge pages for slabs. The kernel does this only if the administrator allows it
    /// (`/sys/kernel/mm/transparent_hugepage/shmem_enabled` is `advise`). Then a slab becomes resident as a whole at its first
    /// use.
    pub huge_pages: bool,
}

impl Default for PoolSettings {
    /// Returns settings with local writes and remote reads, slabs of 2 MiB, quotas of 1 GiB each, and huge pages.
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

/// One of the two quotas of a pool. Each lease counts against one of them, so neither direction can starve the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Quota {
    /// Memory that content is sent from.
    Send,
    /// Memory that content is received in.
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

/// The numbers of a pool at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolStatistics {
    /// Number of slabs.
    pub slabs: usize,
    /// Bytes of all slabs, which are registered and count against the budget.
    pub registered: u64,
    /// Bytes leased against the send quota.
    pub leased_send: u64,
    /// Bytes leased against the receive quota.
    pub leased_receive: u64,
    /// Number of frozen buffers, which a look-up by address finds.
    pub frozen: usize,
    /// Number of requests that got a piece which was in use before.
    pub hits: u64,
    /// Number of requests that needed a new piece of a slab, or a new slab.
    pub misses: u64,
}
