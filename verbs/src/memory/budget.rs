//! The budget: a limit on the pinned memory of all pools that share the budget, usually all pools of a process.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::process::Resource;
use rustix::thread::CapabilitySet;

use super::error::PoolError;

/// A limit on the bytes that pools register. All pools that are made with one budget share the limit.
#[derive(Debug)]
pub struct Budget {
    limit: u64,
    used: AtomicU64,
    source: LimitSource,
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

    /// Makes a budget for this process of `configured` bytes, or else [`DEFAULT_LIMIT`](Self::DEFAULT_LIMIT). If the device
    /// locks registered memory (`DeviceAttributes::locks_memory`), the limit is at most `RLIMIT_MEMLOCK`. A process with
    /// `CAP_IPC_LOCK` is not bound by `RLIMIT_MEMLOCK`. Each call makes a new budget, so a program calls this once and shares
    /// the result.
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
        Arc::new(Self { limit, used: AtomicU64::new(0), source })
    }

    /// Reserves `bytes` until the reservation is dropped.
    pub(crate) fn reserve(self: &Arc<Self>, bytes: u64) -> Result<Reservation, PoolError> {
        // Relaxed: the count protects no other memory.
        let outcome = self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
            used.checked_add(bytes).filter(|&total| total <= self.limit)
        });
        match outcome {
            Ok(_) => Ok(Reservation { budget: Arc::clone(self), bytes }),
            Err(used) => {
                Err(PoolError::Budget { asked: bytes, used, limit: self.limit, hint: self.source.hint() })
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
    bytes: u64,
}

impl Reservation {
    /// Returns the number of reserved bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Returns whether the kernel lets this process lock memory without limit. (`ib_umem_get` checks this capability.)
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
mod tests {
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
}
