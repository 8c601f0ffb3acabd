//! The budget of landed messages: how much memory of a connection their readers may hold.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;

use bytes::Bytes;
use tonic_rdma_verbs::unstable::wake_all;

/// The memory that landed messages of one connection may occupy, while they arrive and until the application
/// drops them.
///
/// One call gets at most as much as it leaves to others, except that a call without any memory gets what is
/// free. So a call whose reader keeps everything stops while others go on. Messages that no reader waits for
/// yet get one half of the budget, so that calls which are not read can't take all of it.
#[derive(Debug)]
pub(crate) struct LandingBudget {
    limit: u64,
    state: Mutex<BudgetState>,
}

#[derive(Debug, Default)]
struct BudgetState {
    used: u64,
    waiting: Vec<Waker>,
}

impl Default for LandingBudget {
    /// Returns a budget without a limit.
    fn default() -> Self {
        Self { limit: u64::MAX, state: Mutex::default() }
    }
}

/// The memory of one call.
#[derive(Clone, Debug, Default)]
pub(crate) struct CallShare(Arc<AtomicU64>);

impl LandingBudget {
    /// Makes a budget of `limit` bytes.
    pub(crate) fn new(limit: u64) -> Arc<Self> {
        Arc::new(Self { limit, state: Mutex::default() })
    }

    /// Admits a message of `length` bytes, if there is room for it. `waker` is that of the reader, if the
    /// reader waits for the message; it is woken when memory comes back.
    pub(crate) fn admit(
        self: &Arc<Self>,
        length: u64,
        share: &CallShare,
        waker: Option<&Waker>,
    ) -> Option<Charge> {
        let mut state = self.lock();
        let free = self.limit.saturating_sub(state.used);
        // Relaxed: the lock guards the share.
        let held = share.0.load(Ordering::Relaxed);
        let most = if held == 0 { free } else { free.saturating_sub(held) };
        let most = if waker.is_some() { most } else { most.min(free.saturating_sub(self.limit / 2)) };
        if length > most {
            if let Some(waker) =
                waker.filter(|waker| !state.waiting.iter().any(|known| known.will_wake(waker)))
            {
                state.waiting.push(waker.clone());
            }
            return None;
        }
        state.used += length;
        share.0.store(held + length, Ordering::Relaxed);
        Some(Charge { budget: Arc::clone(self), share: share.clone(), bytes: length })
    }

    /// Returns the limit, in bytes.
    pub(crate) fn limit(&self) -> u64 {
        self.limit
    }

    /// Says how much of the budget is in use, and what to do about it.
    pub(crate) fn describe(&self) -> String {
        format!(
            "messages that arrive or that the application holds have {} bytes of the landing budget of {} bytes; drop them sooner, or \
             raise CallConfig::landing_budget",
            self.lock().used,
            self.limit
        )
    }

    fn lock(&self) -> MutexGuard<'_, BudgetState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Bytes of a budget. They come back on drop, which wakes the tasks that wait for memory.
#[derive(Debug)]
pub(crate) struct Charge {
    budget: Arc<LandingBudget>,
    share: CallShare,
    bytes: u64,
}

impl Charge {
    /// Returns `bytes` as memory that holds this charge. The charge ends when the last clone and slice of the
    /// result is dropped.
    pub(crate) fn hold(self, bytes: Bytes) -> Bytes {
        Bytes::from_owner(Charged { bytes, _charge: self })
    }
}

impl Charge {
    /// Ends the charge under a lock: the caller wakes `wakers` without it.
    pub(crate) fn release(mut self, wakers: &mut Vec<Waker>) {
        wakers.append(&mut self.give_back());
    }

    /// Gives the memory back. Returns the tasks that wait for memory.
    fn give_back(&mut self) -> Vec<Waker> {
        let bytes = std::mem::take(&mut self.bytes);
        let mut state = self.budget.lock();
        state.used -= bytes;
        self.share.0.fetch_sub(bytes, Ordering::Relaxed);
        std::mem::take(&mut state.waiting)
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        wake_all(self.give_back());
    }
}

/// Memory with its charge. The memory is dropped first.
struct Charged {
    bytes: Bytes,
    _charge: Charge,
}

impl AsRef<[u8]> for Charged {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use std::sync::atomic::AtomicUsize;
    use std::task::Wake;

    use super::*;

    #[test]
    fn a_call_that_keeps_its_memory_leaves_as_much_to_others() {
        let (budget, waits) = (LandingBudget::new(100), Some(Waker::noop()));
        let (hoarder, other) = (CallShare::default(), CallShare::default());
        assert!(budget.admit(101, &other, waits).is_none());
        let held: Vec<_> = std::iter::from_fn(|| budget.admit(10, &hoarder, waits)).collect();
        assert_eq!(held.len(), 5);
        let first = budget.admit(40, &other, waits).unwrap();
        assert!(budget.admit(6, &other, waits).is_none());
        drop(first);
        let most = budget.admit(50, &other, waits);
        assert!(most.is_some(), "a call without memory gets what is free");
        drop((held, most));
        assert!(budget.admit(100, &hoarder, waits).is_some());
    }

    #[test]
    fn messages_that_no_reader_waits_for_get_one_half() {
        let budget = LandingBudget::new(100);
        let ahead = |length| budget.admit(length, &CallShare::default(), None);
        let first = ahead(30).unwrap();
        assert!(ahead(21).is_none());
        let second = ahead(20).unwrap();
        assert!(ahead(1).is_none());
        assert!(budget.admit(50, &CallShare::default(), Some(Waker::noop())).is_some());
        drop((first, second));
        assert!(ahead(50).is_some());
    }

    #[test]
    fn a_slice_holds_the_charge() {
        let (budget, waits) = (LandingBudget::new(100), Some(Waker::noop()));
        let bytes = budget.admit(60, &CallShare::default(), waits).unwrap().hold(Bytes::from(vec![7; 60]));
        let part = bytes.slice(10..20);
        drop(bytes);
        assert!(budget.admit(41, &CallShare::default(), waits).is_none());
        assert!(budget.describe().contains("60 bytes of the landing budget of 100 bytes"));
        drop(part);
        assert!(budget.admit(100, &CallShare::default(), waits).is_some());
    }

    #[test]
    fn memory_that_comes_back_wakes_each_reader_once() {
        #[derive(Default)]
        struct Wakes(AtomicUsize);
        impl Wake for Wakes {
            fn wake(self: Arc<Self>) {
                self.0.fetch_add(1, Ordering::SeqCst);
            }
        }
        let (budget, share) = (LandingBudget::new(100), CallShare::default());
        let held = budget.admit(100, &share, Some(Waker::noop())).unwrap();
        let wakes = Arc::new(Wakes::default());
        let waker = Waker::from(Arc::clone(&wakes));
        assert!(budget.admit(1, &share, Some(&waker)).is_none());
        assert!(budget.admit(1, &share, Some(&waker)).is_none());
        assert_eq!(wakes.0.load(Ordering::SeqCst), 0);
        drop(held);
        assert_eq!(wakes.0.load(Ordering::SeqCst), 1);
        drop(budget.admit(100, &share, Some(&waker)).unwrap());
        assert_eq!(wakes.0.load(Ordering::SeqCst), 1, "nothing waits any more");
    }
}
