//! The state that a pool and all its extents share, the slabs in it, and the extents that keep a slab alive.

use std::mem::ManuallyDrop;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use super::arena::{Arena, Extent, Purpose};
use crate::memory::index::AddressIndex;
use crate::memory::settings::{Budget, PoolSettings, PoolStatistics, Quota, Reservation};
use crate::panics::lock;
use crate::{
    Access, HostMemory, LocalSegment, MemoryRegion, ProtectionDomain, RemoteSegment, VerbsError,
    VerbsErrorKind,
};

/// Smallest slab size that a pool uses, in bytes. Only when the budget runs out, the pool makes smaller
/// slabs.
const SMALLEST_SLAB: usize = 64 << 10;

/// Bytes of the first slab of a pool for regions.
const FIRST_REGIONS: usize = 2 << 20;

/// The part of the budget that the slabs of a pool may take, and the slabs that it keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PoolKind {
    /// Slabs of one size, within the quotas.
    Ordinary,
    /// A share of the budget ([`Budget::reserve_in_share`]).
    Share,
    /// Memory of regions. Slabs grow with the pool, up to the size in the settings. The pool keeps at most as
    /// many bytes of slabs of one extent as were leased at a time, in this period or the last one
    /// ([`end_period`](PoolShared::end_period)).
    Regions,
}

/// The state that a pool and all its extents share.
#[derive(Debug)]
pub(crate) struct PoolShared {
    /// The protection domain that slabs are registered with.
    pub(super) domain: Arc<dyn ProtectionDomain>,
    /// The settings, with the slab size rounded.
    pub(super) settings: PoolSettings,
    /// The budget that slabs count against.
    pub(super) budget: Arc<Budget>,
    /// The index of frozen buffers, which other pools may share.
    pub(super) index: Arc<FrozenIndex>,
    kind: PoolKind,
    /// Number of frozen buffers of this pool. The index may contain buffers of other pools, too.
    frozen: AtomicUsize,
    state: Mutex<PoolState>,
}

/// The part of the state that the lock guards.
#[derive(Debug)]
struct PoolState {
    /// By purpose.
    arenas: [Arena; 4],
    /// Bytes leased, by quota.
    leased: [u64; 2],
    /// The most bytes that were leased at a time: in this period, as far as some of them were given back since,
    /// and in the last one.
    peaks: [u64; 2],
    /// Bytes of all slabs.
    registered: u64,
    /// Bytes of the extents that were reserved ahead, and of those among them that were ever in use.
    reserved: [u64; 2],
    /// The most bytes that were leased for sending at a time.
    most_sent: u64,
    hits: u64,
    misses: u64,
    closed: bool,
}

impl PoolState {
    fn arena(&mut self, purpose: Purpose) -> &mut Arena {
        &mut self.arenas[purpose as usize]
    }

    fn leased(&mut self, quota: Quota) -> &mut u64 {
        &mut self.leased[quota as usize]
    }

    fn lease(&mut self, quota: Quota, bytes: u64) {
        *self.leased(quota) += bytes;
        self.most_sent = self.most_sent.max(*self.leased(Quota::Send));
    }

    /// Takes an extent that was reserved ahead for `length` bytes, if one is free.
    fn take_preallocated(&mut self, length: usize, quota: Quota, purpose: Purpose) -> Option<Extent> {
        let (extent, is_unused) = self.arena(purpose).take_reserved(length)?;
        let bytes = extent.capacity as u64;
        self.hits += 1;
        self.reserved[1] += if is_unused { bytes } else { 0 };
        self.lease(quota, bytes);
        Some(extent)
    }

    /// Notes that these slabs have left their arena.
    fn forget(&mut self, slabs: &[Arc<Slab>]) {
        self.registered -= slabs.iter().map(|slab| slab.len() as u64).sum::<u64>();
    }
}

impl PoolShared {
    /// Makes the state of a pool without slabs, whose frozen buffers are found in `index`.
    pub(crate) fn new(
        domain: Arc<dyn ProtectionDomain>,
        settings: PoolSettings,
        budget: Arc<Budget>,
        index: Arc<FrozenIndex>,
        kind: PoolKind,
    ) -> Self {
        let page = rustix::param::page_size();
        let slab_size =
            settings.slab_size.clamp(SMALLEST_SLAB, isize::MAX as usize / 2).next_multiple_of(page);
        let settings = PoolSettings { slab_size, ..settings };
        let state = PoolState {
            arenas: [(); 4].map(|()| Arena::new(slab_size)),
            leased: [0; 2],
            peaks: [0; 2],
            registered: 0,
            reserved: [0; 2],
            most_sent: 0,
            hits: 0,
            misses: 0,
            closed: false,
        };
        let (frozen, state) = (AtomicUsize::new(0), Mutex::new(state));
        Self { domain, settings, budget, index, kind, frozen, state }
    }

    /// Returns the numbers of the pool at this moment.
    pub(crate) fn statistics(&self) -> PoolStatistics {
        let state = self.lock();
        PoolStatistics {
            slabs: state.arenas.iter().map(Arena::slabs).sum(),
            registered: state.registered,
            leased_send: state.leased[Quota::Send as usize],
            leased_receive: state.leased[Quota::Receive as usize],
            preallocated: state.reserved[0],
            preallocated_used: state.reserved[1],
            most_send: state.most_sent,
            frozen: self.frozen.load(Ordering::Relaxed),
            hits: state.hits,
            misses: state.misses,
        }
    }

    /// Closes the pool: frees idle slabs now, and each other slab when its last extent is given back.
    pub(crate) fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        state.arenas.iter_mut().for_each(Arena::end_reservation);
        drop(state);
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

    /// Makes a slab that is cut into extents for exactly these lengths, which only requests of these lengths
    /// get.
    pub(crate) fn preallocate(&self, lengths: &[usize], purpose: Purpose) -> Result<(), VerbsError> {
        let capacities = lengths.iter().map(|length| Arena::reserved_capacity(*length));
        let bytes = capacities.fold(0, usize::saturating_add);
        if bytes == 0 {
            return Ok(());
        }
        if bytes > isize::MAX as usize / 2 {
            return Err(Quota::Send.too_large(bytes, isize::MAX as u64 / 2));
        }
        let slab = self.make_slab(bytes, false, purpose)?;
        let mut state = self.lock();
        state.registered += slab.len() as u64;
        state.reserved[0] += bytes as u64;
        state.arena(purpose).reserve(Arc::new(slab), lengths);
        Ok(())
    }

    /// Obtains an extent that was reserved ahead for `length` bytes, if one is free.
    pub(crate) fn obtain_preallocated(
        &self,
        length: usize,
        quota: Quota,
        purpose: Purpose,
    ) -> Option<Extent> {
        self.lock().take_preallocated(length, quota, purpose)
    }

    /// Obtains an extent for `length` bytes: one that was reserved ahead or in use before, a new one of an
    /// existing slab, or one of a new slab.
    pub(crate) fn obtain(&self, length: usize, quota: Quota, purpose: Purpose) -> Result<Extent, VerbsError> {
        let limit = self.settings.limit(quota);
        let mut state = self.lock();
        if let Some(extent) = state.take_preallocated(length, quota, purpose) {
            return Ok(extent);
        }
        let capacity = match state.arena(purpose).capacity_for(length) {
            Some(capacity) if capacity as u64 <= limit => capacity,
            _ => return Err(quota.too_large(length, limit)),
        };
        let (leased, asked) = (*state.leased(quota), capacity as u64);
        let room = limit.saturating_sub(leased);
        if asked > room {
            drop(state);
            let reason =
                format!("{quota} quota exhausted: asked for {asked} bytes, {leased} of {limit} are leased");
            return Err(VerbsError::new(VerbsErrorKind::QuotaExhausted, reason));
        }
        if let Some(extent) = state.arena(purpose).reuse(capacity, room) {
            state.hits += 1;
            state.lease(quota, extent.capacity as u64);
            return Ok(extent);
        }
        state.misses += 1;
        state.lease(quota, asked);
        if let Some(extent) = state.arena(purpose).cut(capacity) {
            return Ok(extent);
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
                if let Some(extent) = state.arena(purpose).cut_joined(capacity) {
                    return Ok(extent);
                }
                *state.leased(quota) -= asked;
                Err(error)
            }
        }
    }

    /// Takes an extent back. Afterwards `extent` may hold the last reference to its slab.
    pub(crate) fn give_back(&self, extent: &Extent, quota: Quota, purpose: Purpose) {
        let mut state = self.lock();
        // The sum falls here alone.
        state.peaks[0] = state.peaks[0].max(state.leased.iter().sum());
        *state.leased(quota) -= extent.capacity as u64;
        // An open pool keeps all common slabs. It keeps slabs of one extent while it is not larger than the
        // sum of its quotas. A share that is larger than what it leaves free keeps nothing. A pool for regions
        // keeps the slabs of one extent that were given back last.
        let quotas = self.settings.send_quota.saturating_add(self.settings.receive_quota);
        let reserved = state.arena(purpose).is_reserved(extent);
        let common = state.arena(purpose).is_common(extent.capacity);
        let keep = !state.closed
            && (reserved || common || state.registered <= quotas)
            && (reserved
                || self.kind != PoolKind::Share
                || state.registered <= self.budget.free_for_shares());
        if state.arena(purpose).give_back(extent, keep) {
            state.registered -= extent.slab.len() as u64;
        } else if self.kind == PoolKind::Regions && !common && !reserved {
            let [current, last] = state.peaks;
            let old = state.arena(purpose).remove_spares(current.max(last));
            state.forget(&old);
            drop(state);
            drop(old);
        }
    }

    /// Ends a period. Frees the slabs that had no extent in use in all of it. If there are none, this makes no
    /// system call.
    pub(crate) fn end_period(&self) {
        let mut state = self.lock();
        state.peaks = [0, state.peaks[0].max(state.leased.iter().sum())];
        let idle: Vec<_> = state.arenas.iter_mut().flat_map(Arena::end_period).collect();
        state.forget(&idle);
        drop(state);
        drop(idle);
    }

    /// Makes a slab for an extent of `capacity` bytes. Callers must not hold the lock, because this function
    /// makes system calls.
    fn make_slab(&self, capacity: usize, common: bool, purpose: Purpose) -> Result<Slab, VerbsError> {
        let access = match purpose {
            Purpose::Block => self.settings.access,
            // Then READs go to a block, or the landing has a registration of its own.
            Purpose::Landing if self.domain.opens_sinks() => Access::LOCAL_READ,
            // The pool of regions has no domain: `LocalRegistrations` registers their slabs.
            Purpose::Landing | Purpose::Region => Access::LOCAL_WRITE,
            Purpose::Buffer => {
                Access::from_bits_truncate(self.settings.access.bits() & Access::REMOTE_READ.bits())
            }
        };
        let reservation = self.reserve(capacity, common)?;
        Slab::new(&*self.domain, access, &self.settings, reservation)
    }

    /// Reserves the bytes of a slab. If the budget is too small, first frees idle slabs, then reserves a
    /// smaller slab.
    fn reserve(&self, capacity: usize, common: bool) -> Result<Reservation, VerbsError> {
        let page = rustix::param::page_size();
        let smallest = capacity.next_multiple_of(page);
        let mut bytes = match self.kind {
            _ if !common => smallest,
            PoolKind::Regions => {
                let quarter = (self.lock().registered / 4) as usize;
                quarter.clamp(FIRST_REGIONS, self.settings.slab_size).next_multiple_of(page).max(smallest)
            }
            PoolKind::Ordinary | PoolKind::Share => self.settings.slab_size,
        };
        let reserve = |bytes: usize| match self.kind {
            PoolKind::Share => self.budget.reserve_in_share(bytes as u64, self.lock().registered),
            PoolKind::Ordinary | PoolKind::Regions => self.budget.reserve(bytes as u64),
        };
        if let Ok(reservation) = reserve(bytes) {
            return Ok(reservation);
        }
        self.trim();
        loop {
            match reserve(bytes) {
                Ok(reservation) => return Ok(reservation),
                Err(error) if bytes == smallest => return Err(error),
                Err(_) => bytes = (bytes / 2).next_multiple_of(page).max(smallest),
            }
        }
    }

    /// Frees all slabs without an extent in use.
    pub(crate) fn trim(&self) {
        let mut state = self.lock();
        let idle: Vec<_> = state.arenas.iter_mut().flat_map(Arena::remove_idle).collect();
        state.forget(&idle);
        drop(state);
        drop(idle);
    }

    fn lock(&self) -> MutexGuard<'_, PoolState> {
        lock(&self.state)
    }
}

/// An extent that is given back to its pool on drop.
#[derive(Debug)]
pub(crate) struct HeldExtent {
    extent: Extent,
    quota: Quota,
    purpose: Purpose,
    shared: Arc<PoolShared>,
    /// The device may still write to the extent, so the pool must not lease it again.
    in_use: bool,
}

impl HeldExtent {
    /// Makes a held extent, which will return to the pool of `shared`.
    pub(crate) fn new(extent: Extent, quota: Quota, purpose: Purpose, shared: Arc<PoolShared>) -> Self {
        Self { extent, quota, purpose, shared, in_use: false }
    }

    /// Notes whether the device may still write to the extent. An extent that is dropped in use does not go
    /// back to the pool. Its slab then lives as long as the pool.
    pub(crate) fn set_in_use(&mut self, in_use: bool) {
        self.in_use = in_use;
    }

    /// Returns the address of the first byte.
    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.extent.slab.memory().as_ptr().as_ptr().wrapping_add(self.extent.offset)
    }

    /// Returns the capacity in bytes.
    pub(crate) fn capacity(&self) -> usize {
        self.extent.capacity
    }

    /// Returns the offset of the first byte in the slab.
    pub(crate) fn slab_offset(&self) -> usize {
        self.extent.offset
    }

    /// Returns the offset in the slab of `length` bytes at `offset` of this extent.
    pub(crate) fn offset_in_slab(&self, offset: usize, length: usize) -> Result<usize, VerbsError> {
        VerbsError::check_bounds(offset, length, self.extent.capacity)?;
        Ok(self.extent.offset + offset)
    }

    /// Names `range` of this extent for a work request.
    pub(crate) fn segment(&self, range: Range<usize>) -> Result<LocalSegment, VerbsError> {
        VerbsError::check_range(range, self.extent.capacity).map(|range| self.segment_within(range))
    }

    /// Names `range` of this extent for a work request, without a check. A range beyond the extent names
    /// other memory of the slab, or no memory, which the device refuses.
    pub(crate) fn segment_within(&self, range: Range<usize>) -> LocalSegment {
        self.segment_by(self.extent.slab.region(), range)
    }

    /// Names `range` of this extent by another registration of its slab. If the extent is a buffer, that
    /// registration has no right to write.
    pub(crate) fn segment_by(&self, region: &dyn MemoryRegion, range: Range<usize>) -> LocalSegment {
        debug_assert!(range.end <= self.extent.capacity);
        let range = self.extent.offset + range.start..self.extent.offset + range.end;
        // SAFETY:
        // - No request writes to memory with a reference. There is never a reference to `Purpose::Block`
        //   memory, as long as the slab lives. `Purpose::Buffer` slabs are registered without the right to
        //   write, by the slab itself and by `SlabRegistrations`, so the device refuses the request. Both
        //   hold for a segment that outlives this extent, too. Segments of `Purpose::Landing` extents never
        //   leave `Landing`, which makes no reference before its READs have completed, and whose extent is
        //   not leased again if it is dropped earlier.
        // - No request reads memory while a `&mut [u8]` to it exists. `Purpose::Buffer` extents give out
        //   segments only when they are frozen, and the caller keeps the `Lease` until the request has
        //   completed. A caller that drops the lease earlier sends the bytes of the next owner; accesses of
        //   this process stay sound.
        unsafe { LocalSegment::new(region, range) }
    }

    /// Returns the address and key by which a peer with the access rights reaches the byte at `offset`.
    pub(crate) fn remote(&self, offset: usize) -> RemoteSegment {
        RemoteSegment {
            address: (self.as_ptr() as u64).wrapping_add(offset as u64),
            rkey: self.extent.slab.region().rkey(),
        }
    }

    /// Returns the access rights of the region.
    #[cfg(test)]
    pub(crate) fn access(&self) -> crate::Access {
        self.extent.slab.region().access()
    }

    /// Returns whether no byte of the extent was ever part of another one, so that it holds zeros.
    pub(crate) fn is_new(&self) -> bool {
        self.extent.is_new
    }

    /// Returns the slab.
    pub(crate) fn slab(&self) -> &Arc<Slab> {
        &self.extent.slab
    }

    /// Returns the memory of the slab.
    pub(crate) fn memory(&self) -> &HostMemory {
        self.extent.slab.memory()
    }

    /// Copies `source`, which the device sends, or peers read, to `start` in the slab.
    pub(crate) fn copy_in(&self, start: usize, source: &[u8]) -> Result<(), VerbsError> {
        if self.shared.domain.is_read_by_cores() {
            return self.memory().copy_in_for_peers(start, source);
        }
        self.memory().copy_in(start, source)
    }
}

impl Drop for HeldExtent {
    fn drop(&mut self) {
        if self.in_use {
            return;
        }
        self.shared.give_back(&self.extent, self.quota, self.purpose);
        // A slab that the pool did not keep is dropped with the fields, outside the lock.
    }
}

/// Frozen buffers by address.
pub(crate) type FrozenIndex = AddressIndex<Weak<FrozenBuffer>>;

/// A buffer that is not written to any more. The index of its pool contains the buffer.
#[derive(Debug)]
pub(crate) struct FrozenBuffer {
    /// Dropped with this value, unless [`thaw`](Self::thaw) takes it out.
    pub(crate) held: ManuallyDrop<HeldExtent>,
    pub(crate) length: usize,
}

impl FrozenBuffer {
    /// Freezes the first `length` bytes of `held`, and adds them to the index.
    pub(crate) fn new(held: HeldExtent, length: usize) -> Arc<Self> {
        let address = held.as_ptr() as usize;
        let frozen = Arc::new(Self { held: ManuallyDrop::new(held), length });
        frozen.held.shared.freeze(address, length, &frozen);
        frozen
    }

    /// Removes the buffer from the index, and returns its extent.
    pub(crate) fn thaw(self) -> HeldExtent {
        let mut this = ManuallyDrop::new(self);
        this.held.shared.thaw(this.held.as_ptr() as usize);
        // SAFETY: `this` is never dropped and is not used after this line, so the extent is taken once.
        unsafe { ManuallyDrop::take(&mut this.held) }
    }
}

impl Drop for FrozenBuffer {
    fn drop(&mut self) {
        // The buffer leaves the index before the extent goes back to the pool, because the memory may become
        // another buffer at once.
        self.held.shared.thaw(self.held.as_ptr() as usize);
        // SAFETY: the extent is dropped only here. `thaw` takes the extent, but prevents the drop of the
        // value.
        unsafe { ManuallyDrop::drop(&mut self.held) }
    }
}

/// Bytes of a huge page.
const HUGE_PAGE: usize = 2 << 20;

/// Shared memory that is registered as a whole. The order of the fields is the order of their drop: first the
/// registration, then the memory. The memory holds the reservation of the budget, which peers that map the
/// memory may hold longer.
#[derive(Debug)]
pub(crate) struct Slab {
    region: Arc<dyn MemoryRegion>,
    memory: Arc<HostMemory>,
}

impl Slab {
    /// Maps and registers the bytes of `reservation`. Each step is a system call.
    pub(crate) fn new(
        domain: &dyn ProtectionDomain,
        access: Access,
        settings: &PoolSettings,
        reservation: Reservation,
    ) -> Result<Self, VerbsError> {
        let bytes = reservation.bytes;
        let registered = map(reservation, settings.huge_pages).and_then(|memory| {
            let region = domain.register(Arc::clone(&memory), access)?;
            Ok(Self { region, memory })
        });
        registered.map_err(|cause| cause.not_registered(bytes))
    }

    /// Returns the region over all of the slab.
    pub(crate) fn region(&self) -> &dyn MemoryRegion {
        &*self.region
    }

    /// Returns the memory.
    pub(crate) fn memory(&self) -> &Arc<HostMemory> {
        &self.memory
    }

    /// Returns the length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.memory.len()
    }
}

/// Maps the bytes of `reservation`, which are whole pages, aligned to huge pages if there are so many. The
/// memory holds the reservation.
fn map(reservation: Reservation, huge_pages: bool) -> Result<Arc<HostMemory>, VerbsError> {
    let length = reservation.bytes as usize;
    let alignment = if length >= HUGE_PAGE { HUGE_PAGE } else { rustix::param::page_size() };
    let memory = HostMemory::shared(length, alignment)?;
    if huge_pages && length >= HUGE_PAGE {
        advise_huge_pages(&memory);
    }
    memory.set_charge(Arc::new(reservation));
    Ok(Arc::new(memory))
}

/// Asks the kernel for huge pages. This is a hint: a kernel that ignores it uses small pages.
fn advise_huge_pages(memory: &HostMemory) {
    // SAFETY:
    // - The range is one live mapping of this process (`HostMemory`).
    // - This advice changes neither the content nor the validity of a page.
    let _ = unsafe {
        rustix::mm::madvise(memory.as_ptr().as_ptr().cast(), memory.len(), rustix::mm::Advice::LinuxHugepage)
    };
}
