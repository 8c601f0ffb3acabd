//! The state that a pool and all its pieces share.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use super::super::budget::{Budget, Reservation};
use super::super::error::PoolError;
use super::super::settings::{PoolSettings, PoolStatistics, Quota};
use super::arena::{Arena, Piece, Purpose};
use super::frozen::{FrozenBuffer, FrozenIndex};
use super::slab::Slab;
use crate::sync::lock;
use crate::{Access, ProtectionDomain};

/// Smallest slab size that a pool uses, in bytes. Only when the budget runs out, the pool makes smaller slabs.
const SMALLEST_SLAB: usize = 64 << 10;

/// The state that a pool and all its pieces share.
#[derive(Debug)]
pub(crate) struct PoolShared {
    domain: Arc<dyn ProtectionDomain>,
    settings: PoolSettings,
    budget: Arc<Budget>,
    index: Arc<FrozenIndex>,
    /// Number of frozen buffers of this pool. The index may contain buffers of other pools, too.
    frozen: AtomicUsize,
    state: Mutex<PoolState>,
}

/// The part of the state that the lock guards.
#[derive(Debug)]
struct PoolState {
    blocks: Arena,
    buffers: Arena,
    landings: Arena,
    /// Bytes leased against the send quota.
    leased_send: u64,
    /// Bytes leased against the receive quota.
    leased_receive: u64,
    /// Bytes of all slabs.
    registered: u64,
    hits: u64,
    misses: u64,
    closed: bool,
}

impl PoolState {
    fn arena(&mut self, purpose: Purpose) -> &mut Arena {
        match purpose {
            Purpose::Block => &mut self.blocks,
            Purpose::Buffer => &mut self.buffers,
            Purpose::Landing => &mut self.landings,
        }
    }

    fn leased(&mut self, quota: Quota) -> &mut u64 {
        match quota {
            Quota::Send => &mut self.leased_send,
            Quota::Receive => &mut self.leased_receive,
        }
    }
}

impl PoolShared {
    /// Makes the state of a pool without slabs, whose frozen buffers are found in `index`.
    pub(crate) fn new(
        domain: Arc<dyn ProtectionDomain>,
        settings: PoolSettings,
        budget: Arc<Budget>,
        index: Arc<FrozenIndex>,
    ) -> Self {
        let page = rustix::param::page_size();
        let slab_size =
            settings.slab_size.clamp(SMALLEST_SLAB, isize::MAX as usize / 2).next_multiple_of(page);
        let settings = PoolSettings { slab_size, ..settings };
        let state = PoolState {
            blocks: Arena::new(slab_size),
            buffers: Arena::new(slab_size),
            landings: Arena::new(slab_size),
            leased_send: 0,
            leased_receive: 0,
            registered: 0,
            hits: 0,
            misses: 0,
            closed: false,
        };
        Self { domain, settings, budget, index, frozen: AtomicUsize::new(0), state: Mutex::new(state) }
    }

    /// Returns the settings, with the slab size rounded.
    pub(crate) fn settings(&self) -> &PoolSettings {
        &self.settings
    }

    /// Returns the protection domain that slabs are registered with.
    pub(crate) fn domain(&self) -> &dyn ProtectionDomain {
        &*self.domain
    }

    /// Returns the budget that slabs count against.
    pub(crate) fn budget(&self) -> &Arc<Budget> {
        &self.budget
    }

    /// Returns the index of frozen buffers, which other pools may share.
    pub(crate) fn index(&self) -> &FrozenIndex {
        &self.index
    }

    /// Returns the numbers of the pool at this moment.
    pub(crate) fn statistics(&self) -> PoolStatistics {
        let state = self.lock();
        PoolStatistics {
            slabs: state.blocks.slabs() + state.buffers.slabs() + state.landings.slabs(),
            registered: state.registered,
            leased_send: state.leased_send,
            leased_receive: state.leased_receive,
            frozen: self.frozen.load(Ordering::Relaxed),
            hits: state.hits,
            misses: state.misses,
        }
    }

    /// Closes the pool: frees idle slabs now, and each other slab when its last piece is given back.
    pub(crate) fn close(&self) {
        self.lock().closed = true;
        self.trim();
    }

    /// Adds a frozen buffer of `length` bytes at `address` to the index.
    pub(crate) fn freeze(&self, address: usize, length: usize, frozen: &Arc<FrozenBuffer>) {
        self.index.insert(address, length, Arc::downgrade(frozen));
        self.frozen.fetch_add(1, Ordering::Relaxed);
    }

    /// Removes the frozen buffer at `address` from the index.
    pub(crate) fn thaw(&self, address: usize) {
        self.index.remove(address);
        self.frozen.fetch_sub(1, Ordering::Relaxed);
    }

    /// Obtains a piece for `length` bytes: one that was in use before, a new one of an existing slab, or one of a new slab.
    pub(crate) fn obtain(&self, length: usize, quota: Quota, purpose: Purpose) -> Result<Piece, PoolError> {
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

    /// Takes a piece back. Afterwards `piece` may hold the last reference to its slab.
    pub(crate) fn give_back(&self, piece: &Piece, quota: Quota, purpose: Purpose) {
        let mut state = self.lock();
        *state.leased(quota) -= piece.capacity as u64;
        // An open pool keeps all common slabs. It keeps slabs of one piece while it is not larger than the sum of its quotas.
        let quotas = self.settings.send_quota.saturating_add(self.settings.receive_quota);
        let common = state.arena(purpose).is_common(piece.capacity);
        let keep = !state.closed && (common || state.registered <= quotas);
        if state.arena(purpose).give_back(piece, keep) {
            state.registered -= piece.slab.len() as u64;
        }
    }

    /// Makes a slab for a piece of `capacity` bytes. Callers must not hold the lock, because this function makes system calls.
    fn make_slab(&self, capacity: usize, common: bool, purpose: Purpose) -> Result<Slab, PoolError> {
        let access = match purpose {
            Purpose::Block => self.settings.access,
            // Each landing then has a registration of its own.
            Purpose::Landing if self.domain.opens_sinks() => Access::LOCAL_READ,
            Purpose::Landing => Access::LOCAL_WRITE,
            Purpose::Buffer => {
                Access::from_bits_truncate(self.settings.access.bits() & Access::REMOTE_READ.bits())
            }
        };
        let reservation = self.reserve(capacity, common)?;
        Slab::new(&*self.domain, access, &self.settings, reservation)
    }

    /// Reserves the bytes of a slab. If the budget is too small, first frees idle slabs, then reserves a smaller slab.
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

    /// Frees all slabs without a piece in use.
    pub(crate) fn trim(&self) {
        let mut state = self.lock();
        let mut idle = state.blocks.remove_idle();
        idle.append(&mut state.buffers.remove_idle());
        idle.append(&mut state.landings.remove_idle());
        state.registered -= idle.iter().map(|slab| slab.len() as u64).sum::<u64>();
        drop(state);
        drop(idle);
    }

    fn lock(&self) -> MutexGuard<'_, PoolState> {
        lock(&self.state)
    }
}
