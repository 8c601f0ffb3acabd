//! The limits of pools: their settings and numbers, and the budget that several pools share.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::process::Resource;
use rustix::thread::CapabilitySet;

use crate::{Access, VerbsError, VerbsErrorKind};

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
    /// Access rights of the slabs of blocks. Slabs of [`RegisteredBuf`](super::RegisteredBuf)s have only the
    /// right of peers to read, if it is among these rights.
    pub access: Access,
    /// Bytes of a slab, at least 64 KiB, rounded up to whole pages. Slabs of 2 MiB and more are aligned to 2
    /// MiB. A request for more than half a slab gets its own slab.
    pub slab_size: usize,
    /// Bytes that may be leased for sending at a time, buffers included.
    pub send_quota: u64,
    /// Bytes that may be leased for receiving at a time.
    pub receive_quota: u64,
    /// Whether to ask the kernel for transparent huge pages for slabs. The kernel does this only if the
    /// administrator allows it (`/sys/kernel/mm/transparent_hugepage/shmem_enabled` is `advise`). Then a slab
    /// becomes resident as a whole at its first use.
    pub huge_pages: bool,
}

impl Default for PoolSettings {
    /// Returns settings with local writes and remote reads, slabs of 2 MiB, quotas of 1 GiB each, and huge
    /// pages.
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

/// One of the two quotas of a pool. Each lease counts against one of them, so neither direction can starve
/// the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Quota {
    /// Memory that content is sent from.
    Send,
    /// Memory that content is received in.
    Receive,
}

impl Quota {
    /// Returns the error of a request that a pool with a quota of `limit` bytes can never serve.
    pub(super) fn too_large(self, asked: usize, limit: u64) -> VerbsError {
        let reason = format!("{asked} bytes are more than the {self} quota of {limit} bytes");
        VerbsError::new(VerbsErrorKind::TooLarge, reason)
    }
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
    /// Bytes of the buffers that were [preallocated](super::Pool::preallocate).
    pub preallocated: u64,
    /// Bytes of those among them that were in use at least once.
    pub preallocated_used: u64,
    /// The most bytes that were leased against the send quota at a time.
    pub most_send: u64,
    /// Number of frozen buffers, which a lookup by address finds.
    pub frozen: usize,
    /// Number of requests that got an extent which was in use before.
    pub hits: u64,
    /// Number of requests that needed a new extent of a slab, or a new slab.
    pub misses: u64,
}

/// A limit on the bytes that pools register. All pools that are made with one budget share the limit.
#[derive(Debug)]
pub struct Budget {
    limit: u64,
    used: AtomicU64,
    source: LimitSource,
    /// The bytes of the budget that this one is a part of.
    _whole: Option<Reservation>,
}

/// The source of the limit, which determines how a user can raise it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LimitSource {
    /// The default, or a value that the user configured.
    Configuration,
    /// `RLIMIT_MEMLOCK`.
    Memlock,
}

impl Budget {
    /// The limit if neither the user nor the system sets one: 2 GiB.
    pub const DEFAULT_LIMIT: u64 = 2 << 30;

    /// Makes a budget of `limit` bytes.
    ///
    /// ```
    /// use tonic_rdma_verbs::memory::Budget;
    ///
    /// let budget = Budget::new(64 << 20);
    /// assert_eq!((budget.limit(), budget.used()), (64 << 20, 0));
    /// ```
    pub fn new(limit: u64) -> Arc<Self> {
        Self::bounded_by(limit, LimitSource::Configuration)
    }

    /// Makes a budget for this process of `configured` bytes, or else [`DEFAULT_LIMIT`](Self::DEFAULT_LIMIT).
    /// If the device locks registered memory (`DeviceAttributes::locks_memory`), the limit is at most
    /// `RLIMIT_MEMLOCK`. A process with `CAP_IPC_LOCK` is not bound by `RLIMIT_MEMLOCK`. Each call makes a
    /// new budget, so a program calls this once and shares the result.
    ///
    /// ```
    /// use tonic_rdma_verbs::memory::Budget;
    ///
    /// let budget = Budget::for_process(false, None);
    /// assert_eq!(budget.limit(), Budget::DEFAULT_LIMIT);
    /// ```
    pub fn for_process(locks_memory: bool, configured: Option<u64>) -> Arc<Self> {
        let memlock = if locks_memory && !may_lock_without_limit() {
            rustix::process::getrlimit(Resource::Memlock).current
        } else {
            None
        };
        let (limit, source) = process_limit(configured, memlock);
        Self::bounded_by(limit, source)
    }

    /// Returns the number of bytes that may be pinned.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Returns the number of bytes that are pinned.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Returns the number of bytes that may still be pinned.
    pub fn available(&self) -> u64 {
        self.limit.saturating_sub(self.used())
    }

    fn bounded_by(limit: u64, source: LimitSource) -> Arc<Self> {
        Arc::new(Self { limit, used: AtomicU64::new(0), source, _whole: None })
    }

    /// Makes a budget of `bytes` that are reserved from this one until the last user of the part is gone.
    pub(crate) fn part(self: &Arc<Self>, bytes: u64) -> Result<Arc<Self>, VerbsError> {
        let (used, whole) = (AtomicU64::new(0), Some(self.reserve(bytes)?));
        Ok(Arc::new(Self { limit: bytes, used, source: self.source, _whole: whole }))
    }

    /// Reserves `bytes` until the reservation is dropped.
    pub(crate) fn reserve(self: &Arc<Self>, bytes: u64) -> Result<Reservation, VerbsError> {
        self.reserve_if(bytes, |total| total <= self.limit)
    }

    /// Reserves `bytes` for a share that has `held` bytes: it gets them if it then holds at most as much as it
    /// leaves to other shares. So no number of shares takes all that they may have, and the first that gives
    /// memory back makes room for every other.
    pub(crate) fn reserve_in_share(
        self: &Arc<Self>,
        bytes: u64,
        held: u64,
    ) -> Result<Reservation, VerbsError> {
        self.reserve_if(bytes, |total| held.saturating_add(bytes) <= self.left_to_shares(total))
    }

    /// Returns the bytes that shares may still have. They leave an eighth of the limit to all else, such as
    /// the receive buffers of new connections.
    pub(crate) fn free_for_shares(&self) -> u64 {
        self.left_to_shares(self.used())
    }

    fn left_to_shares(&self, used: u64) -> u64 {
        (self.limit - self.limit / 8).saturating_sub(used)
    }

    fn reserve_if(
        self: &Arc<Self>,
        bytes: u64,
        admits: impl Fn(u64) -> bool,
    ) -> Result<Reservation, VerbsError> {
        // Relaxed: the count protects no other memory.
        let outcome = self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
            used.checked_add(bytes).filter(|&total| admits(total))
        });
        match outcome {
            Ok(_) => Ok(Reservation { budget: Arc::clone(self), bytes }),
            Err(used) => {
                let (limit, hint) = (self.limit, self.source.hint());
                let reason =
                    format!("pinned memory: asked for {bytes} bytes, {used} of {limit} are in use; {hint}");
                Err(VerbsError::new(VerbsErrorKind::NoMemory, reason))
            }
        }
    }
}

impl LimitSource {
    /// Returns the advice for raising the limit.
    fn hint(self) -> &'static str {
        match self {
            Self::Configuration => {
                "raise RDMA_PINNED_LIMIT, or keep fewer connections and messages in flight"
            }
            Self::Memlock => {
                "raise the limit on locked memory: `ulimit -l` in a shell, LimitMEMLOCK= in a systemd unit, \
                 memlock in /etc/security/limits.conf"
            }
        }
    }
}

/// Bytes reserved from a budget. They return to the budget on drop.
#[derive(Debug)]
pub(crate) struct Reservation {
    budget: Arc<Budget>,
    pub(super) bytes: u64,
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Returns whether the kernel lets this process lock memory without limit. (`ib_umem_get` checks this
/// capability.)
fn may_lock_without_limit() -> bool {
    rustix::thread::capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::IPC_LOCK))
}

/// Returns the smaller limit, and its source.
fn process_limit(configured: Option<u64>, memlock: Option<u64>) -> (u64, LimitSource) {
    let wanted = configured.unwrap_or(Budget::DEFAULT_LIMIT);
    match memlock {
        Some(memlock) if memlock < wanted => (memlock, LimitSource::Memlock),
        _ => (wanted, LimitSource::Configuration),
    }
}

#[cfg(test)]
mod budget_tests {
    use super::*;

    #[test]
    fn the_smallest_limit_holds_and_names_its_cure() {
        assert_eq!(process_limit(None, None), (2 << 30, LimitSource::Configuration));
        assert_eq!(process_limit(Some(10), None), (10, LimitSource::Configuration));
        assert_eq!(process_limit(Some(10), Some(20)), (10, LimitSource::Configuration));
        assert_eq!(process_limit(None, Some(65_536)), (65_536, LimitSource::Memlock));
        let error =
            Budget::bounded_by(65_536, LimitSource::Memlock).reserve(65_537).expect_err("one byte too many");
        assert!(error.to_string().contains("`ulimit -l`"), "{error}");
        let error = Budget::new(10).reserve(11).expect_err("one byte too many");
        assert!(error.to_string().contains("RDMA_PINNED_LIMIT"), "{error}");
    }

    #[test]
    fn a_device_that_locks_nothing_is_not_bound_by_memlock() {
        assert_eq!(Budget::for_process(false, Some(u64::MAX)).limit(), u64::MAX);
        assert_eq!(Budget::for_process(false, None).limit(), Budget::DEFAULT_LIMIT);
    }

    #[test]
    fn a_device_that_locks_is_bound_by_memlock_unless_privileged() {
        let source =
            rustix::process::getrlimit(Resource::Memlock).current.filter(|_| !may_lock_without_limit());
        assert_eq!(Budget::for_process(true, Some(u64::MAX)).limit(), source.unwrap_or(u64::MAX));
    }

    #[test]
    fn reservations_add_up_and_come_back() {
        let budget = Budget::new(100);
        let first = budget.reserve(60).expect("60 of 100");
        assert!(budget.reserve(41).is_err());
        assert!(budget.reserve(u64::MAX).is_err(), "no overflow");
        let second = budget.reserve(40).expect("the rest");
        assert_eq!((budget.used(), budget.available()), (100, 0));
        drop(first);
        assert_eq!((budget.used(), budget.available()), (40, 60));
        drop(second);
        assert_eq!(budget.used(), 0);
    }

    /// Takes steps of `step` bytes as a share until it gets no more.
    fn take_all(budget: &Arc<Budget>, step: u64) -> (Vec<Reservation>, u64) {
        let (mut taken, mut held) = (Vec::new(), 0);
        while let Ok(more) = budget.reserve_in_share(step, held) {
            taken.push(more);
            held += step;
        }
        (taken, held)
    }

    #[test]
    fn shares_that_take_all_they_get_leave_something_to_the_next_and_to_all_else() {
        let budget = Budget::new(4000);
        let mut hostile = Vec::new();
        let mut least = u64::MAX;
        for _ in 0..20 {
            // Each comes with a reserve of its own, such as that of its first read.
            let reserve = budget.part(10).expect("the reserve of the next");
            let (taken, held) = take_all(&budget, 1);
            assert!(held <= budget.free_for_shares(), "{held}");
            assert!(held <= least, "no share gets more than those before it");
            assert!(budget.available() >= 500 - 20 * 10, "an eighth is left to reserves and all else");
            least = held;
            hostile.push((reserve, taken));
        }
        assert!(hostile[0].1.len() > 1700, "one alone gets half of what shares may have");
        // A reserve is there although its connection holds nothing else.
        let (reserve, _) = hostile.last().expect("twenty");
        assert!(reserve.reserve(10).is_ok() && reserve.reserve(11).is_err());
        hostile.clear();
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn a_share_that_gets_nothing_keeps_no_smaller_one_waiting() {
        let budget = Budget::new(4000);
        assert!(budget.reserve_in_share(1751, 0).is_err(), "more than half of what shares may have");
        let first = budget.reserve_in_share(1700, 0).expect("a smaller one");
        assert!(budget.reserve_in_share(51, 1700).is_err(), "what it holds already counts");
        let small = budget.reserve_in_share(101, 0).expect("another holds nothing");
        let others = budget.reserve(1699).expect("all else takes what it likes");
        assert!(
            budget.reserve_in_share(1, 0).is_err(),
            "only the eighth is left, and that is not for shares"
        );
        drop((first, small, others));
        assert!(budget.reserve_in_share(1750, 0).is_ok());
        assert!(budget.reserve_in_share(u64::MAX, 1).is_err(), "no overflow");
    }

    #[test]
    fn a_part_is_reserved_until_its_last_user_is_gone() {
        let budget = Budget::new(100);
        let part = budget.part(60).expect("60 of 100");
        assert!(budget.part(41).is_err());
        let used = part.reserve(50).expect("50 of 60");
        assert!(part.reserve(11).is_err());
        drop(part);
        assert_eq!(budget.used(), 60);
        drop(used);
        assert_eq!(budget.used(), 0);
    }
}
