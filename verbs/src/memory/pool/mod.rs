//! The pool: slabs of registered memory, and the pieces that are cut from them.
//!
//! ```text
//!  Pool ─▶ PoolShared ─▶ Arena, one for blocks and one for buffers ─▶ Slab ─▶ Piece
//!               ▲                                                               │
//!               └──────────────── gives the piece back on drop ──────────── HeldPiece ─▶ FrozenBuffer
//! ```
//!
//! [`Block`], [`RegisteredBuf`] and [`Lease`] in `pieces` are the public faces of a held piece.

mod arena;
mod free_ranges;
mod frozen;
mod held;
mod shared;
mod size_class;
mod slab;
mod unbound;

use std::sync::Arc;

pub(crate) use arena::Purpose;
pub(crate) use frozen::{FrozenBuffer, FrozenIndex};
pub(crate) use held::HeldPiece;
pub(crate) use slab::{Slab, advise_huge_pages};
pub use unbound::find_sendable;

use super::budget::Budget;
use super::error::PoolError;
use super::pieces::{Block, Lease, RegisteredBuf};
use super::settings::{PoolSettings, PoolStatistics, Quota};
use crate::{Access, ProtectionDomain};
use shared::PoolShared;
use unbound::Unbound;

/// A pool of registered memory, of a connection or an application. Clones are the same pool.
///
/// It has no memory at first: slabs are mapped and registered on demand, and kept for reuse. When the last clone is
/// dropped, each slab goes with the last piece that is in use of it, and its budget comes back.
///
/// Thread-safe. [`lease`](Self::lease) and [`allocate`](Self::allocate) take a lock for some ten nanoseconds where a
/// free piece of that size class is at hand, and no system call; where not, mapping and registering a slab takes
/// microseconds, and the kernel clears its pages at the first touch.
#[derive(Clone, Debug)]
pub struct Pool {
    handle: Arc<PoolHandle>,
}

impl Pool {
    /// Makes a pool that registers its memory with `domain`, within `budget`. It is for programs that post verbs themselves;
    /// those that only send make theirs with [`for_sending`](Self::for_sending).
    ///
    /// ```
    /// use tonic_rdma_verbs::memory::{Budget, Pool, PoolSettings, Quota};
    ///
    /// let device = tonic_rdma_verbs::open("soft0")?;
    /// let domain = device.alloc_protection_domain()?;
    /// let pool = Pool::new(domain, PoolSettings::default(), Budget::new(64 << 20));
    /// let block = pool.lease(4096, Quota::Receive)?;
    /// # drop(block);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn new(domain: Arc<dyn ProtectionDomain>, settings: PoolSettings, budget: Arc<Budget>) -> Self {
        Self::with_index(domain, settings, budget, Arc::new(FrozenIndex::new()))
    }

    fn with_index(
        domain: Arc<dyn ProtectionDomain>,
        settings: PoolSettings,
        budget: Arc<Budget>,
        index: Arc<FrozenIndex>,
    ) -> Self {
        let shared = PoolShared::new(domain, settings, budget, index);
        Self { handle: Arc::new(PoolHandle { shared: Arc::new(shared) }) }
    }

    /// Makes a pool whose buffers any connection can send from where they are, over any device: the application allocates
    /// and fills them, and hands them on as [`Bytes`](bytes::Bytes). A connection that comes across such bytes registers
    /// their slab with its own protection domain, once, for its device to read; peers get no right to it. Together with
    /// [`gather`](crate::transport::gather), the content of a large `bytes` field is not copied at all on the sending side.
    ///
    /// `limit` is how many bytes may be in use at a time. Registrations count against the connections' budget
    /// (`RDMA_PINNED_LIMIT`); where that is used up, the bytes are copied as any others are.
    /// [`copies_avoided_bytes`](crate::CounterSnapshot::copies_avoided_bytes) counts what was sent without a copy.
    ///
    /// Use [`allocate`](Self::allocate) alone: segments made of its blocks and leases name no registered memory, and every
    /// device refuses them.
    ///
    /// ```
    /// let pool = tonic_rdma_verbs::memory::Pool::for_sending(1 << 30);
    /// let mut tensor = pool.allocate(4 << 20)?;
    /// tensor.fill(1);
    /// let payload: bytes::Bytes = tensor.freeze();
    /// # assert_eq!(payload.len(), 4 << 20);
    /// # Ok::<(), tonic_rdma_verbs::memory::PoolError>(())
    /// ```
    pub fn for_sending(limit: u64) -> Self {
        let settings = PoolSettings {
            access: Access::LOCAL_READ,
            send_quota: limit,
            receive_quota: 0,
            ..PoolSettings::default()
        };
        Self::with_index(Arc::new(Unbound), settings, Budget::new(limit), unbound::index())
    }

    /// Leases a block of at least `length` bytes, for the device to read and write. Its content is whatever it was
    /// last used for in this pool, or zeros. See [`new`](Self::new) for a pool of your own.
    ///
    /// ```
    /// # use tonic_rdma_verbs::memory::{Budget, Pool, PoolError, PoolSettings};
    /// use tonic_rdma_verbs::memory::Quota;
    ///
    /// # fn take(pool: &Pool) -> Result<(), PoolError> {
    /// let mut block = pool.lease(4096, Quota::Send)?;
    /// block.copy_in(0, b"content").expect("it fits");
    /// let segment = block.segment(0..7).expect("within the block"); // for a work request
    /// # drop(segment);
    /// # Ok(())
    /// # }
    /// # let domain = tonic_rdma_verbs::open("soft0")?.alloc_protection_domain()?;
    /// # take(&Pool::new(domain, PoolSettings::default(), Budget::new(64 << 20)))?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// The quota or the budget is used up, or a slab could not be made: see [`PoolError`].
    pub fn lease(&self, length: usize, quota: Quota) -> Result<Block, PoolError> {
        Ok(Block::new(self.obtain(length, quota, Purpose::Block)?, length))
    }

    /// Allocates a buffer of `length` bytes for content to be sent. It counts against [`Quota::Send`] until it, and all
    /// [`Bytes`](bytes::Bytes) and leases made from it, are gone. Its content is whatever it was last used for in this
    /// pool, or zeros.
    ///
    /// ```
    /// use tonic_rdma_verbs::memory::Pool;
    ///
    /// let pool = Pool::for_sending(1 << 20);
    /// let mut buffer = pool.allocate(4096)?;
    /// buffer.fill(7); // it is a `&mut [u8]`
    /// let payload: bytes::Bytes = buffer.freeze();
    /// # assert_eq!(payload.len(), 4096);
    /// # Ok::<(), tonic_rdma_verbs::memory::PoolError>(())
    /// ```
    ///
    /// # Errors
    /// The quota or the budget is used up, or a slab could not be made: see [`PoolError`].
    pub fn allocate(&self, length: usize) -> Result<RegisteredBuf, PoolError> {
        Ok(RegisteredBuf::new(self.obtain(length, Quota::Send, Purpose::Buffer)?, length))
    }

    /// Looks up whether all of `length` bytes at `address` lie in one frozen buffer of this pool, and if so takes a
    /// reference that keeps them there and unchanged. It takes a few nanoseconds if no buffer can be there.
    ///
    /// For a slice that the caller holds: `pool.find(slice.as_ptr() as usize, slice.len())`.
    pub fn find(&self, address: usize, length: usize) -> Option<Lease> {
        Lease::find(self.shared().index(), address, length)
    }

    /// Gives back all slabs of which nothing is in use. Worth a call when a connection has gone idle: its slabs count against
    /// the budget of all connections.
    pub fn trim(&self) {
        self.shared().trim();
    }

    /// Returns the numbers of the pool at this moment.
    pub fn statistics(&self) -> PoolStatistics {
        self.shared().statistics()
    }

    /// Returns its settings, with the slab size as rounded.
    pub fn settings(&self) -> &PoolSettings {
        self.shared().settings()
    }

    /// Returns the budget that it draws from.
    pub fn budget(&self) -> &Arc<Budget> {
        self.shared().budget()
    }

    pub(crate) fn obtain(
        &self,
        length: usize,
        quota: Quota,
        purpose: Purpose,
    ) -> Result<HeldPiece, PoolError> {
        let piece = self.shared().obtain(length, quota, purpose)?;
        Ok(HeldPiece::new(piece, quota, purpose, Arc::clone(self.shared())))
    }

    fn shared(&self) -> &Arc<PoolShared> {
        &self.handle.shared
    }
}

/// Lives as long as a `Pool` does, while `PoolShared` waits for the last piece.
#[derive(Debug)]
struct PoolHandle {
    shared: Arc<PoolShared>,
}

impl Drop for PoolHandle {
    fn drop(&mut self) {
        self.shared.close();
    }
}
