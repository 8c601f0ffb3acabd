//! The pool: leases out of its arenas, within quotas and budget.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::arena::{Arena, Piece};
use super::budget::Reservation;
use super::held::Held;
use super::lease::{Frozen, FrozenIndex};
use super::slab::Slab;
use super::unbound::Unbound;
use super::{Block, Budget, Lease, PoolError, PoolSettings, PoolStatistics, Quota, RegisteredBuf, unbound};
use crate::{Access, ProtectionDomain};

/// Smallest slab that a pool starts with; a budget that runs out makes smaller ones.
const SMALLEST_SLAB: usize = 64 << 10;

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
    handle: Arc<Handle>,
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
        let page = rustix::param::page_size();
        let slab_size =
            settings.slab_size.clamp(SMALLEST_SLAB, isize::MAX as usize / 2).next_multiple_of(page);
        let settings = PoolSettings { slab_size, ..settings };
        let state = State {
            blocks: Arena::new(slab_size),
            buffers: Arena::new(slab_size),
            leased_send: 0,
            leased_receive: 0,
            registered: 0,
            hits: 0,
            misses: 0,
            closed: false,
        };
        let frozen = AtomicUsize::new(0);
        let shared = Shared { domain, settings, budget, index, frozen, state: Mutex::new(state) };
        Self { handle: Arc::new(Handle { shared: Arc::new(shared) }) }
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
        Lease::find(&self.shared().index, address, length)
    }

    /// Gives back all slabs of which nothing is in use. Worth a call when a connection has gone idle: its slabs count against
    /// the budget of all connections.
    pub fn trim(&self) {
        self.shared().trim();
    }

    /// Returns the numbers of the pool at this moment.
    pub fn statistics(&self) -> PoolStatistics {
        let shared = self.shared();
        let state = shared.lock();
        PoolStatistics {
            slabs: state.blocks.slabs() + state.buffers.slabs(),
            registered: state.registered,
            leased_send: state.leased_send,
            leased_receive: state.leased_receive,
            frozen: shared.frozen.load(Ordering::Relaxed),
            hits: state.hits,
            misses: state.misses,
        }
    }

    /// Returns its settings, with the slab size as rounded.
    pub fn settings(&self) -> &PoolSettings {
        &self.shared().settings
    }

    /// Returns the budget that it draws from.
    pub fn budget(&self) -> &Arc<Budget> {
        &self.shared().budget
    }

    pub(super) fn obtain(&self, length: usize, quota: Quota, purpose: Purpose) -> Result<Held, PoolError> {
        let piece = self.shared().obtain(length, quota, purpose)?;
        Ok(Held::new(piece, quota, purpose, Arc::clone(self.shared())))
    }

    fn shared(&self) -> &Arc<Shared> {
        &self.handle.shared
    }
}

/// What a piece is used as. Slabs serve one purpose all their life: see the module's documentation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// The device's: may be written to at any time, never referred to.
    Block,
    /// The application's: written by its owner alone, then frozen.
    Buffer,
}

/// Lives as long as a `Pool` does, while `Shared` waits for the last piece.
#[derive(Debug)]
struct Handle {
    shared: Arc<Shared>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.shared.lock().closed = true;
        self.shared.trim();
    }
}

/// What the pool and all pieces of it share.
#[derive(Debug)]
pub(super) struct Shared {
    domain: Arc<dyn ProtectionDomain>,
    settings: PoolSettings,
    budget: Arc<Budget>,
    index: Arc<FrozenIndex>,
    /// Buffers of this pool in the index, which other pools may use too.
    frozen: AtomicUsize,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    blocks: Arena,
    buffers: Arena,
    leased_send: u64,
    leased_receive: u64,
    registered: u64,
    hits: u64,
    misses: u64,
    closed: bool,
}

impl State {
    fn arena(&mut self, purpose: Purpose) -> &mut Arena {
        match purpose {
            Purpose::Block => &mut self.blocks,
            Purpose::Buffer => &mut self.buffers,
        }
    }

    fn leased(&mut self, quota: Quota) -> &mut u64 {
        match quota {
            Quota::Send => &mut self.leased_send,
            Quota::Receive => &mut self.leased_receive,
        }
    }
}

impl Shared {
    /// A buffer of `length` bytes at `address` can be found from now on.
    pub(super) fn freeze(&self, address: usize, length: usize, frozen: &Arc<Frozen>) {
        self.index.insert(address, length, Arc::downgrade(frozen));
        self.frozen.fetch_add(1, Ordering::Relaxed);
    }

    /// The buffer at `address` can't be found any more.
    pub(super) fn thaw(&self, address: usize) {
        self.index.remove(address);
        self.frozen.fetch_sub(1, Ordering::Relaxed);
    }

    fn obtain(&self, length: usize, quota: Quota, purpose: Purpose) -> Result<Piece, PoolError> {
        let limit = self.settings.limit(quota);
        let mut state = self.lock();
        let capacity = match state.arena(purpose).capacity_for(length) {
            Some(capacity) if capacity as u64 <= limit => capacity,
            _ => return Err(PoolError::TooLarge { quota, asked: length as u64, limit }),
        };
        let (leased, asked) = (*state.leased(quota), capacity as u64);
        let room = limit.saturating_sub(leased);
        if asked > room {
            return Err(PoolError::QuotaExhausted { quota, asked, leased, limit });
        }
        if let Some(piece) = state.arena(purpose).reuse(capacity, room) {
            state.hits += 1;
            *state.leased(quota) += piece.capacity as u64;
            return Ok(piece);
        }
        state.misses += 1;
        *state.leased(quota) += asked;
        if let Some(piece) = state.arena(purpose).cut(capacity) {
            return Ok(piece);
        }
        let common = state.arena(purpose).is_common(capacity);
        drop(state);
        match self.make_slab(capacity, common, purpose) {
            Ok(slab) => {
                let mut state = self.lock();
                state.registered += slab.len() as u64;
                Ok(state.arena(purpose).add(Arc::new(slab), capacity))
            }
            Err(error) => {
                let mut state = self.lock();
                if let Some(piece) = state.arena(purpose).cut_joined(capacity) {
                    return Ok(piece);
                }
                *state.leased(quota) -= asked;
                Err(error)
            }
        }
    }

    /// Takes a piece back; `piece` may be left with the last reference to its slab.
    pub(super) fn give_back(&self, piece: &Piece, quota: Quota, purpose: Purpose) {
        let mut state = self.lock();
        *state.leased(quota) -= piece.capacity as u64;
        // Common slabs are always kept, those of one piece as long as the pool is no larger than its quotas together.
        let quotas = self.settings.send_quota.saturating_add(self.settings.receive_quota);
        let common = state.arena(purpose).is_common(piece.capacity);
        let keep = !state.closed && (common || state.registered <= quotas);
        if state.arena(purpose).give_back(piece, keep) {
            state.registered -= piece.slab.len() as u64;
        }
    }

    /// Makes a slab for a piece of `capacity` bytes. Takes system calls, so never under the lock.
    fn make_slab(&self, capacity: usize, common: bool, purpose: Purpose) -> Result<Slab, PoolError> {
        let access = match purpose {
            Purpose::Block => self.settings.access,
            Purpose::Buffer => {
                Access::from_bits_truncate(self.settings.access.bits() & Access::REMOTE_READ.bits())
            }
        };
        let reservation = self.reserve(capacity, common)?;
        Slab::new(&*self.domain, access, &self.settings, reservation)
    }

    /// Takes the budget of a slab. If it does not suffice, first gives idle slabs back, then makes do with less.
    fn reserve(&self, capacity: usize, common: bool) -> Result<Reservation, PoolError> {
        let page = rustix::param::page_size();
        let smallest = capacity.next_multiple_of(page);
        let mut bytes = if common { self.settings.slab_size } else { smallest };
        if let Ok(reservation) = self.budget.reserve(bytes as u64) {
            return Ok(reservation);
        }
        self.trim();
        loop {
            match self.budget.reserve(bytes as u64) {
                Ok(reservation) => return Ok(reservation),
                Err(error) if bytes == smallest => return Err(error),
                Err(_) => bytes = (bytes / 2).next_multiple_of(page).max(smallest),
            }
        }
    }

    fn trim(&self) {
        let mut state = self.lock();
        let mut idle = state.blocks.remove_idle();
        idle.append(&mut state.buffers.remove_idle());
        state.registered -= idle.iter().map(|slab| slab.len() as u64).sum::<u64>();
        drop(state);
        drop(idle);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
